"""What backward kernels without tensor cores share: fragments and statistics in their memory."""

import math

from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.tile.tracing import store4
from nbflash.definitions.constants import LOG2_E


def make_store_x(rows, columns, ld):
    """``store_x(smem, at, x)``: a fragment to the tile rows and columns from its first element.

    Columns come in runs of four. For use within ``@unrolled`` functions.
    """
    n = len(columns)

    def store_x(smem, at, x):
        for i, row in enumerate(rows):
            for j in range(0, n, 4):
                store4(smem, at + (row * ld + columns[j]), x[i * n + j : i * n + j + 4])

    return store_x


def make_fill_stats(cfg, stats):
    """``fill_stats(smem, lse, delta, at, valid, tid)``: lse in base 2 and δ of a tile's rows.

    Rows that attend nothing, and rows past the end, have lse = +∞: P = 2^(S − ∞) = 0.
    """
    TILE_M, THREADS, ACC = cfg.tile_m, cfg.threads, cfg.accumulator.numba
    ZERO = ACC(0)

    @inlined
    def fill_stats(smem, lse, delta, at, valid, tid):
        for i in range(tid, TILE_M, THREADS):
            row_lse, row_delta = ACC(math.inf), ZERO
            if i < valid:
                natural = ACC(lse[at + i])
                row_delta = ACC(delta[at + i])
                if natural != ACC(-math.inf):
                    row_lse = natural * ACC(LOG2_E)
            smem[stats + i] = row_lse
            smem[stats + TILE_M + i] = row_delta

    return fill_stats
