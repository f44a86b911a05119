"""Dropout in the Hopper kernels."""

from dataclasses import replace

import numpy as np
import sm90_bwd_runs
import sm90_dq_runs
from dropout_cases import HOW
from mutant_family import Family
from mutants import Mutant, lines, swapped
from sm90_runs import ALONE, HALVES, check, inputs

import masks
from nbflash.cuda import simulator as sim

T = 64
THREE = replace(ALONE, tile_n=96)  # groups of keys, of which one has no neighbour
HOPPER = "nbflash.backends.sm90."
TILE, PLACE = "nbflash.cuda.tile.wgmma.dropout", HOPPER + "shared.dropout"
ROW, WHOLE, HALF, COMPUTE, FWD = (
    f"{HOPPER}forward.{name}"
    for name in ("epilogue", "mainloop_pingpong", "mainloop_overlap", "consumer", "kernel")
)
ACROSS, COLUMNS, WIDE, BWD = (
    f"{HOPPER}backward.{name}" for name in ("dropout", "dkdv", "dkdv_wide", "kernel")
)
STATISTICS, DQ_COMPUTE, DQ = (
    f"{HOPPER}backward.{name}" for name in ("dq_statistics", "dq_consumer", "dq_kernel")
)
FORWARD = TILE, PLACE, ROW, WHOLE, HALF, COMPUTE, FWD
BY_COLUMNS = TILE, PLACE, ACROSS, COLUMNS, WIDE, BWD
BY_ROWS = TILE, PLACE, STATISTICS, DQ_COMPUTE, DQ


# Of one batch and one head, which most faults need, and of several.
ONE, SEVERAL = {}, {"batch": 2, "heads": (2, 1)}


def check_forward(fwd, config, sizes):
    """Whole tiles or halves."""
    n = T + T // 2 + 9
    values = inputs(T + 9, n, **sizes)[:3]
    check(config, masks.dense(T + 9, n), *values, spec_of=fwd.fwd_sm90_spec, **HOW)


def check_columns(bwd, sizes):
    values = inputs(T + 9, 41, **sizes)
    how = {"spec_of": bwd.bwd_sm90_spec, **HOW}
    sm90_bwd_runs.check(sm90_bwd_runs.COLUMN, masks.dense(T + 9, 41), values, **how)


def check_wide(bwd):
    values, how = inputs(5, 9, head_dim=136), {"spec_of": bwd.bwd_sm90_spec, **HOW}
    sm90_bwd_runs.check(sm90_bwd_runs.SHARED, masks.dense(5, 9), values, **how)


def check_rows(dq, sizes):
    """And what is left to the pass over columns; V is NaN where nobody sees it."""
    n = 2 * T + 25
    values = inputs(T + 9, n, **sizes)
    mask = masks.from_function(lambda q, kv: (kv != 3) & (q >= 0), T + 9, n)
    values[2][:, 3] = np.nan
    stats = sm90_dq_runs.statistics_for(sm90_dq_runs.ALONE, values[0])
    how = {"spec_of": dq.bwd_sm90_dq_spec, **HOW}
    sm90_dq_runs.check(sm90_dq_runs.ALONE, mask, values, stats=stats, **how)
    sm90_bwd_runs.check(sm90_bwd_runs.COLUMN, mask, values, stats=stats, **HOW)


OF_FORWARD = (
    (TILE, Mutant("a number alone", "number ^ mixed[0]", "number")),
    (TILE, Mutant("a product alone", "a ^ mixed[1], a_low", "a, a_low")),
    (TILE, Mutant("queries of the first 16", "32(_queries_of(q))", "32(_queries_of(q & 15))")),
    (TILE, Mutant("calls of the first half", "n // 32 * part, n // 32 * (part + 1)", "n // 32")),
    (
        TILE,
        Mutant(
            "calls of the first pair", "(second + group) * step", "(second + (group & 1)) * step"
        ),
    ),
    (TILE, Mutant("another lane's words", "shuffle_xor(x, 4)", "shuffle_xor(x, 8)")),
    (TILE, Mutant("the second half's first call", "second ^ group & 1", "second")),
    (TILE, Mutant("alone, the other row's", "equal(swapped, 1), y, x", "equal(swapped, 1), x, y")),
    (TILE, Mutant("groups in turn", "select(second, y, x) for", "select(second, x, y) for")),
    (TILE, Mutant("words that are not its own", "(c, d, a ^ b)", "(c, d, c ^ d)")),
    (TILE, Mutant("the next step's words", "_step(*_further(x, y, z))", "_step(x, y)")),
    (TILE, Mutant("a lower byte twice", "permute(y, x, _CROSSED)", "permute(y, y, _CROSSED)")),
    (TILE, Mutant("bytes of the first word", "x, y, permute(x, y,", "x, y, permute(y, x,")),
    (TILE, Mutant("calls of the quad", "4 * group + thread % 4", "4 * group")),
    (TILE, Mutant("calls of even rows", "(group ^ thread >> 2) & 1", "group & 1")),
    (TILE, Mutant("keys of the first tile", "uint32(n0 >> 5)", "uint32(n0 >> 9)")),
    (PLACE, Mutant("row of the first tile", "row * TILE_M + row_of", "row_of")),
    (PLACE, Mutant("batch for head", "query_at(shifts, q), h, b)", "query_at(shifts, q), b, h)")),
    (PLACE, Mutant("seed alone", "key_of(state)", "key_of((state[0], state[1] * 0, state[2]))")),
    (ROW, Mutant("one row's share", "l[1] * share", "l[1]")),
    (WHOLE, Mutant("all of P", "dropped(pack(weights), drawing)", "pack(weights)")),
    (HALF, Mutant("the first half twice", "dropped_b(pack", "dropped_a(pack")),
    (
        COMPUTE,
        Mutant(
            "place of the row before",
            "where, row_words = row_at(next_block, next_bh, sources, thread)",
            "pass",
            1,
            2,
        ),
    ),
    (
        TILE,
        Mutant(
            "a call of the same group for all rows",
            "_exchanged(*words_of(group, swapped)",
            "_exchanged(*words_of(group)",
        ),
    ),
    (
        ROW,
        swapped(
            "LSE of the share",
            lines(8, "values = log_sum_exp(m, l)"),
            lines(
                8, "if DROPOUT:", "    _, share = dropping", "    l = l[0] * share, l[1] * share"
            ),
        ),
    ),
)
OF_COLUMNS = (
    (TILE, Mutant("calls of the first step", "queries_of(q) + odd * 4", "queries_of(q)")),
    (TILE, Mutant("keys of the first 32", "philox.keys_of(key)", "philox.keys_of(key & 31)")),
    (TILE, Mutant("keys of the first step", "(key >> 4 & 1) * _ALL", "key * 0")),
    (TILE, Mutant("what the others add", "_further(c, d, w)", "_further(c, d, z)")),
    (TILE, Mutant("calls of the first pair", "_number(numbers, pair, 8)", "numbers[0]")),
    (TILE, Mutant("another lane's halves", "shuffle_xor(x, 4)", "shuffle_xor(x, 8)")),
    (TILE, Mutant("halves that are there", "mine ^ 0x2222", "mine")),
    (TILE, Mutant("lower halves for all", "^ odd * 0x2222 ^", "^")),
    (TILE, Mutant("queries in their places", "(key >> 5 & 1) * 0x4444", "key * 0")),
    (
        TILE,
        Mutant(
            "words in order",
            "permute(a, c, half), permute(b, d",
            "permute(a, b, half), permute(c, d",
        ),
    ),
    (
        TILE,
        Mutant("queries down", "upper, below, lower, lowest\n", "upper, lower, below, lowest\n"),
    ),
    (TILE, Mutant("δ of the first query", "minus_deltas[n // 2 * 2 :]", "minus_deltas")),
    (
        ACROSS,
        Mutant("the quad's first query", "firsts_of(shifts, q + pair)", "firsts_of(shifts, q)"),
    ),
    (ACROSS, Mutant("the tile's first key", "key_at(shifts, kv + row)", "key_at(shifts, kv)")),
    (ACROSS, Mutant("no factor", "return dropping[1]", "return types.float32(1)")),
    (COLUMNS, Mutant("dV of all P", "dropped(packed_of(p), drawn)", "packed_of(p)")),
    (COLUMNS, Mutant("dP as it is", "dp = dropped_dp(", "dropped_dp(")),
    (COLUMNS, Mutant("no δ where it is dropped", "if DROPOUT:", "if False:")),
    (
        TILE,
        Mutant(
            "what the own words add",
            "z, w = (c ^ d) & far, (a ^ b) & far",
            "z, w = (a ^ b) & far, (c ^ d) & far",
        ),
    ),
    (
        ACROSS,
        Mutant(
            "batch for head", "types.uint32(h), types.uint32(b)", "types.uint32(b), types.uint32(h)"
        ),
    ),
)
OF_WIDE = (
    (
        WIDE,
        Mutant(
            "dV of all P",
            "dropped(packed_of(p), draw(smem, place, stage, row, pair, *drawing))",
            "packed_of(p)",
        ),
    ),
    (WIDE, Mutant("dP as it is", "dp = dropped_dp(", "dropped_dp(")),
)
TILES = [
    Mutant(f"keys of the {which} tile", "dropping, n0, thread)", "dropping, 0, thread)", i, 2)
    for i, which in enumerate(("next", "last"))
]
OF_ROWS = (
    (TILE, Mutant("δ of the other row", "minus_delta[n % 2]", "minus_delta[n // 2 % 2]")),
    (TILE, Mutant("nothing where it is dropped", "pair, (minus, minus)", "pair, (0.0, 0.0)")),
    (DQ_COMPUTE, Mutant("dP as it is", "dp = dropped_dp(", "dropped_dp(")),
    (STATISTICS, Mutant("δ as it is", "minus0 * share, minus1 * share", "minus0, minus1")),
    (
        DQ_COMPUTE,
        Mutant(
            "place of the first row", "row_words_of(drawn, row,", "row_words_of(drawn, 0 * row,"
        ),
    ),
    *((DQ_COMPUTE, mutant) for mutant in TILES),
    (
        PLACE,
        Mutant(
            "dS of what is hidden", "return counted(p, gradients(p, dp))", "return gradients(p, dp)"
        ),
    ),
)


def family(name, chain, faults, **cases):
    """Of cases by name: a check, and what it takes behind the module of the kernel."""
    cases = {
        case.replace("_", "-"): lambda modules, check_it=check_it, given=given: check_it(
            modules[chain[-1]], *given
        )
        for case, (check_it, *given) in cases.items()
    }
    return Family(f"dropout_{name}", chain, cases, faults, errors=(sim.SimError, AssertionError))


OF_THE_FORWARD = family(
    "forward",
    FORWARD,
    OF_FORWARD,
    whole=(check_forward, THREE, SEVERAL),
    whole_one=(check_forward, THREE, ONE),
    halves=(check_forward, HALVES, SEVERAL),
    halves_one=(check_forward, HALVES, ONE),
)
OF_THE_COLUMNS = family(
    "columns",
    BY_COLUMNS,
    OF_COLUMNS,
    columns=(check_columns, SEVERAL),
    columns_one=(check_columns, ONE),
)
OF_WIDE_COLUMNS = family("wide", BY_COLUMNS, OF_WIDE, wide=(check_wide,))
OF_THE_ROWS = family(
    "rows", BY_ROWS, OF_ROWS, rows=(check_rows, SEVERAL), rows_one=(check_rows, ONE)
)
