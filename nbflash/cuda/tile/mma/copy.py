"""Tiles from global to shared memory by ``cp.async``, and back."""

from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.ptx.cp_async import cp_async16
from nbflash.cuda.tile.finite import make_not_finite
from nbflash.cuda.tile.mma.layout import CHUNK
from nbflash.cuda.tile.tracing import both, load2, store4, unrolled


class ChunkCopy:
    """Copies of ``rows`` rows of a `SharedTile` by ``threads`` threads, 16 bytes at a time.

        send(to, source, base, stride, valid, thread)
            From the element ``base`` on to the tile at address ``to``; rows from ``valid`` on, and
            columns from ``head_dim`` on, become zero.
        scan(smem, at, thread)
            Of the tile at word ``at`` what this thread has sent: 0 if it is finite.
    """

    def __init__(self, tile, rows, threads, head_dim, dtype):
        chunks, total = tile.chunks, rows * tile.chunks
        if total % threads:
            raise ValueError(f"{rows} × {chunks} chunks do not divide among {threads} threads")
        not_finite = make_not_finite(dtype)

        def places(thread):
            """(row, chunk) of what a thread copies; cheap where the chunks divide the threads."""
            for i in range(total // threads):
                if threads % chunks == 0:
                    yield thread // chunks + i * (threads // chunks), thread % chunks
                else:
                    at = thread + i * threads
                    yield at // chunks, at % chunks

        @unrolled
        def send(to, source, base, stride, valid, thread):
            for row, chunk in places(thread):
                inside = row < valid
                if head_dim < tile.width:
                    inside = both(inside, chunk < head_dim // CHUNK)
                at = base + stride * row + chunk * CHUNK
                cp_async16(to + tile.place(row, chunk), source, at, inside)

        @unrolled
        def words(at, thread):
            return tuple(at + tile.place(*place) // 4 for place in places(thread))

        @inlined
        def scan(smem, at, thread):
            found = 0
            for word in words(at, thread):
                found |= not_finite(smem, word)
            return found

        self.send, self.scan = send, scan


def make_store_rows(tile, m_tiles, head_dim):
    """``put(smem, at, packed, place, lane)``: a warp's packed fragment to its rows of a tile, and
    ``chunk_of(i, lane)``, ``copy(out, to, smem, at)`` to take them out again, 16 bytes at a time.
    """
    raise NotImplementedError


@unrolled
def copy_chunk(out, to, smem, at):
    """Eight elements of 16 bits."""
    store4(out, to, load2(smem, at, 8))
