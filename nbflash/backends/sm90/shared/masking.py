"""Which scores of a tile count, as bits of a word for each of a thread's two rows."""

from masks import BITS, FULL, INTERVAL
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.softmax import make_keep

ALL = 0xFFFFFFFF


def make_keep_of(cfg):
    """``keep_of(kind, n0, row, bh, masking, thread)``: ``keep`` of a tile, for its first key
    ``n0``, row tile, and batch and head in one number; ``apply_keep`` masks scores with it.
    """
    TILE_M, FULL_TILES = cfg.tile_m, cfg.full_tiles
    keep_interval, keep_bits, _ = make_keep(TILE_M, cfg.tile_n)

    @inlined
    def row_bounds(bound, plane, nq, row, thread):
        """Rows past the end repeat the last one's."""
        upper, first = types.int32(row * TILE_M + row_of_thread(thread)), plane * nq
        end = types.int32(nq - 1)
        return bound[first + min(upper, end)], bound[first + min(types.int32(upper + 8), end)]

    @inlined
    def keep_of(kind, n0, row, bh, masking, thread):
        quad = types.int32(2 * (thread & 3))
        if FULL_TILES or kind == FULL:
            return types.uint32(ALL), types.uint32(ALL)
        if kind == INTERVAL:
            plane_of, lo, hi, _, nq = masking
            plane = plane_of[bh]
            lows = row_bounds(lo, plane, nq, row, thread)
            highs = row_bounds(hi, plane, nq, row, thread)
            upper = keep_interval(lows[0], highs[0], n0, quad)
            below = keep_interval(lows[1], highs[1], n0, quad)
            return types.uint32(upper), types.uint32(below)
        bits, r = masking[3], row_of_thread(thread)
        tile = opaque(kind - BITS)  # or its addresses are computed for every tile
        upper = keep_bits(bits, tile, r, quad)
        return types.uint32(upper), types.uint32(keep_bits(bits, tile, r + 8, quad))

    return keep_of
