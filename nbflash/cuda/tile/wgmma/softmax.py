"""Online softmax, masks and rounding on the accumulators of wgmma, in base 2.

A thread holds two rows of a 64 × n score tile (see :mod:`nbflash.cuda.ptx.wgmma`); the four lanes
of a quad share them. Row statistics are pairs, one value per row:

    lane 4 r + q of warp w, i = 0, 1:   row 16 w + r + 8 i,   columns 8 j + 2 q + e
    keep[i], bit 2 j + e:               whether that score counts
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.float_bits import EXPONENT, INVERSE, bits_float, float_bits
from nbflash.cuda.tile.guarded_max import NEG_INF, guarded
from nbflash.cuda.tile.score_math import to_float
from nbflash.cuda.tile.tracing import (
    both,
    either,
    equal,
    exp2,
    fma,
    load,
    maximum,
    select,
    unrolled,
)
from nbflash.cuda.tile.warp_math import any_lane, approximate_reciprocal, log2, pack_half
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes

LN2 = math.log(2.0)
# A weight may grow to 2^MOST before m must rise: with float16, whose least numbers are 2^-24, well
# above 1, or weights far below a row's largest would be lost. When m is set the largest is HEADROOM
# below that: most tiles then leave O alone. Exact: O / l does not depend on m.
MOST = {"float16": 10.0, "bfloat16": 0.0}
HEADROOM = 6.0
HUGE = 2.0**100  # sums of weights below it are sums of finite ones


@functools.cache
def row_of(element):
    """Which of a thread's two rows an element of a fragment belongs to."""
    return element // 2 % 2


def column_of(element):
    """Which column it is of, from the first of its thread's on."""
    return 8 * (element // 4) + element % 2


def fold_rows(s, combine, chains=8):
    """Of each row its elements combined, in chains side by side: one would wait at every step."""
    partial = {}
    for x, chain in zip(s, _chain_of(len(s), chains), strict=True):
        partial[chain] = combine(partial[chain], x) if chain in partial else x
    return [
        functools.reduce(combine, [x for chain, x in partial.items() if chain % 2 == row])
        for row in (0, 1)
    ]


@functools.cache
def _chain_of(size, chains):
    """A number for the chain of every element; those of the second row are odd."""
    return [2 * (i // 4 * 2 % chains + i % 2) + row_of(i) for i in range(size)]


class Softmax(NamedTuple):
    """The steps of `make_wgmma_softmax`. Exponents are S · scale − m, in base 2."""

    row_max: Callable
    reference: Callable
    exponents: Callable
    outgrown: Callable
    lost: Callable
    overshot: Callable
    rise: Callable
    rescale: Callable
    lower: Callable
    without_key: Callable
    unsettled: Callable
    exponentials: Callable
    row_sum: Callable
    pack: Callable


def make_wgmma_softmax(n, dtype, most=None):
    """`Softmax` of score fragments of ``n`` columns, of weights up to 2^``most``, or `MOST`."""
    TOP = MOST[dtype] if most is None else most
    ABOVE = HEADROOM - TOP  # where m stands over the largest score
    size, LIMIT = n // 2, n / 4 * 2.0**TOP  # of a row, the weights of a thread

    @unrolled
    def row_max(s):
        return across_lanes(fold_rows(s, maximum), QUAD, maximum)

    @unrolled
    def reference(best, scale):
        """m of rows whose largest score is ``best``."""
        return tuple(fma(guarded(x), scale, ABOVE) for x in best)

    @unrolled
    def exponents(s, m, scale):
        return tuple(fma(s[i], scale, m[row_of(i)] * -1.0) for i in range(size))

    @unrolled
    def outgrown(sums):
        """Whether, for some row of the warp, a weight is above what m allows."""
        return any_lane(either(*(x > LIMIT for x in sums)))

    @unrolled
    def lost(sums):
        """Whether a weight of the warp may be infinite."""
        return any_lane(either(*(x > HUGE for x in sums)))

    @unrolled
    def overshot(best):
        """By how much m must rise for weights up to ``best``."""
        return tuple(select(x > 2.0**TOP, log2(x) + ABOVE, 0.0) for x in best)

    @unrolled
    def rise(best, total):
        """By how much m must rise: for a row without keys so far (l = 0), to its first score."""
        out = []
        for b, a in zip(best, total, strict=True):
            due = both(either(b >= TOP, equal(a, 0.0)), b > NEG_INF)
            out.append(select(due, b + ABOVE, 0.0))
        return tuple(out)

    @unrolled
    def rescale(risen):
        """α, for the O and l of before; they are 0 in a row whose m comes down."""
        return tuple(exp2(maximum(x, x * 0.0) * -1.0) for x in risen)

    @unrolled
    def lower(e, risen):
        return tuple(x - risen[row_of(i)] for i, x in enumerate(e))

    @unrolled
    def without_key(best, total):
        """Whether some row of the warp has met no key yet."""
        none = (both(equal(b, NEG_INF), equal(a, 0.0)) for b, a in zip(best, total, strict=True))
        return any_lane(either(*none))

    @unrolled
    def unsettled(best, total):
        """Whether some row of the warp has met no key yet, or its m rises."""
        none = (both(equal(b, NEG_INF), equal(a, 0.0)) for b, a in zip(best, total, strict=True))
        return any_lane(either(*map(either, none, (b >= TOP for b in best))))

    @unrolled
    def exponentials(e):
        """P = 2^(S · scale − m)."""
        return tuple(map(exp2, e))

    @unrolled
    def row_sum(l, p):
        return tuple(map(operator.add, l, fold_rows(p, operator.add, chains=4)))

    @unrolled
    def pack(p):
        """Neighbours rounded and packed: the A fragment of P V."""
        return tuple(pack_half(dtype, p[i], p[i + 1]) for i in range(0, size, 2))

    return Softmax(
        row_max,
        reference,
        exponents,
        outgrown,
        lost,
        overshot,
        rise,
        rescale,
        lower,
        without_key,
        unsettled,
        exponentials,
        row_sum,
        pack,
    )


def hides(keep, element, first=0):
    """Whether an element, of columns whose bits begin at ``first``, does not count."""
    bit = 1 << (first + 2 * (element // 4) + element % 2)
    return equal(keep[row_of(element)] & bit, 0)


def make_apply_keep(n, part):
    """``apply_keep(s, keep)``: −∞ for what does not count, in part ``part`` of ``n`` columns."""
    first = n // 4 * part

    @unrolled
    def apply_keep(s, keep):
        return tuple(select(hides(keep, i, first), NEG_INF, s[i]) for i in range(n // 2))

    return apply_keep


def log_of_sum(m, l):
    """(m + log2 l) ln 2, −inf for a row that attends nothing.

    l = 2^n f, f at least 1 and below 2: beyond them the fast log2 is off by so much of its result,
    which would not be 0 of a single score of 0 (l = 2^-HEADROOM).
    """
    power = float_bits(l) & EXPONENT
    n, f = to_float((power >> 23) - 127, l), l * bits_float(power * -1 + INVERSE)  # NaN stays NaN
    return select(equal(l, 0.0), NEG_INF, (m + n + log2(f)) * LN2)


def make_finish(columns, dtype):
    """``normalise(acc, l)`` and ``log_sum_exp(m, l)``: a row's end."""

    @unrolled
    def normalise(acc, l):
        """O / l, rounded and packed; 0 for a row that attends nothing."""
        inverse = [select(equal(x, 0.0), 0.0, approximate_reciprocal(x)) for x in l]
        scaled = [acc[i] * inverse[row_of(i)] for i in range(columns // 2)]
        return tuple(pack_half(dtype, *scaled[i : i + 2]) for i in range(0, columns // 2, 2))

    @unrolled
    def log_sum_exp(m, l):
        return tuple(map(log_of_sum, m, l))

    return normalise, log_sum_exp


@unrolled
def row_total(l):
    """l of a row from what its quad has added up."""
    return across_lanes(l, QUAD, operator.add)


@unrolled
def scale_fragment(acc, alpha):
    """``acc[row, :] *= alpha[row]``."""
    return tuple(x * alpha[row_of(i)] for i, x in enumerate(acc))


def make_keep(tile_m, tile_n):
    """``keep_interval, keep_bits, gather``: a thread's columns of a row as bits of a word."""
    words = -(-tile_n // 32)

    @inlined
    def below(x, n0, quad):
        """Bits of this thread's columns, ``n0 + 8 j + quad + {0, 1}``, that are less than ``x``.

        ``x − n0`` is within 32 bits: ``x`` is that of a key, or not far below 0.
        """
        x = types.int32(min(types.int32(x - n0), types.int32(tile_n)) - quad)
        x = max(x, types.int32(0))
        pair = min(types.int32(x & 7), types.int32(2))
        return (types.int64(1) << types.int32(2 * (x >> 3) + pair)) - 1

    @inlined
    def keep_interval(lo, hi, n0, quad):
        return below(hi, n0, quad) & ~below(lo, n0, quad)

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
