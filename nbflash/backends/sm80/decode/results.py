"""The end of the portable decode kernel: O, m and l of all warps become O and LSE of the part.

ring of warp w     O: 16 rows of float32, ``o_words`` apart; then (m, l) of every row
"""

from nbflash.backends.sm80.decode.config import ROWS
from nbflash.backends.split_kv.join_warps import (
    make_join_warps,
    make_stored_places,
    put_statistics,
)
from nbflash.backends.split_kv.part import make_rows
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.float_bits import float_bits
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.softmax import make_softmax
from nbflash.cuda.tile.tracing import store, store4, unrolled
from nbflash.definitions.constants import WARP


def make_places(cfg):
    """``put_o(smem, own, acc, row, quad)``, ``place_of(row, column)``: O of a warp in its ring, the
    word of a column, of four that follow each other.
    """
    O_WORDS, fragment = cfg.o_words, Fragment(1, cfg.width)

    @unrolled
    def put(smem, at, acc):
        for i, x in enumerate(acc):
            row = fragment.row_offset(fragment.row(i))
            store(smem, at + (row * O_WORDS + fragment.column(i)), float_bits(x))

    @inlined
    def put_o(smem, own, acc, row, quad):
        put(smem, types.int32(own + row * O_WORDS + 2 * quad), acc)

    @inlined
    def place_of(row, column):
        return row * O_WORDS + column

    return (put_o, place_of) if not cfg.quantised else make_stored_places(cfg)


def make_results(cfg):
    """``store_results(smem, word, rows, seen, results, parts, thread)``.

    ``word`` is where the block's shared memory starts; ``rows`` are the first row, those of the
    packed heads, and the heads; ``seen`` what `make_rows` takes behind the row;
    ``results`` O, m and l of a lane; ``parts`` the kernel's part_o and part_lse.
    """
    HEAD_DIM, QUADS, THREADS = cfg.head_dim, cfg.head_dim // 4, cfg.threads
    RINGS, RING = cfg.smem.rings // 4, cfg.ring_bytes // 4
    STATISTICS, (put_o, place_of) = ROWS * cfg.o_words, make_places(cfg)
    row_total, join = make_softmax(1, 16).row_total, make_join_warps(cfg.warps, RING, RING)
    store_quad, (row_at, _) = unrolled(store4), make_rows(cfg, windows=True)

    @inlined
    def store_results(smem, word, rows, seen, results, parts, thread):
        (first, count, _), (acc, m, l), (part_o, part_lse) = rows, results, parts
        lane, l = types.int32(thread & (WARP - 1)), row_total(l)
        row, quad = types.int32(lane >> 2), types.int32(lane & 3)
        own = types.int32(word + RINGS + (thread >> 5) * RING)
        cuda.syncwarp()  # all lanes are through with the stages
        put_o(smem, own, acc, row, quad)
        if quad == 0:
            put_statistics(smem, types.int32(own + STATISTICS + 2 * row), m, l)
        cuda.syncthreads()  # results of all warps are in place
        where, plane, keys, lo, hi = seen
        for i in range(thread, min(count - first, ROWS) * QUADS, THREADS):
            row, column = types.int32(i // QUADS), types.int32(i % QUADS * 4)
            at = types.int32(word + RINGS + place_of(row, column))
            found = join(smem, at, types.int32(word + RINGS + STATISTICS + 2 * row))
            _, (o_at, lse_at) = row_at(types.int32(first + row), where, plane, keys, lo, hi)
            store_quad(part_o, o_at * HEAD_DIM + column, found[:4])
            if column == 0:
                part_lse[lse_at] = found[4]

    return store_results
