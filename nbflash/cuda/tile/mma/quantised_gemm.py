"""The two products of attention by mma, of K and V as they are stored: a byte an element.

A warp has 16 rows of Q and keys of a tile that are its own. Which columns a fragment's contraction
or n stand for is free, as long as both operands agree: so every lane reads 16 bytes that lie side
by side, and makes float16 of them in registers. For lane 4 r + c:

    S = Q Kᵀ     contraction                 columns 64 n + 16 c + 4 w + {0, 1, 2, 3}
                 B of keys r, r + 8, …       bytes 16 c … of every 64 of its row, word w a step

    O += P V     contraction                 keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of every 16
                 B of those keys             bytes SPAN r … of every 8 SPAN of their rows:
                                             byte t is column r of the product's n-tile t
                 O, n-tile t, element e      column SPAN (2 c + e) + t

A stored tile has panels of 128 bytes a row, swizzled. Q comes in the order of the products, and as
float16 too: a row of bfloat16 times the power of two that brings its largest exponent to 15, so
that what float16 cannot hold is 2^-39 of that or less.
"""

import operator

from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.dequantise import FLOAT16, NAN_BYTES
from nbflash.cuda.tile.float_bits import EXPONENT, INVERSE, ONES, bits_float, signed, unsigned
from nbflash.cuda.tile.tracing import equal, load2, load4, maximum, select, store4, unrolled
from nbflash.cuda.tile.warp_math import pack_half, permute, unpack_half
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes

SIGNS = 0x80008000  # of two 16-bit numbers
# Bits of float32: the least exponent that counts, and 2^15 (above 1).
LEAST_EXPONENT, LARGEST = 16 << 23, 15 << 23


class StoredLayout:
    """Sizes that follow from head_dim and the keys of a tile, in elements and words."""

    def __init__(self, cfg):
        self.width = cfg.width
        self.span = min(16, self.width // 8)  # bytes of V that are neighbours in a lane
        self.panel_words = cfg.smem_keys * 32  # of a tile in shared memory
        self.keys = cfg.warp_keys
        self.pieces = self.width // 64  # of 16 bytes, of a row of K in a lane
        self.words = self.width // 32  # of a row of V in a lane

    def column(self, t, n):
        """Of O: column ``n`` of n-tile ``t``."""
        return t // 16 * 128 + n * self.span + t % 16


def make_stored_q(cfg):
    """``load_q_row(q, at, c)``, ``put_q(smem, at, upper, below)``: Q, in the order of the products.

    A lane's words of the row of Q at word ``at``, past it zeros, and what undoes their factor; and
    two rows' in shared memory, the four words of a product for each of the lanes in turn.
    """
    layout, columns, exact = StoredLayout(cfg), cfg.head_dim, cfg.dtype == "float16"

    def as_float16(words):
        largest = words[0] * 0 + LEAST_EXPONENT
        for word in words:
            largest = maximum(largest, word << 16 & EXPONENT)
            largest = maximum(largest, word & EXPONENT)
        (largest,) = across_lanes((largest,), QUAD, maximum)
        power = largest - LARGEST
        factor = bits_float(power * -1 + INVERSE)
        pairs = (unpack_half(cfg.dtype, word) for word in words)
        return [pack_half("float16", a * factor, b * factor) for a, b in pairs], power

    @unrolled
    def load_q_row(q, at, c):
        words = []
        for n in range(layout.pieces):
            column = c * 16 + 64 * n
            inside = column < columns
            place = at + select(inside, column // 2, 0)
            found = *load4(q, place), *load4(q, place + 4)
            words += [select(inside, x ^ (SIGNS - 2**32) if cfg.negate else x, 0) for x in found]
        words, inverse = (words, words[0] * 0 + ONES) if exact else as_float16(words)
        return tuple(words), bits_float(inverse)

    @unrolled
    def put_q(smem, at, upper, below):
        for i in range(0, len(upper), 2):
            words = upper[i], below[i], upper[i + 1], below[i + 1]
            store4(smem, at + i // 2 * 128, [signed(x) for x in words])

    return load_q_row, put_q


def make_stored_scores(cfg):
    """``scores(smem, q, k, key, c)``: S of a warp's keys; ``key`` is the first of them and r.

    ``q`` is the word of the lane's Q, ``k`` that of the tile.
    """
    layout, halves = StoredLayout(cfg), FLOAT16[cfg.stored]

    @unrolled
    def scores(smem, q, k, key, c):
        zero, s = bits_float(c * 0), []
        for first in range(0, layout.keys, 16):  # two n-tiles at once: registers are few
            two = [(zero,) * 4] * 2
            for n in range(layout.pieces):
                chunk = (c + 4 * (n % 2)) ^ (key % 8)
                place = k + (key + first) * 32 + chunk * 4 + n // 2 * layout.panel_words
                rows = load4(smem, place), load4(smem, place + 8 * 32)
                for w in range(4):
                    a = load4(smem, q + (4 * n + w) * 128)
                    for i, row in enumerate(rows):
                        two[i] = mma("float16", two[i], a, halves(row[w]))
            s += [x for tile in two for x in tile]
        return tuple(s)

    return scores


def make_stored_products(cfg):
    """``add_products(acc, p, smem, v, key, r)``: O += P V, of V as it is.

    ``v`` is the word of the tile, ``key`` the first of the warp's keys and 2 c. And
    ``add_finite(acc, p, smem, v, key, r, bad)``: of V without its NaN, and ``bad`` with a bit for
    each of the lane's keys that has one, anywhere in its row.
    """
    layout, halves, nan_bytes = StoredLayout(cfg), FLOAT16[cfg.stored], NAN_BYTES[cfg.stored]

    def row(smem, v, key, r):
        """A lane's words of a key."""
        at, swizzle = v + key * 32, key % 8
        if layout.span < 16:
            return list(load2(smem, at + (r // 2 ^ swizzle) * 4 + r % 2 * 2))
        places = [at + (r ^ swizzle) * 4 + i * layout.panel_words for i in range(layout.words // 4)]
        return [word for place in places for word in load4(smem, place)]

    def rows_of(smem, v, key, r):
        """Those of the keys of each step: 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of 16."""
        for first in range(0, layout.keys, 16):
            yield [row(smem, v, key + (first + i), r) for i in (0, 1, 8, 9)]

    def step(acc, p, rows):
        out = []
        for j, words in enumerate(zip(*rows, strict=True)):
            words, b = [unsigned(x) for x in words], []
            for first, second in (words[:2], words[2:]):
                # bytes 0 and 1 of both keys, then bytes 2 and 3
                pairs = permute(first, second, 0x5140), permute(first, second, 0x7362)
                b.append([x for pair in pairs for x in halves(pair)])
            for t, operand in enumerate(zip(*b, strict=True), 4 * j):
                out += mma("float16", acc[4 * t : 4 * t + 4], p, operand)
        return out

    @unrolled
    def add_products(acc, p, smem, v, key, r):
        for i, rows in enumerate(rows_of(smem, v, key, r)):
            acc = step(acc, p[4 * i : 4 * i + 4], rows)
        return tuple(acc)

    @unrolled
    def add_finite(acc, p, smem, v, key, r, bad):
        for i, rows in enumerate(rows_of(smem, v, key, r)):
            for n, words in enumerate(rows, 4 * i):
                for w, word in enumerate(words):
                    numbers = equal(nan_bytes(word), 0)
                    bad = select(numbers, bad, bad | (1 << n))
                    rows[n - 4 * i][w] = select(numbers, word, 0)
            acc = step(acc, p[4 * i : 4 * i + 4], rows)
        (bad,) = across_lanes((bad,), 8, operator.or_, first=4)
        return tuple(acc), bad

    return add_products, add_finite
