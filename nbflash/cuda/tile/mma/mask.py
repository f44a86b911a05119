"""The mask predicate of fragments of mma: the only place where these kernels meet a mask."""

from masks import BITS, INTERVAL
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.tracing import both, equal, load, select, unrolled


def make_apply_mask(m_tiles, n, tile_m):
    """``S = −inf`` where the tile's kind hides it: queries down, keys across.

    Returns ``apply_mask(s, kind, plane, nq, q0, n0, mask, row, column)``: ``mask`` is (lo, hi,
    bits) of the schedule; the lane's first row and column are in the tile, which starts at query
    ``q0`` and key ``n0``. Rows past the end repeat the last one.
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


def make_apply_mask_transposed(m_tiles, n, tile_m, tile_n):
    """The same for fragments with keys down and queries across; ``row`` is the lane's first key,
    ``column`` its first query. A lane's keys are in one word of a query's.
    """
    fragment, words = Fragment(m_tiles, n), -(-tile_n // 32)
    queries = [8 * (i // 2) + i % 2 for i in range(n // 4)]

    def query(element):
        return fragment.column(element) // 8 * 2 + element % 2

    @unrolled
    def query_bounds(bound, first, q, last):
        places = [q + c for c in queries]
        return tuple(load(bound, first + select(p < last, p, last)) for p in places)

    @unrolled
    def keep_interval(s, lo, hi, kv):
        low, high = [x - kv for x in lo], [x - kv for x in hi]
        out = []
        for element, x in enumerate(s):
            i, key = query(element), fragment.row_offset(fragment.row(element))
            out.append(select(both(low[i] < key + 1, high[i] > key), x, NEG_INF))
        return tuple(out)

    @unrolled
    def keep_bits(s, bits, tile, key, q):
        first = (tile * tile_m + q) * words + key // 32
        packed = [load(bits, first + c * words) >> key % 32 for c in queries]
        out = []
        for element, x in enumerate(s):
            bit = 1 << fragment.row_offset(fragment.row(element))
            out.append(select(equal(packed[query(element)] & bit, 0), NEG_INF, x))
        return tuple(out)

    @inlined
    def apply_mask(s, kind, plane, nq, q0, n0, mask, row, column):
        lo, hi, bits = mask
        if kind == INTERVAL:
            first, q, last = plane * nq, types.int32(q0 + column), types.int32(nq - 1)
            low, high = query_bounds(lo, first, q, last), query_bounds(hi, first, q, last)
            return keep_interval(s, low, high, types.int32(n0 + row))
        return keep_bits(s, bits, types.int32(kind - BITS), types.int32(row), types.int32(column))

    return apply_mask
