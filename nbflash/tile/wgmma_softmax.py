"""Online softmax, masks and rounding on the accumulators of wgmma, in base 2.

A thread holds two rows of a 64 × n score tile (see :mod:`nbflash.ptx.wgmma`); the four lanes
of a quad share them. Row statistics are pairs, one value per row:

    lane 4 r + q of warp w, i = 0, 1:   row 16 w + r + 8 i,   columns 8 j + 2 q + e
    keep[i], bit 2 j + e:               whether that score counts
"""

import functools
import math
import operator

from nbflash.ptx._asm import inlined
from nbflash.tile.softmax import NEG_INF, guarded
from nbflash.tile.unroll import (
    either,
    equal,
    exp2,
    fma,
    load,
    maximum,
    reciprocal,
    select,
    shuffle_xor,
    unrolled,
)
from nbflash.tile.warp_math import any_lane, log2, pack_half

LN2 = math.log(2.0)
# O, l and P may refer to an old maximum as long as 2^(S − m) stays small: most tiles then
# leave O alone. Exact: O / l does not depend on the reference.
MOST_GROWTH = 8.0


def row_of(element):
    """Which of a thread's two rows an element of a fragment belongs to."""
    return element // 2 % 2


def _quad(x, combine):
    x = combine(x, shuffle_xor(x, 1))
    return combine(x, shuffle_xor(x, 2))


def _fold_rows(s, combine, chains=8):
    """Of each row its elements combined, in chains side by side: one would wait at every step."""
    partial = {}
    for i, x in enumerate(s):
        chain = row_of(i), i // 4 * 2 % chains + i % 2
        partial[chain] = combine(partial[chain], x) if chain in partial else x
    return [
        functools.reduce(combine, [x for (r, _), x in partial.items() if r == row])
        for row in (0, 1)
    ]


def make_wgmma_softmax(n, dtype):
    """The steps for score fragments of ``n`` columns.

    Returns ``row_max, outgrown, rescale, probabilities, row_sum, pack, apply_keep``.
    """
    size = n // 2

    @unrolled
    def row_max(m, s):
        best = map(maximum, m, _fold_rows(s, maximum))
        return tuple(_quad(x, maximum) for x in best)

    @unrolled
    def outgrown(m, s, scale):
        """Whether some score of the warp has grown past what P holds with this maximum."""
        above = [
            (b - a) * scale > MOST_GROWTH for a, b in zip(m, _fold_rows(s, maximum), strict=True)
        ]
        return any_lane(either(*above))

    @unrolled
    def rescale(m, m_new, scale):
        """α = 2^((m − m') · scale)."""
        return tuple(exp2((a - guarded(b)) * scale) for a, b in zip(m, m_new, strict=True))

    @unrolled
    def probabilities(s, m, scale):
        """P = 2^(S · scale − m · scale), one fma and one exp2 each."""
        shift = [guarded(x) * (scale * -1.0) for x in m]
        return tuple(exp2(fma(s[i], scale, shift[row_of(i)])) for i in range(size))

    @unrolled
    def row_sum(l, p):
        return tuple(map(operator.add, l, _fold_rows(p, operator.add, chains=4)))

    @unrolled
    def pack(p):
        """Neighbours rounded and packed: the A fragment of P V."""
        return tuple(pack_half(dtype, p[i], p[i + 1]) for i in range(0, size, 2))

    @unrolled
    def apply_keep(s, keep):
        out = []
        for i in range(size):
            bit = 1 << (2 * (i // 4) + i % 2)
            out.append(select(equal(keep[row_of(i)] & bit, 0), NEG_INF, s[i]))
        return tuple(out)

    return row_max, outgrown, rescale, probabilities, row_sum, pack, apply_keep


def make_finish(columns, dtype):
    """``row_total(l)``, ``normalise(acc, l)`` and ``log_sum_exp(m, l, scale)``: a row's end."""

    @unrolled
    def row_total(l):
        return tuple(_quad(x, lambda a, b: a + b) for x in l)

    @unrolled
    def normalise(acc, l):
        """O / l, rounded and packed; 0 for a row that attends nothing."""
        inverse = [select(equal(x, 0.0), 0.0, reciprocal(x)) for x in l]
        scaled = [acc[i] * inverse[row_of(i)] for i in range(columns // 2)]
        return tuple(pack_half(dtype, *scaled[i : i + 2]) for i in range(0, columns // 2, 2))

    @unrolled
    def log_sum_exp(m, l, scale):
        """(m · scale + log2 l) ln 2, −inf for a row that attends nothing."""
        return tuple(
            select(equal(b, 0.0), NEG_INF, fma(guarded(a), scale, log2(b)) * LN2)
            for a, b in zip(m, l, strict=True)
        )

    return row_total, normalise, log_sum_exp


@unrolled
def scale_fragment(acc, alpha):
    """``acc[row, :] *= alpha[row]``."""
    return tuple(x * alpha[row_of(i)] for i, x in enumerate(acc))


def make_keep(tile_m, tile_n):
    """``keep_interval, keep_bits, gather``: a thread's columns of a row as bits of a word."""
    words = -(-tile_n // 32)

    @inlined
    def below(x, quad):
        """Bits of this thread's columns that are less than ``x``."""
        x = min(max(x, 0), tile_n)
        count = 2 * (x // 8) + min(max(x % 8 - quad, 0), 2)
        return (1 << count) - 1

    @inlined
    def keep_interval(lo, hi, n0, quad):
        return below(hi - n0, quad) & ~below(lo - n0, quad)

    @unrolled
    def gather(packed, quad):
        """The pairs ``8 j + quad + {0, 1}`` of every word's four bytes, next to each other."""
        word = None
        for w in range(words):
            x = (packed[w] >> quad) & 0x03030303
            byte = (x | (x >> 6) | (x >> 12) | (x >> 18)) & 0xFF
            word = byte if word is None else word | (byte << (8 * w))
        return word

    @unrolled
    def load_words(bits, at):
        return tuple(load(bits, at + w) for w in range(words))

    @inlined
    def keep_bits(bits, tile, row, quad):
        return gather(load_words(bits, (tile * tile_m + row) * words), quad)

    return keep_interval, keep_bits, gather
