"""Tiles from global to shared memory by ``cp.async``, and back."""

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.cp_async import cp_async16
from nbflash.cuda.tile.finite import not_finite_in
from nbflash.cuda.tile.float_bits import signed, unsigned
from nbflash.cuda.tile.mma.layout import CHUNK
from nbflash.cuda.tile.tracing import both, equal, load4, select, store, store4, unrolled
from nbflash.definitions.constants import WARP


class ChunkCopy:
    """Copies of ``rows`` rows of a `SharedTile` by ``threads`` threads, 16 bytes at a time.

    send(to, source, base, stride, valid, thread)
        From the element ``base`` on to the tile at address ``to``; rows from ``valid`` on, and
        columns from ``head_dim`` on, become zero.
    scan(smem, at, thread)
        Of the tile at word ``at`` what this thread has sent: 0 if it is finite.
    clean(smem, at, thread)
        And those chunks of it that are not become zeros.
    """

    def __init__(self, tile, rows, threads, head_dim, dtype):
        chunks, total = tile.chunks, rows * tile.chunks
        if total % threads:
            raise ValueError(f"{rows} × {chunks} chunks do not divide among {threads} threads")
        not_finite = not_finite_in(dtype)

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
        def scan(smem, at, thread):
            words = [at + tile.place(row, chunk) // 4 for row, chunk in places(thread)]
            return not_finite([x for word in words for x in load4(smem, word)])

        @unrolled
        def clean(smem, at, thread):
            for row, chunk in places(thread):
                word = at + tile.place(row, chunk) // 4
                found = load4(smem, word)
                good = equal(not_finite(found), 0)
                store4(smem, word, [select(good, x, 0) for x in found])

        self.send, self.scan, self.clean = send, scan, clean


def make_store_rows(tile, m_tiles, head_dim):
    """``store_rows(out, base, stride, valid, packed, smem, at, thread)``: a warp's packed fragment.

    It goes through the warp's rows of a tile in shared memory, the first of which is at word
    ``at``, so that 16 bytes leave at a time; rows from ``valid`` on are not stored. ``out`` is in
    words, ``base`` and ``stride`` in elements.
    """
    CHUNKS = head_dim // CHUNK
    ROWS, words = 16 * m_tiles, tile.width // 4
    PASSES = -(-ROWS * CHUNKS // WARP)

    @unrolled
    def put(smem, at, packed, lane):
        row, word = lane // 4, lane % 4
        for i, x in enumerate(packed):
            t, j, below = i // words, i % words // 2, i % 2
            place = tile.place(row + (16 * t + 8 * below), row * 0 + j) // 4
            store(smem, at + place + word, signed(x))

    @unrolled
    def place_of(i, lane):
        """Row, chunk and word of what a lane takes in a pass."""
        number = i * WARP + lane
        row, chunk = number // CHUNKS, number % CHUNKS
        return row, chunk, tile.place(row, chunk) // 4

    @unrolled
    def copy_chunk(out, to, smem, at):
        store4(out, to, [unsigned(x) for x in load4(smem, at)])

    @inlined
    def store_rows(out, base, stride, valid, packed, smem, at, thread):
        lane = types.int32(thread & (WARP - 1))
        put(smem, at, packed, lane)
        cuda.syncwarp()
        for i in range(PASSES):
            row, chunk, word = place_of(types.int32(i), lane)
            if row < min(valid, ROWS):
                copy_chunk(out, (base + row * stride + chunk * CHUNK) >> 1, smem, at + word)

    return store_rows
