"""A part of the keys of decode, as kernels of tensor cores see it: its tiles, pages and rows."""

from masks import BITS, FULL, INTERVAL
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.warp_reduce import first_behind
from nbflash.cuda.tile.wgmma.softmax import make_keep

TOKENS = 64  # of a row of a mask's tiles: all that a call may have


@inlined
def located(key, pages):
    """The page of a key, and where it is in there."""
    table, first_page, page_size, sequence = pages
    page, inside = sequence, key
    if page_size > 0:
        nth, inside = divmod_int32(key, page_size)
        page = types.int32(table[first_page + nth])
    return page, inside


def make_tiles_of_part(cfg):
    """``tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane)``: the first, the end.

    Counted are the sequence's tiles, or those before its end that the mask lists.
    """
    TILE_N, MASKED = cfg.tile_n, cfg.masked

    @inlined
    def tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane):
        begin, end = types.int32(0), types.int32((length + TILE_N - 1) // TILE_N)
        if MASKED:
            begin, last = types.int32(row_ptr[plane]), types.int32(row_ptr[plane + 1])
            end = first_behind(col_idx, begin, last, end, lane)
        tiles = (end - begin + splits - 1) // splits
        return min(begin + split * tiles, end), min(begin + (split + 1) * tiles, end)

    return tiles_of_part


def make_rows(cfg):
    """``row_at, keep_of``: which token and head a row is, and what of a tile it sees.

    row_at(row, where, plane, length, lo, hi)    its token and bounds; where O and LSE belong
    keep_of(kind, n0, seen, bits, quad)            a bit for each key of this thread
    """
    MASKED = cfg.masked
    keep_interval, keep_bits, _ = make_keep(TOKENS, cfg.tile_n)

    @inlined
    def row_at(row, where, plane, length, lo, hi):
        """Rows behind the last one repeat it; their places are −1."""
        first_head, part, pack, nq, heads = where
        token, nth = divmod_int32(min(row, nq * pack - 1), pack)
        if MASKED:
            i = plane * nq + token
            seen = token, types.int32(lo[i]), types.int32(hi[i]), length
        else:
            seen = token, types.int32(0), types.int32(0), types.int32(length - nq + token + 1)
        head = first_head + nth
        o_at = types.int64((part * nq + token) * heads + head)
        lse_at = types.int64((part * heads + head) * nq + token)
        if row >= nq * pack:
            o_at = lse_at = types.int64(-1)
        return seen, (o_at, lse_at)

    @inlined
    def keep_of(kind, n0, seen, bits, quad):
        token, low, high, end = seen
        keep = keep_interval(types.int32(0), end, n0, quad)
        if MASKED:
            if kind == INTERVAL:
                keep &= keep_interval(low, high, n0, quad)
            elif kind != FULL:
                keep &= keep_bits(bits, types.int32(kind - BITS), token, quad)
        return types.uint32(keep)

    return row_at, keep_of
