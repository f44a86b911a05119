"""The parts of a row tile joined by the block that is done last: see :mod:`.decode_sm90`.

    each block     part → memory;  all that compute meet;  one thread counts
    the last one   all that compute meet;  rows of the tile, a warp each in turn: O and LSE

A count releases what its block has written, and acquires what those have that counted before. It
starts over by itself: the next call finds 0.
"""

from nbflash.constants import WARP
from nbflash.kernels.decode_sm90_load import COMPUTING
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.atom import atom_inc
from nbflash.ptx.mbarrier import bar_sync
from nbflash.tile.copy import as_stored
from nbflash.tile.mma_stored import WARPS
from nbflash.tile.parts import make_join
from nbflash.tile.pipeline import divided
from nbflash.tile.shared import global_address
from nbflash.tile.unroll import equal, hide, select, store, unrolled
from nbflash.tile.warp_math import approximate_reciprocal

AHEAD = 8  # parts whose O a warp has under way
MOST_ROUNDS = 8  # of loads, one after the other: more are for all multiprocessors, and a kernel


def joined_by_the_last(cfg, rows, splits):
    """Whether a block may join the parts of a tile of so many rows: a second kernel costs more."""
    return -(-min(rows, cfg.tile_m) // WARPS) * -(-splits // AHEAD) <= MOST_ROUNDS


def make_join_parts(cfg):
    """``join_parts(smem, at, count, tile, sizes, parts, results, thread)``.

    Word ``at`` of shared memory is free; ``count`` is the tile's own, (counts, number); ``tile``
    its batch, first head, first row, number of rows and heads that share them; ``sizes`` are
    splits, tokens, heads and rows of one split.
    """
    HEAD_DIM, (WHOLE, REST) = cfg.head_dim, divmod(cfg.head_dim, WARP)
    join, lse_of = make_join(HEAD_DIM, types.float32, 1, AHEAD)

    @inlined
    def is_last(smem, at, count, splits, thread):
        counts, number = count
        bar_sync(COMPUTING, WARPS * WARP)
        if thread == 0:
            before = atom_inc(global_address(counts, number), splits - 1)
            smem[at] = types.int32(1 if before == splits - 1 else 0)
        bar_sync(COMPUTING, WARPS * WARP)
        return smem[at] != 0

    @unrolled
    def normalised(acc, l):
        inverse = select(equal(l, 0.0), 0.0, approximate_reciprocal(l))
        return tuple(x * inverse for x in acc)

    def make_store(first, columns):
        @unrolled
        def store_columns(out, at, acc):
            for i, x in enumerate(acc[first : first + columns]):
                store(out, at + WARP * (first + i), as_stored(x, cfg.dtype))

        return store_columns

    store_whole, store_rest = make_store(0, WHOLE), make_store(WHOLE, 1)

    @inlined
    def join_parts(smem, at, count, tile, sizes, parts, results, thread):
        splits, nq, heads, rows = sizes
        if is_last(smem, at, count, splits, thread):
            b, first_head, first, tile_rows, pack = tile
            (part_o, part_lse), (out, lse) = parts, results
            thread = hide(thread)  # held from the start, what follows from it spills
            warp, lane = types.int32(thread // WARP), types.int32(thread % WARP)
            for r in range(warp, tile_rows, WARPS):
                token, nth = divided(types.int32(first + r), pack)
                head = first_head + nth
                row = types.int64((b * nq + token) * heads + head)
                at_lse = types.int64((b * heads + head) * nq + token)
                acc, m, l = join(part_o, part_lse, rows, row, at_lse, splits, 0, lane)
                acc = normalised(acc, l)
                place = types.int64(row * HEAD_DIM + lane)
                store_whole(out, place, acc)
                if lane < REST:
                    store_rest(out, place, acc)
                if lane == 0:
                    lse[at_lse] = lse_of(m, l)

    return join_parts
