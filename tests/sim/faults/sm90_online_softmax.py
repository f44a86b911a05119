"""Faults of the Hopper forward's online softmax, and of scores that are computed once more."""

from mutants import Mutant

UPPER_ROW, LOWER_ROW = "min(upper, nq - 1)", "min(upper + 8, nq - 1)"
KEY = "min(column + (pair >> 1) * 8 + (pair & 1), nk - 1)"
Q_HEAD = "b * q_stride[0] + h * q_stride[2]"
K_HEAD = "b * k_stride[0] + h_kv * k_stride[2]"
BELOW = "add_products(below, q, q_below + 4 * piece, k, k_at + 4 * piece)"
ABOVE = "add_products(above, q, q_upper + 4 * piece, k, k_at + 4 * piece)"
SCORES = (
    Mutant("row past the end", UPPER_ROW, "upper"),
    Mutant("lower row past the end", LOWER_ROW, "upper + 8"),
    Mutant("upper row twice", LOWER_ROW, UPPER_ROW),
    Mutant("4 rows below", LOWER_ROW, "min(upper + 4, nq - 1)"),
    Mutant("last row left out", LOWER_ROW, "min(upper + 8, nq - 2)"),
    Mutant("row tile 0", "row * TILE_M + row_of_thread(thread)", "row_of_thread(thread)"),
    Mutant("key past the end", KEY, KEY.removeprefix("min(").removesuffix(", nk - 1)")),
    Mutant("last key left out", KEY, KEY.replace("nk - 1", "nk - 2")),
    Mutant("keys of the first tile", "n0 + thread % 4 * 2", "thread % 4 * 2"),
    Mutant("keys of the first lane", "n0 + thread % 4 * 2", "n0"),
    Mutant("keys in steps of 4", "(pair >> 1) * 8", "(pair >> 1) * 4"),
    Mutant("every other key", "(pair & 1)", "0"),
    Mutant("all but the last key", "opaque(types.int32(PAIRS))", "opaque(types.int32(PAIRS - 1))"),
    Mutant("key head of the query head", "k_stride[0] + h_kv", "k_stride[0] + h"),
    Mutant("Q of head 0", Q_HEAD, "b * q_stride[0]"),
    Mutant("Q of batch 0", Q_HEAD, "h * q_stride[2]"),
    Mutant("h and b of Q swapped", Q_HEAD, "h * q_stride[0] + b * q_stride[2]"),
    Mutant("K of head 0", K_HEAD, "b * k_stride[0]"),
    Mutant("K of batch 0", K_HEAD, "h_kv * k_stride[2]"),
    Mutant("h and b of K swapped", K_HEAD, "h_kv * k_stride[0] + b * k_stride[2]"),
    Mutant("K as far apart as Q", "key * k_stride[1]", "key * q_stride[1]"),
    Mutant("Q as far apart as K", "(upper, nq - 1) * q_stride[1]", "(upper, nq - 1) * k_stride[1]"),
    Mutant("scores miss a step", "cfg.head_dim // 8", "cfg.head_dim // 8 - 1"),
    Mutant("first step of Q again", ABOVE, ABOVE.replace("q_upper + 4 * piece", "q_upper")),
    Mutant("first step of K again", ABOVE, ABOVE.replace("k_at + 4 * piece", "k_at")),
    Mutant("lower row's score of the first step", BELOW, BELOW.replace("k_at + 4 * piece", "k_at")),
    Mutant("score of the upper row twice", BELOW, BELOW.replace("q_below", "q_upper")),
    Mutant("scores not begun anew", "add_products(below,", "add_products(above,"),
    Mutant("scale's sign dropped from the scores", "upper * SIGN, below * SIGN", "upper, below"),
    Mutant("scores of the other row", "values[row_of(i)]", "values[1 - row_of(i)]"),
    Mutant("scores swapped in pairs", "+ pair % 2, (", "+ (pair + 1) % 2, ("),
    Mutant("hidden scores", "return apply_keep(s, keep)", "return s"),
)
RAISED, SHRUNK = "m[0] + risen[0], m[1] + risen[1]", "(l[0] * alpha[0], l[1] * alpha[1])"
BEGUN = "return weights, m, row_sum(PAIR, weights), without_key(best, PAIR)"
CAREFUL = "return weights, m, l, row_sum(PAIR, weights), unsettled(best, total), alpha"
LESS = "return weights, m, l, row_sum(PAIR, weights), alpha"
SCALED = "weights = scale_fragment(weights, alpha)"
ONE = "(types.float32(1),) * 2"
STATE = (
    Mutant("first weights not summed", BEGUN, BEGUN.replace("row_sum(PAIR, weights)", "PAIR")),
    Mutant(
        "every row has met a key",
        BEGUN,
        BEGUN.replace("without_key(best, PAIR)", "False"),
    ),
    Mutant(
        "every row has met a key since",
        CAREFUL,
        CAREFUL.replace("unsettled(best, total)", "False"),
    ),
    Mutant(
        "m never outgrown", "return weights, sums, outgrown(sums)", "return weights, sums, False"
    ),
    Mutant("weights not summed", "sums = row_sum(PAIR, weights)", "sums = PAIR"),
    Mutant("m not raised", RAISED, "m"),
    Mutant("m raised by the other row", RAISED, "m[0] + risen[1], m[1] + risen[0]"),
    Mutant("m raised twice", RAISED, "m[0] + 2 * risen[0], m[1] + 2 * risen[1]"),
    Mutant("l not rescaled", f"return m, {SHRUNK}", "return m, l"),
    Mutant("l rescaled by the other row", SHRUNK, "(l[0] * alpha[1], l[1] * alpha[0])"),
    Mutant("alpha forgotten", f"{SHRUNK}, alpha", f"{SHRUNK}, {ONE}"),
    Mutant("alpha of the other row", f"{SHRUNK}, alpha", f"{SHRUNK}, (alpha[1], alpha[0])"),
    Mutant("l of a lane for the row's", "row_max(e), row_total(l)", "row_max(e), l"),
    Mutant("exponents not lowered", "exponentials(lower(e, risen))", "exponentials(e)"),
    Mutant(
        "careful weights not summed", CAREFUL, CAREFUL.replace("row_sum(PAIR, weights)", "PAIR")
    ),
    Mutant("alpha of careful weights", CAREFUL, CAREFUL.replace("alpha", ONE)),
    Mutant("weights not shrunk", SCALED, "pass"),
    Mutant("shrunk weights not summed", LESS, LESS.replace("row_sum(PAIR, weights)", "PAIR")),
    Mutant(
        "sums of the old weights",
        f"{SCALED}\n        {LESS}",
        LESS.replace("weights, m", "scale_fragment(weights, alpha), m"),
    ),
    Mutant("alpha of shrunk weights", LESS, LESS.replace("alpha", ONE)),
    Mutant(
        "m raised by what a lane has summed",
        "overshot(row_max(weights))",
        "overshot(row_sum(PAIR, weights))",
    ),
)
