"""The mask predicate of fragments of mma: the only place where these kernels meet a mask."""

from masks import BITS, INTERVAL
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.tracing import both, equal, load, select, unrolled


def make_apply_mask(m_tiles, n, tile_m):
    """``S = −inf`` where the tile's kind hides it: queries down, keys across.

    Returns ``apply_mask(s, kind, plane, nq, q0, n0, mask, row, column)``: ``mask`` is (lo, hi,
    bits) of the schedule, ``row`` and ``column`` are the lane's first ones in the tile, which starts
    at query ``q0`` and key ``n0``. Rows past the end repeat the last one.
    """
    fragment, words = Fragment(m_tiles, n), -(-n // 32)
    rows = [fragment.row_offset(i) for i in range(fragment.rows)]

    @unrolled
    def row_bounds(bound, first, q, last):
        places = [q + r for r in rows]
        return tuple(load(bound, first + select(p < last, p, last)) for p in places)

    @unrolled
    def keep_interval(s, lo, hi, kv):
        low, high = [x - kv for x in lo], [x - kv for x in hi]
        out = []
        for element, x in enumerate(s):
            i, column = fragment.row(element), fragment.column(element)
            out.append(select(both(low[i] < column + 1, high[i] > column), x, NEG_INF))
        return tuple(out)

    @unrolled
    def keep_bits(s, bits, tile, row, column):
        packed = [
            [load(bits, (tile * tile_m + row + r) * words + w) >> column for w in range(words)]
            for r in rows
        ]
        out = []
        for element, x in enumerate(s):
            word, bit = divmod(fragment.column(element), 32)
            hidden = equal(packed[fragment.row(element)][word] & (1 << bit), 0)
            out.append(select(hidden, NEG_INF, x))
        return tuple(out)

    @inlined
    def apply_mask(s, kind, plane, nq, q0, n0, mask, row, column):
        lo, hi, bits = mask
        if kind == INTERVAL:
            first, q, last = plane * nq, types.int32(q0 + row), types.int32(nq - 1)
            low, high = row_bounds(lo, first, q, last), row_bounds(hi, first, q, last)
            return keep_interval(s, low, high, types.int32(n0 + column))
        return keep_bits(s, bits, types.int32(kind - BITS), types.int32(row), types.int32(column))

    return apply_mask
