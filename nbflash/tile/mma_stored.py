"""The two products of attention by mma, of K and V as they are stored: a byte an element.

A warp has 16 rows of Q and 16 keys of a tile. Which columns a fragment's contraction or n stand
for is free, as long as both operands agree: so every lane reads 16 bytes that lie side by side,
and makes words of 16-bit numbers of them in registers. For lane 4 r + c:

    S = Q Kᵀ     contraction 16 n + 4 w …    columns 64 n + 16 c + 4 w + {0, 1, 2, 3}
                 B of keys r, r + 8          bytes 16 c … of every 64 of its row, word w a step

    O += P V     contraction                 keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9
                 B of those keys             bytes SPAN r … of every 8 SPAN of their rows:
                                             byte t is column r of the product's n-tile t
                 O, n-tile t, element e      column SPAN (2 c + e) + t

A stored tile has panels of 128 bytes a row, swizzled. Q comes in the order of the products.
"""

import operator

from nbflash.ptx.mma import mma
from nbflash.tile.dequantise import EXPONENT, HALVES, NAN_BYTES, ONES, bits_float, unsigned
from nbflash.tile.lanes import across_lanes
from nbflash.tile.unroll import equal, load2, load4, select, store4, unrolled
from nbflash.tile.warp_math import permute

ROWS = 16  # of Q, and keys of a warp
SIGNS = 0x80008000  # of two 16-bit numbers


class StoredLayout:
    """Sizes that follow from head_dim and the keys of a tile, in elements and words."""

    def __init__(self, cfg):
        self.width = 64 if cfg.head_dim <= 64 else 128 * cfg.stored_panels
        self.span = min(16, self.width // 8)  # bytes of V that are neighbours in a lane
        self.panel_words = cfg.tile_n * 32
        self.pieces = self.width // 64  # of 16 bytes, of a row of K in a lane
        self.words = self.width // 32  # of a row of V in a lane

    def column(self, t, n):
        """Of O: column ``n`` of n-tile ``t``."""
        return t // 16 * 128 + n * self.span + t % 16


def make_stored_q(cfg):
    """``load_q_row(q, at, c)``, ``put_q(smem, at, upper, below)``: Q, in the order of the products.

    A lane's words of the row of Q at word ``at``, past it zeros; and two rows' in shared memory,
    four words (a of a product) for each of the lanes one after the other.
    """
    layout, columns = StoredLayout(cfg), cfg.head_dim

    @unrolled
    def load_q_row(q, at, c):
        out = []
        for n in range(layout.pieces):
            column = c * 16 + 64 * n
            inside = column < columns
            place = at + select(inside, column // 2, 0)
            words = *load4(q, place), *load4(q, place + 4)
            out += [select(inside, x ^ (SIGNS - 2**32) if cfg.negate else x, 0) for x in words]
        return tuple(out)

    @unrolled
    def put_q(smem, at, upper, below):
        for i in range(0, len(upper), 2):
            values = upper[i], below[i], upper[i + 1], below[i + 1]
            store4(smem, at + i // 2 * 128, values)

    return load_q_row, put_q


def make_stored_scores(cfg):
    """``scores(smem, q, k, key, c)``: S of 16 keys from ``key`` = 16 w + r on.

    ``q`` is the word of the lane's Q, ``k`` that of the tile.
    """
    layout, halves = StoredLayout(cfg), HALVES[cfg.stored]

    @unrolled
    def scores(smem, q, k, key, c):
        zero = bits_float(c * 0)
        s = [(zero,) * 4] * 2
        for n in range(layout.pieces):
            chunk = (c + 4 * (n % 2)) ^ (key % 8)
            place = k + key * 32 + chunk * 4 + n // 2 * layout.panel_words
            rows = load4(smem, place), load4(smem, place + 8 * 32)
            for w in range(4):
                a = load4(smem, q + (4 * n + w) * 128)
                for i, row in enumerate(rows):
                    s[i] = mma(cfg.dtype, s[i], a, halves(cfg.dtype, row[w]))
        return (*s[0], *s[1])

    return scores


def make_stored_values(cfg):
    """What a warp does with V.

    load_v(smem, at, key, r)     a lane's words of keys ``key`` = 16 w + 2 c, + 1, + 8, + 9
    clean(v, scales)             V and the bits of its scales without infinities and NaN, and a bit
                                 for each of the keys that had one, anywhere in its row
    add_products(acc, p, v)      O += P V
    """
    layout, halves, nan_bytes = StoredLayout(cfg), HALVES[cfg.stored], NAN_BYTES[cfg.stored]

    @unrolled
    def load_v(smem, at, key, r):
        out = []
        for more in (0, 1, 8, 9):
            row, swizzle = at + (key + more) * 32, (key + more) % 8
            if layout.span == 16:
                for panel in range(0, layout.words, 4):
                    place = row + (r ^ swizzle) * 4 + panel // 4 * layout.panel_words
                    out += load4(smem, place)
            else:
                out += load2(smem, row + (r // 2 ^ swizzle) * 4 + r % 2 * 2)
        return tuple(out)

    @unrolled
    def clean(v, scales):
        bad, words, kept = scales[0] * 0, [], []
        for i, scale in enumerate(scales):
            infinite = equal(scale & EXPONENT, EXPONENT)
            kept.append(select(infinite, ONES, scale))
            bad = select(infinite, bad | (1 << i), bad)
            for word in v[i * layout.words : (i + 1) * layout.words]:
                numbers = equal(nan_bytes(word), 0)
                words.append(select(numbers, word, 0))
                bad = select(numbers, bad, bad | (1 << i))
        (bad,) = across_lanes((bad,), 8, operator.or_, first=4)
        return tuple(words), tuple(kept), bad

    @unrolled
    def add_products(acc, p, v):
        rows = [v[i * layout.words : (i + 1) * layout.words] for i in range(4)]
        out = []
        for j, words in enumerate(zip(*rows, strict=True)):
            words = [unsigned(x) for x in words]
            b = []
            for first, second in (words[:2], words[2:]):
                # bytes 0 and 1 of both keys, then bytes 2 and 3
                pairs = permute(first, second, 0x5140), permute(first, second, 0x7362)
                b.append([x for pair in pairs for x in halves(cfg.dtype, pair)])
            for t, operand in enumerate(zip(*b, strict=True), 4 * j):
                out += mma(cfg.dtype, acc[4 * t : 4 * t + 4], p, operand)
        return tuple(out)

    return load_v, clean, add_products
