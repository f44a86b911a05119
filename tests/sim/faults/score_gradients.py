"""Faults of the gradients of a score's arrays: of the kernel, its sums and their functions."""

from mutants import Mutant

CHAIN_OF_FUNCTIONS, SUMS = "nbflash.definitions.score_chain", "nbflash.cuda.tile.simt.score_sums"
KERNEL, EXECUTOR = (
    "nbflash.backends.simt.score_gradient",
    "nbflash.backends.simt.score_gradient_host",
)
FUNCTIONS = (
    Mutant("slope of the function itself", "own(later, s,", "own(slope * later, s,"),
    Mutant("slopes left out", "return x, slope * later,", "return x, slope,"),
    Mutant("functions of the result", "own(later, s, b", "own(later, x, b"),
    Mutant("parameters of the first function", "kv_idx, params[1:])", "kv_idx, params)"),
    Mutant("factors left out", "later * real(factor)", "later"),
    Mutant("head for batch", "rest(x, b, h,", "rest(x, h, b,"),
    Mutant(
        "query for key", "own(later, s, b, h, q_idx, kv_idx", "own(later, s, b, h, kv_idx, q_idx"
    ),
    Mutant("slope of the result", "slope = real(slope_of(s, b, h", "slope = real(slope_of(x, b, h"),
)
ADDING = (
    Mutant("one sum for two elements", "if new != at:", "if False:"),
    Mutant("sums that begin where others end", "at, total = new, ZERO", "at = new"),
    Mutant("the last is kept", "finish_others(kept[1:], sums[1:])", "pass", 0, 1),
    Mutant(
        "what was kept is lost",
        "                if total != ZERO:\n",
        "                if False:\n",
    ),
    Mutant(
        "sums at the next element", "add_to(memory, at, total)", "add_to(memory, new, total)", 0, 2
    ),
    Mutant("row of the first axis", "row * shape[-1]", "row * shape[0]"),
    Mutant("places before the first", "i + n if i < 0 else i", "i"),
    Mutant("rows that are not there", "exists and 0", "0"),
    Mutant("columns that are not there", "exists and 0 <= at < shape[-1]", "exists"),
    Mutant("places far before the first", "0 <= at < shape[0]", "at < shape[0]"),
    Mutant("what is outside goes unseen", "new, factor = 0, NAN", "new, factor = 0, ZERO"),
    Mutant("every array alone", "if ALONE:", "if True:"),
    Mutant("arrays of another pair", "pairs[1:], sums[1:], ds", "pairs, sums[1:], ds"),
    Mutant("the first array twice", "sums[1:], ds))", "sums, ds))"),
    Mutant(
        "an element past the end",
        "exists and 0 <= at < shape[-1]",
        "exists and 0 <= at <= shape[-1]",
    ),
)
WALK = (
    Mutant("scores not masked", "if kind[t] != FULL and half == 0:", "if False:"),
    Mutant("bit tiles unmasked", "if kind[t] != FULL and", "if kind[t] == 1 and"),
    Mutant("dP masked", "FULL and half == 0:", "FULL and half == 1:"),
    Mutant("bounds of plane 0", "plane * nq, plane * nq + nq - 1", "0, nq - 1"),
    Mutant("plane without the batch", "plane_of[bh]", "plane_of[h]"),
    Mutant("walk of plane 0", "range(row_ptr[plane * n_row + tile]", "range(row_ptr[tile]"),
    Mutant("walk ends a tile early", "n_row + tile + 1]", "n_row + tile + 1] - 1"),
    Mutant("halves swapped", "(Q, KT) if half == 0", "(Q, KT) if half == 1"),
    Mutant("S for dP", "S if half == 0 else DP", "DP if half == 0 else S"),
    Mutant("V of another head", "b * v_stride[0] + h_kv * v_stride[2]", "b * v_stride[0]"),
    Mutant("K of the query head", "b * k_stride[0] + h_kv *", "b * k_stride[0] + h *"),
    Mutant("K of the first tile", "k_stride[2] + n0 * k_stride[1]", "k_stride[2]"),
    Mutant("dO with Q's row stride", "dout, at, do_stride[1]", "dout, at, q_stride[1]"),
    Mutant("statistics of another head", "bh * nq + m0, nq", "h * nq + m0, nq"),
    Mutant("scale dropped", "nq - m0, scale, tid", "nq - m0, ONE, tid"),
    Mutant("natural scores in base 2", "after * LOG2_E - lse", "after - lse"),
    Mutant("hidden scores count", "either(equal(s, NEG_INF), equal(p, 0.0))", "equal(p, 0.0)"),
    Mutant("query of the tile", "min(m0 + i, nq - 1)", "min(i, nq - 1)"),
    Mutant("key of the tile", "min(n0 + j, nk - 1)", "min(j, nk - 1)"),
    Mutant("key head", "INT(b), INT(h)", "INT(b), INT(h_kv)"),
    Mutant("batch for head", "INT(b), INT(h)", "INT(h), INT(b)"),
    Mutant(
        "delta added",
        "p * (dp - delta)",
        "p * (dp + delta)",
    ),
    Mutant("lse for delta", "smem[STATS + TILE_M + i])", "smem[STATS + i])"),
    Mutant("P dropped", "p * (dp - delta)", "dp - delta"),
    Mutant("half of the scores", "TILE_M * TILE_N, 4", "TILE_M * TILE_N // 2, 4"),
    Mutant("queries past the end", "min(m0 + i, nq - 1)", "m0 + i"),
    Mutant("keys past the end", "min(n0 + j, nk - 1)", "n0 + j"),
    Mutant(
        "dP beyond all numbers", "either(equal(s, NEG_INF), equal(p, 0.0))", "equal(s, NEG_INF)"
    ),
    Mutant(
        "one of four twice", "held = add_one(held, four, sums)", "held = add_one(held, three, sums)"
    ),
    Mutant("fourth of the next", "e + 3 * THREADS", "e + 4 * THREADS"),
    Mutant("tiles that are not square", "e // TILE_N, e % TILE_N", "e // TILE_M, e % TILE_M"),
    Mutant("what is kept is lost", "        finish(held, sums)\n", "        pass\n"),
    Mutant("dropout left out", "if DROPOUT and half == 1:", "if False:"),
    Mutant("dropout of the first tile", "m0 + 4 * ty, n0 + 4 * tx)", "m0 + 4 * ty, 4 * tx)"),
    Mutant(
        "depth beyond the zero columns", "-(-cfg.head_dim // 4) * 4", "-(-cfg.head_dim // 8) * 8"
    ),
    Mutant(
        "hidden scores added",
        "return add(held, pairs, sums, ds) if ds != ZERO else held",
        "return add(held, pairs, sums, ds)",
    ),
    Mutant(
        "dO with Q's batch stride",
        "at = b * do_stride[0] + h * do_stride[2]",
        "at = b * q_stride[0] + h * do_stride[2]",
    ),
)
BINDING = (
    Mutant("sums not cleared", "            total.fill(0)\n", "            pass\n"),
    Mutant("all alone", "part.alone(problem)", "True"),
    Mutant("strides of dO are q's", "arrays.strides(dout)", "arrays.strides(q)"),
    Mutant("scores in base 2", "(shared.problem.scale,)", "(shared.problem.scale * 1.4427,)"),
)
MUTANTS = (
    *((CHAIN_OF_FUNCTIONS, mutant) for mutant in FUNCTIONS),
    *((SUMS, mutant) for mutant in ADDING),
    *((KERNEL, mutant) for mutant in WALK),
    *((EXECUTOR, mutant) for mutant in BINDING),
)
CHAIN = (CHAIN_OF_FUNCTIONS, SUMS, KERNEL, EXECUTOR)  # in the order of their imports
