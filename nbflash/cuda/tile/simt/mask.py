"""The mask predicate of a score fragment: the only place where a kernel meets a mask.

Fragment element (i, j) is query row ``row + rows[i]`` and key column ``column + columns[j]``
of a tile; the offsets are static. FULL tiles never come here.
"""

from masks import BITS, INTERVAL
from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.tracing import both, equal, load, select, unrolled


def make_apply_mask(rows, columns, tile_m, tile_n):
    """``S[i, j] = −inf`` where the tile's kind hides it.

    Returns ``apply_mask(s, kind, lo, hi, first, last, q0, n0, bits, row, column)``: the tile
    starts at query ``q0`` and key ``n0``; ``lo`` and ``hi`` hold the bounds of query 0 at
    ``first`` and of the last query at ``last``, which rows past the end repeat.
    """
    words = -(-tile_n // 32)

    @unrolled
    def row_bounds(bound, at, last):
        places = [at + r for r in rows]
        return tuple(load(bound, select(p < last, p, last)) for p in places)

    @unrolled
    def keep_interval(s, lo, hi, kv):
        out = []
        for i in range(len(rows)):
            for j, c in enumerate(columns):
                inside = both(kv + c >= lo[i], kv + c < hi[i])
                out.append(select(inside, s[i * len(columns) + j], NEG_INF))
        return tuple(out)

    @unrolled
    def keep_bits(s, bits, at, column):
        out = []
        for i, r in enumerate(rows):
            for j, c in enumerate(columns):
                packed = load(bits, at + (column + c) // 32 + r * words)
                hidden = equal((packed >> (column + c) % 32) & 1, 0)
                out.append(select(hidden, NEG_INF, s[i * len(columns) + j]))
        return tuple(out)

    @inlined
    def apply_mask(s, kind, lo, hi, first, last, q0, n0, bits, row, column):
        if kind == INTERVAL:
            low = row_bounds(lo, first + q0 + row, last)
            high = row_bounds(hi, first + q0 + row, last)
            return keep_interval(s, low, high, n0 + column)
        tile = kind - BITS
        return keep_bits(s, bits, (tile * tile_m + row) * words, column)

    return apply_mask
