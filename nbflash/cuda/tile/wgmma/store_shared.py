"""Fragments of wgmma, rounded, to shared memory: panels of 64 columns, as TMA has them.

Four 8 × 8 matrices are 16 rows × 16 columns of a warp, and four words of a thread's fragment:

    columns   16 k …      16 k + 8 …        lane 8 m + r gives the address of row r of matrix m,
    rows 0…   matrix 0    matrix 2          16 bytes: chunk 2 k + m // 2 of row r + 8 (m % 2),
    rows 8…   matrix 1    matrix 3          swizzled: chunk ^ r
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.stmatrix import stmatrix4
from nbflash.cuda.tile.tracing import unrolled
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES, STEP


@inlined
def matrix_row(base, thread):
    """Address of this lane's row of the first four matrices of a tile at ``base``."""
    lane = types.uint32(thread & 31)
    row = types.uint32(types.uint32(thread & 96) // 2 + lane % 16)
    return types.uint32(base + types.uint32(row * ROW_BYTES + (lane // 16 ^ lane % 8) * 16))


def make_store_fragment(columns, panel_rows):
    """``store_fragment(row, packed)``: of 64 rows; ``row`` is that of :func:`matrix_row`."""

    @unrolled
    def store_fragment(row, packed):
        steps = -(-columns // STEP)
        words = [*packed, *packed[:2]]  # half a step more than 8 columns more fill
        for k in range(steps):
            panel, inside = divmod(k * STEP, PANEL)
            at = (row ^ (2 * inside)) + panel * panel_rows * ROW_BYTES
            stmatrix4(at, words[4 * k : 4 * k + 4])

    return store_fragment
