"""Scales of 8-bit quantised caches, and the units that keep their products inside float16.

    S = Q Kᵀ ∘ scale of K           O += (P ∘ scale of V / unit) V

All operands are float16, whatever Q and O are: K and V without a rounding, Q with next to none. The
unit, a power of two, brings the products to where float16 has room for those far below a row's
largest. Every row has its own. It goes by the largest exponent up to here: of the scales of V in
tiles that all rows see, and in others of the products themselves, so that a key which a row does
not see, whatever its scale, takes nothing from that row. What has been added up in a smaller unit
shrinks; O is multiplied by it last.
"""

from nbflash.cuda.tile.float_bits import EXPONENT, INVERSE, ONES, bits_float, float_bits
from nbflash.cuda.tile.tracing import either, equal, maximum, select, unrolled
from nbflash.cuda.tile.warp_math import any_lane
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes
from nbflash.cuda.tile.wgmma.softmax import column_of, fold_rows, row_of

LEAST_UNIT = 1 << 23  # the bits of 2^-126, which has an inverse as the largest, 2^114, has
ROOM = 14 << 23  # P ∘ scale / unit is below 2^15: as much of float16 as there is, below and above


def unit_above(exponent):
    """The bits of the unit for numbers whose largest exponent, in place, is ``exponent``."""
    return maximum(exponent - ROOM, LEAST_UNIT)


def _key_of(element):
    """Which of a lane's keys an element belongs to."""
    return column_of(element) // 8 * 2 + column_of(element) % 8


def _of_columns(s, scales):
    """Scores or weights times the scale of their key."""
    return tuple(x * scales[_key_of(i)] for i, x in enumerate(s))


@unrolled
def scale_scores(s, scales, inverses):
    """S ∘ scale, and without the factors of Q's rows."""
    s = _of_columns(s, [bits_float(x) for x in scales])
    return tuple(x * inverses[row_of(i)] for i, x in enumerate(s))


@unrolled
def finite(scales):
    """Scales, 1 where one is infinite or NaN, and a bit for each of those."""
    bad = scales[0] * 0
    infinite = [equal(x & EXPONENT, EXPONENT) for x in scales]
    for i, x in enumerate(infinite):
        bad = select(x, bad | (1 << i), bad)
    return tuple(select(i, ONES, x) for i, x in zip(infinite, scales, strict=True)), bad


def _grown(alpha, unit, new):
    """1 / unit, α with what is old in that unit, and the unit: the larger of two, for each row."""
    larger = tuple(map(maximum, unit, new))
    inverse = [bits_float(x * -1 + INVERSE) for x in larger]
    shrunk = [bits_float(x) * y for x, y in zip(unit, inverse, strict=True)]
    return inverse, tuple(x * y for x, y in zip(alpha, shrunk, strict=True)), larger


@unrolled
def in_units(p, alpha, scales, unit, new):
    """P ∘ scale / unit, α and the unit, of keys that all rows see: ``new`` serves the tile."""
    inverse, alpha, unit = _grown(alpha, unit, (new, new))
    factors = [[bits_float(x) * y for x in scales] for y in inverse]
    return tuple(x * factors[row_of(i)][_key_of(i)] for i, x in enumerate(p)), alpha, unit


@unrolled
def in_own_units(p, alpha, scales, unit):
    """The same by the largest product of a row: the scales of others may be anything."""
    p = _of_columns(p, [bits_float(x) for x in scales])
    largest = fold_rows([float_bits(x) & EXPONENT for x in p], maximum)
    new = map(unit_above, across_lanes(largest, QUAD, maximum))
    inverse, alpha, unit = _grown(alpha, unit, new)
    return tuple(x * inverse[row_of(i)] for i, x in enumerate(p)), alpha, unit


@unrolled
def changes(alpha):
    """Whether α is not 1 for some row of the warp."""
    return any_lane(either(*(either(x < 1.0, x > 1.0) for x in alpha)))


@unrolled
def out_of_units(acc, unit):
    """O."""
    return tuple(x * bits_float(unit[row_of(i)]) for i, x in enumerate(acc))
