"""A part of the keys of decode, as kernels of tensor cores see it: its tiles, pages and rows."""

from masks import BITS, FULL, INTERVAL
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.warp_reduce import first_behind
from nbflash.cuda.tile.wgmma.softmax import make_keep
from nbflash.definitions.constants import MAX_QUERIES

TOKENS = MAX_QUERIES  # of a row of a mask's tiles: all that a call may have


@inlined
def located(key, pages):
    """The page of a key, and where it is in there."""
    table, first_page, page_size, sequence = pages
    page, inside = sequence, key
    if page_size > 0:
        nth, inside = divmod_int32(key, page_size)
        page = types.int32(table[first_page + nth])
    return page, inside


def make_tiles_of_window(cfg):
    """``tiles_of_window(keys, split, splits, plane, row_ptr, col_idx, lane)``: the first, the end.

    ``keys`` are the first that some row sees and the end of the sequence. Counted are the tiles
    that have any of these keys, or those of them that the mask lists.
    """
    TILE_N, MASKED = cfg.tile_n, cfg.masked

    @inlined
    def tiles_of_window(keys, split, splits, plane, row_ptr, col_idx, lane):
        first, length = keys
        begin, end = types.int32(first // TILE_N), types.int32((length + TILE_N - 1) // TILE_N)
        if MASKED:
            first_tile = begin
            begin, last = types.int32(row_ptr[plane]), types.int32(row_ptr[plane + 1])
            end = first_behind(col_idx, begin, last, end, lane)
            if first_tile > 0:
                begin = types.int32(first_behind(col_idx, begin, end, first_tile, lane))
        tiles = (end - begin + splits - 1) // splits
        return min(begin + split * tiles, end), min(begin + (split + 1) * tiles, end)

    return tiles_of_window


def make_tiles_of_part(cfg):
    """``tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane)``: no window."""
    tiles_of_window = make_tiles_of_window(cfg)

    @inlined
    def tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane):
        keys = types.int32(0), length
        return tiles_of_window(keys, split, splits, plane, row_ptr, col_idx, lane)

    return tiles_of_part


def make_bounds(cfg, *, windows):
    """``bounds(token, nq, keys)``: the first key that a token may see, and the end.

    ``keys`` is the length, and with windows also how far to the left and to the right of its own
    position a token sees. The mask hides more. With score functions a token before the first key
    sees nothing.
    """
    MASKED, SCORED = cfg.masked, windows and cfg.score is not None

    @inlined
    def of_window(token, nq, keys):
        length, left, right = keys
        at = length - nq + token
        first = types.int32(max(at - left, types.int32(0)))
        end = types.int32(min(at + right + 1, length))
        if SCORED and at < 0:
            end = types.int32(0)
        return first, end

    @inlined
    def of_rule(token, nq, length):
        end = length if MASKED else types.int32(length - nq + token + 1)
        return types.int32(0), types.int32(end)

    return of_window if windows else of_rule


def make_rows(cfg, *, windows=False):
    """``row_at, keep_of``: which token and head a row is, and what of a tile it sees.

    row_at(row, where, plane, keys, lo, hi)      its token and bounds; where O and LSE belong
    keep_of(kind, n0, seen, bits, quad)            a bit for each key of this thread

    ``keys`` as :func:`make_bounds` takes them.
    """
    MASKED, bounds = cfg.masked, make_bounds(cfg, windows=windows)
    keep_interval, keep_bits, _ = make_keep(TOKENS, cfg.tile_n)

    @inlined
    def row_at(row, where, plane, keys, lo, hi):
        """Rows behind the last one repeat it; their places are −1."""
        first_head, part, pack, nq, heads = where
        token, nth = divmod_int32(min(row, nq * pack - 1), pack)
        first, end = bounds(token, nq, keys)
        low = high = types.int32(0)
        if MASKED:
            i = plane * nq + token
            low, high = types.int32(lo[i]), types.int32(hi[i])
        seen = token, (low, high), (first, end)
        head = first_head + nth
        o_at = types.int64((part * nq + token) * heads + head)
        lse_at = types.int64((part * heads + head) * nq + token)
        if row >= nq * pack:
            o_at = lse_at = types.int64(-1)
        return seen, (o_at, lse_at)

    @inlined
    def keep_of(kind, n0, seen, bits, quad):
        token, (low, high), (first, end) = seen
        keep = keep_interval(first, end, n0, quad)
        if MASKED:
            if kind == INTERVAL:
                keep &= keep_interval(low, high, n0, quad)
            elif kind != FULL:
                keep &= keep_bits(bits, types.int32(kind - BITS), token, quad)
        return types.uint32(keep)

    return row_at, keep_of
