"""Fragments of wgmma, rounded, to rows of global memory: 16 bytes a lane, whole sectors.

A warp's 16 rows go 64 columns at a time, or 32, through shared memory of its own, chunks of 16
bytes swizzled so that neither side meets a bank twice. Of C chunks a row:

    lane 8 m + r stores row r + 8 (m % 2) of matrix m (see :mod:`.store_shared`),
        chunk 2 k + m // 2 of a row, at chunk ^ row % 8 // (8 / C)
    lane l loads chunk l % C of rows l // C, l // C + 32 / C, …
"""

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.stmatrix import stmatrix4
from nbflash.cuda.tile.tracing import load4, store4, unrolled
from nbflash.cuda.tile.warp_math import pack_half


def warp_bytes(columns):
    """Shared memory of a warp that stores so many columns at a time."""
    return 16 * 2 * columns


@unrolled
def copy_row(out, to, smem, at):
    store4(out, to, load4(smem, at))


def make_store_rows(head_dim, dtype, columns):
    """``store_rows(out, acc, factor, smem, source, target, lane)``, for all lanes of a warp.

    ``source`` is the warp's memory (address, word), ``target`` where its first row goes and the
    rows' distance, in elements, and how many rows there are. ``columns`` is 32 or 64.
    """
    CHUNKS = columns // 8
    ROWS, PERIOD = 32 // CHUNKS, 8 // CHUNKS

    @unrolled
    def places(lane):
        """Where a lane stores its row of matrices, in bytes, and loads its chunk from, in words."""
        stored = lane % 16 * (16 * CHUNKS) + (lane // 16 ^ lane % 8 // PERIOD) * 16
        row = lane // CHUNKS
        return stored, row * (4 * CHUNKS) + (lane % CHUNKS ^ row // PERIOD) * 4

    def make(first, following):
        """The columns from ``first``, then the following ones."""
        chunks = min(columns, head_dim - first) // 8

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
            row, chunk = types.int32(lane // CHUNKS), types.int32(lane % CHUNKS)
            to = (start + row * stride + (first + 8 * chunk)) // 2
            if chunk < chunks:
                for i in range(16 // ROWS):
                    if row + ROWS * i < rows:
                        swizzled = types.int32(loaded ^ (ROWS * i % 8 // PERIOD * 4))
                        at = types.int32(words + swizzled + 4 * CHUNKS * ROWS * i)
                        copy_row(out, to + ROWS // 2 * i * stride, smem, at)
            cuda.syncwarp()
            following(out, acc, factor, smem, source, target, lane)

        return store_columns

    @inlined
    def store_rows(out, acc, factor, smem, source, target, lane):
        pass

    for first in reversed(range(0, head_dim, columns)):
        store_rows = make(first, store_rows)
    return store_rows
