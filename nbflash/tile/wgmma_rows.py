"""Fragments of wgmma, rounded, to rows of global memory: 16 bytes a lane, whole sectors.

A warp's 16 rows go 32 columns at a time through 1 KB of shared memory of its own, 64 bytes a row,
chunks of 16 bytes swizzled so that neither side meets a bank twice:

    lane 8 m + r stores row r + 8 (m % 2) of matrix m (see :mod:`nbflash.tile.wgmma_store`),
        chunk 2 k + m // 2 of a row, at chunk ^ row // 2 % 4
    lane l loads chunk l % 4 of rows l // 4 and l // 4 + 8
"""

from nbflash.ptx._asm import cuda, inlined, types
from nbflash.ptx.stmatrix import stmatrix4
from nbflash.tile.unroll import load4, store4, unrolled
from nbflash.tile.warp_math import pack_half

COLUMNS = 32
WARP_BYTES = 16 * 2 * COLUMNS


@unrolled
def copy_row(out, to, smem, at):
    store4(out, to, load4(smem, at))


@unrolled
def places(lane):
    """Where a lane stores its row of matrices, in bytes, and loads its chunk from, in words."""
    stored = lane % 16 * 64 + (lane // 16 ^ lane % 8 // 2) * 16
    return stored, lane // 4 * 16 + (lane % 4 ^ lane // 8) * 4


def make_store_rows(head_dim, dtype):
    """``store_rows(out, acc, factor, smem, source, target, lane)``, for all lanes of a warp.

    ``source`` is the warp's memory (address, word), ``target`` where its first row goes and the
    rows' distance, in elements, and how many rows there are.
    """

    def make(first, following):
        """The columns from ``first``, then the following ones."""
        chunks = min(COLUMNS, head_dim - first) // 8

        @unrolled
        def stage(row, acc, factor):
            mine = [acc[i] * factor for i in range(first // 2, (first + 8 * chunks) // 2)]
            packed = [pack_half(dtype, *mine[i : i + 2]) for i in range(0, len(mine), 2)]
            packed += packed[:2]  # half a matrix more than 8 columns more fill
            for k in range((chunks + 1) // 2):
                stmatrix4(row ^ (32 * k), packed[4 * k : 4 * k + 4])

        @inlined
        def store_columns(out, acc, factor, smem, source, target, lane):
            (base, words), (start, stride, rows) = source, target
            stored, loaded = places(lane)
            stage(types.uint32(base + stored), acc, factor)
            cuda.syncwarp()
            row, chunk = types.int32(lane >> 2), types.int32(lane & 3)
            to = (start + row * stride + (first + 8 * chunk)) // 2
            if chunk < chunks:
                if row < rows:
                    copy_row(out, to, smem, types.int32(words + loaded))
                if row + 8 < rows:
                    copy_row(out, to + 4 * stride, smem, types.int32(words + loaded + 128))
            cuda.syncwarp()
            following(out, acc, factor, smem, source, target, lane)

        return store_columns

    @inlined
    def store_rows(out, acc, factor, smem, source, target, lane):
        pass

    for first in reversed(range(0, head_dim, COLUMNS)):
        store_rows = make(first, store_rows)
    return store_rows
