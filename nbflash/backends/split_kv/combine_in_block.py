"""The parts of a row tile joined by the block that is done last, at the end of a decode kernel.

    each block     part → memory;  all that compute meet;  one thread counts
    the last one   all that compute meet;  rows of the tile, a warp each in turn: O and LSE

A count releases what its block has written, and acquires what those have that counted before. It
starts over by itself: the next call finds 0.

Nothing runs beside a join, and one part after the other would be a wait each for global memory. So
O of many parts comes by ``cp.async`` to where the stages have been, which needs no registers, while
m and l are found. A lane reads what it has copied itself: four columns.

    span of 128 columns, warp w       part 0     lane 0 … 31, four words each
                                      part 1     …
    w of 32 parts, warp w             where Q has been;  behind those of all: whether it is the last
"""

from typing import NamedTuple

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.atom import atom_inc
from nbflash.cuda.ptx.mbarrier import bar_sync
from nbflash.cuda.tile.addresses import global_address
from nbflash.cuda.tile.convert import as_stored
from nbflash.cuda.tile.cp_async import cp_async4, make_wait
from nbflash.cuda.tile.float_bits import bits_float, float_bits
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.split_kv import make_statistics, weight_of
from nbflash.cuda.tile.tracing import equal, fma, load4, opaque, select, store4, unrolled
from nbflash.cuda.tile.warp_math import approximate_reciprocal
from nbflash.definitions.constants import WARP

COMPUTING = 1  # the named barrier of those that compute
JOINING = 4 * WARP  # bytes: a weight for each lane
SPAN = 4 * WARP  # columns that a warp joins at once
TOGETHER = 4  # parts that are added in one step
MOST_ROUNDS = 2  # of copies, one after the other: more take longer than a second kernel


class Room(NamedTuple):
    """What a decode configuration has for it, as its ``join_room``."""

    warps: int  # that compute
    stages: int  # the byte of shared memory where stages begin; JOINING a warp and 4 are before it
    size: int  # bytes of all stages


def parts_ahead(cfg):
    """How many parts of a span are under way: a weight for each lane, and room for them all."""
    room = cfg.join_room.size // (4 * SPAN * cfg.join_room.warps)
    return min(WARP, room // TOGETHER * TOGETHER)


def joined_by_the_last(cfg, rows, splits):
    """Whether a block may join the parts of a tile of so many rows, or a second kernel does."""
    spans = min(rows, cfg.tile_m) * -(-cfg.head_dim // SPAN)
    return -(-spans // cfg.join_room.warps) * -(-splits // parts_ahead(cfg)) <= MOST_ROUNDS


def make_join_parts(cfg):
    """``join_parts(smem, words, count, tile, sizes, parts, results, thread)``.

    ``words`` is where the block's shared memory starts; ``count`` is the tile's own, (counts,
    number); ``tile`` its batch, first head, first row, number of rows and heads that share them;
    ``sizes`` are splits, tokens, heads and rows of one split.
    """
    HEAD_DIM, AHEAD, (WARPS, STAGES, _) = cfg.head_dim, parts_ahead(cfg), cfg.join_room
    SPANS, LAST = -(-HEAD_DIM // SPAN), WARPS * WARP
    ZERO, O_START = types.float32(0), (types.float32(0),) * 4
    statistics, lse_of = make_statistics(types.float32)
    copy, weight, bits = unrolled(cp_async4), unrolled(weight_of), unrolled(float_bits)
    wait = make_wait()

    @inlined
    def is_last(smem, words, count, splits, thread):
        counts, number = count
        bar_sync(COMPUTING, WARPS * WARP)
        if thread == 0:
            before = atom_inc(global_address(counts, number), splits - 1)
            smem[words + LAST] = types.int32(1 if before == splits - 1 else 0)
        bar_sync(COMPUTING, WARPS * WARP)
        return smem[words + LAST] != 0

    @inlined
    def send(smem, to, part_o, at, step, first, splits):
        """O of the parts from ``first`` on, as far as there is room."""
        for s in range(first, min(first + AHEAD, splits)):
            copy(smem, types.int32(to + (s - first) * SPAN), part_o, at + s * step)

    @unrolled
    def add(acc, smem, to, weights, count):
        """``O += w_s O_s`` for the parts that are there of ``TOGETHER``."""
        for u, w in enumerate(load4(smem, weights)):
            there, o = count > u, load4(smem, to + u * SPAN)
            o = [select(there, bits_float(x), 0.0) for x in o]
            acc = tuple(fma(bits_float(w), x, total) for x, total in zip(o, acc, strict=True))
        return acc

    @inlined
    def join(smem, to, weights, part_o, part_lse, place, splits, lane):
        """Σ w_s O_s of a lane's four columns, m and l."""
        rows, at, at_lse = place
        step, acc = types.int64(rows * HEAD_DIM), O_START
        send(smem, to, part_o, at, step, 0, splits)
        m, l = statistics(part_lse, rows, at_lse, splits, lane)
        for first in range(0, splits, AHEAD):
            w = ZERO
            if first + lane < splits:
                w = weight(part_lse[(first + lane) * rows + at_lse], m)
            cuda.syncwarp()  # all are through with the weights before
            smem[weights + lane] = bits(w)
            cuda.syncwarp()
            wait(smem)
            u, count = types.int32(0), types.int32(min(AHEAD, splits - first))
            while u < count:
                parts, w_at = types.int32(to + u * SPAN), types.int32(weights + u)
                acc = add(acc, smem, parts, w_at, types.int32(count - u))
                u = opaque(types.int32(u + TOGETHER))  # unrolled once more, registers are too few
            send(smem, to, part_o, at, step, first + AHEAD, splits)
        return acc, m, l

    @unrolled
    def store_o(out, at, acc, l):
        inverse = select(equal(l, 0.0), 0.0, approximate_reciprocal(l))
        store4(out, at, [as_stored(x * inverse, cfg.dtype) for x in acc])

    @inlined
    def join_parts(smem, words, count, tile, sizes, parts, results, thread):
        splits, nq, heads, rows = sizes
        if is_last(smem, words, count, splits, thread):
            b, first_head, first, tile_rows, pack = tile
            (part_o, part_lse), (out, lse) = parts, results
            thread = opaque(thread)  # held from the start, what follows from it spills
            warp, lane = types.int32(thread // WARP), types.int32(thread % WARP)
            to = types.int32(words + STAGES // 4 + warp * AHEAD * SPAN + 4 * lane)
            weights = types.int32(words + warp * WARP)
            for i in range(warp, tile_rows * SPANS, WARPS):
                r, column = i // SPANS, i % SPANS * SPAN + 4 * lane
                token, nth = divmod_int32(types.int32(first + r), pack)
                head = first_head + nth
                row = types.int64((b * nq + token) * heads + head)
                at_lse = types.int64((b * heads + head) * nq + token)
                # Lanes behind the last column work on it and store nothing.
                at = types.int64(row * HEAD_DIM + min(column, HEAD_DIM - 4))
                place = rows, at, at_lse
                acc, m, l = join(smem, to, weights, part_o, part_lse, place, splits, lane)
                if column < HEAD_DIM:
                    store_o(out, at, acc, l)
                if column == 0:
                    lse[at_lse] = lse_of(m, l)

    return join_parts
