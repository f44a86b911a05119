"""Dropout in the SIMT kernels."""

from unittest.mock import patch

import numpy as np
from dropout_cases import HOW, SEED
from mutant_family import Family
from mutants import Mutant, lines, swapped
from simt_runs import Geometry, assert_close, check, expected, run

import masks
from nbflash.backends.simt import executor as simt
from nbflash.cuda import simulator as sim
from nbflash.definitions import philox
from nbflash.testing import make_qkv

DROPOUT, FWD, BWD = (
    "nbflash.cuda.tile.dropout",
    "nbflash.backends.simt.forward",
    "nbflash.backends.simt.backward",
)
CHAIN = (DROPOUT, FWD, BWD, simt.__name__)
MUTANTS = [
    (DROPOUT, Mutant("rows of the next group", "i // 4 * ROW_STEP + i % 4", "i")),
    (
        DROPOUT,
        Mutant(
            "runs side by side",
            "(run * COLUMN_STEP + 2, run * COLUMN_STEP)",
            "(4 * run + 2, 4 * run)",
        ),
    ),
    (DROPOUT, Mutant("keys of the first 32", "_keys_of(kv)", "_keys_of(kv & 31)")),
    (DROPOUT, Mutant("queries of the first 16", "_queries_of(q_idx)", "_queries_of(q_idx & 15)")),
    (DROPOUT, Mutant("words of the first 16", "if kv & 16:", "if False:")),
    (DROPOUT, Mutant("words of the first keys", "if kv & 8:", "if False:")),
    (DROPOUT, Mutant("words of the first queries", "if q_idx & 8:", "if False:")),
    (DROPOUT, Mutant("queries in their places", "if kv & 32:", "if False:")),
    (DROPOUT, Mutant("bytes of the other word", "_crossed(w0, w1)", "_crossed(w1, w0)")),
    (DROPOUT, Mutant("a byte twice", "_crossed(w2, w3)", "_crossed(w2, w2)")),
    (DROPOUT, Mutant("the lower row first", "lower) << ROW | upper", "upper) << ROW | lower")),
    (DROPOUT, Mutant("one half for both", "halves >> HALF & MASK", "halves & MASK")),
    (DROPOUT, Mutant("all bits", "halves >> HALF & MASK", "halves >> HALF")),
    (DROPOUT, Mutant("the last run first", "range(RUNS - 1, -1, -1)", "range(RUNS)")),
    (
        DROPOUT,
        Mutant(
            "batch for head",
            "uint32(h), places[0], np.uint32(b)",
            "uint32(b), places[0], np.uint32(h)",
        ),
    ),
    (DROPOUT, Mutant("seed alone", "state[1] ^ state[2][1]", "state[2][1]")),
    (DROPOUT, Mutant("nothing in its place", "y * factor", "y")),
    (DROPOUT, Mutant("run of the fragment", "bits >> first + n", "bits >> n")),
    (FWD, Mutant("nothing is dropped", "p = drop(p, z, factor)", "pass")),
    (FWD, Mutant("key of the tile", "n0 + 4 * tx)", "n0)")),
    (BWD, Mutant("dP as it is", "x = drop(x, z, factor)", "pass")),
    (BWD, Mutant("dV of all P", "drop_p(smem, P + own, z, factor)", "pass")),
    (
        BWD,
        Mutant(
            "one mask for the group",
            "b, h, m0 + 4 * ty, n0 + 4 * tx)\n",
            "b, h_kv, m0 + 4 * ty, n0 + 4 * tx)\n",
        ),
    ),
    (
        FWD,
        swapped(
            "sum of what is kept",
            lines(12, "l = row_sum(l, alpha, p)"),
            lines(
                12,
                "m = m_new",
                "if DROPOUT:",
                "    z = kept(draws, threshold, b, h, q0 + 4 * ty, n0 + 4 * tx)",
                "    p = drop(p, z, factor)",
            ),
        ),
    ),
    (
        DROPOUT,
        Mutant(
            "the threshold itself is dropped",
            "first = ONE if halves & MASK >= threshold",
            "first = ONE if halves & MASK > threshold",
        ),
    ),
    (
        DROPOUT,
        swapped(
            "queries change places behind the keys",
            lines(8, "if q_idx & 8:", "    w0, w1, w2, w3 = w1, w0, w3, w2"),
            lines(
                8,
                "if kv & 8:",
                "    w0, w2 = np.uint32(_crossed(w0, w1)), np.uint32(_crossed(w2, w3))",
            ),
        ),
    ),
    (DROPOUT, Mutant("a state's offset alone", "_key(state[0] ^ state[2][0],", "_key(state[0],")),
    (
        BWD,
        swapped(
            "dS of what is left of P",
            lines(20, "store_ds(smem, DS + own, P + own, x, STATS + TILE_M + 4 * ty)"),
            lines(20, "if DROPOUT:", "    drop_p(smem, P + own, z, factor)"),
        ),
    ),
]


def case_of(deterministic):
    def run_case(modules):
        with patch("simt_runs.SimtExecutor", modules[simt.__name__].SimtExecutor):
            geometry = Geometry(rm=8, rn=8, deterministic=deterministic)
            check(geometry, masks.causal(17, 41), *make_qkv(2, 17, 41, 2, 1, 8), **HOW)

    return run_case


def of_a_state(modules):
    """A state in memory; the first score is kept, for its number is the threshold itself."""
    first = philox.philox(*np.zeros(4, np.uint32), *philox.key(*map(np.uint64, SEED)))[0]
    dropout = int(first & philox.MASK) / (int(philox.MASK) + 1)
    mask, inputs = masks.dense(5, 9), make_qkv(1, 5, 9, 1, 1, 8)
    with patch("simt_runs.SimtExecutor", modules[simt.__name__].SimtExecutor):
        got = run(Geometry(), mask, *inputs, dropout=dropout, seed=np.array(SEED, np.uint64))
    assert_close(got, *expected(mask, *inputs, dropout=dropout, seed=SEED))


FAMILY = Family(
    "simt_dropout",
    CHAIN,
    {"one-pass": case_of(False), "two-passes": case_of(True), "of-a-state": of_a_state},
    MUTANTS,
    errors=(sim.SimError, AssertionError),
)
