"""tanh(x), x = S / c, of a fragment in bfloat16: by a polynomial where all of a warp's are near 0.

    |x| ≤ NEAR     S Σ aᵢ (S²)ⁱ     5 instructions of the FMA units; aᵢ c²ⁱ⁺¹: of tanh(x) / x
    beyond         tanh.approx      on the unit that the exponentials already keep busy

A warp chooses by a vote. If one of its scores is beyond, ``S`` becomes its tanh and the polynomial
S itself, so that there is one way on, in which the compiler mixes it with the exponentials.
"""

import functools

from nbflash.ptx._asm import inlined, types
from nbflash.tile.score_math import approximate_tanh
from nbflash.tile.unroll import both, fma, select, unrolled
from nbflash.tile.warp_math import all_lanes, approximate_reciprocal

# tanh(x) / x in powers of x², within 2^-11.5 of itself: the minimax polynomial up to x = NEAR.
NEAR, NEAR_TANH = 1.25, (0.9996567, -0.3259983, 0.1070147, -0.0191776)
AS_IT_IS = tuple(map(types.float32, (1, 0, 0, 0)))
# 1 / c of which the powers in the coefficients are numbers of float32.
LEAST, MOST = 2.0**-16, 2.0**16
CHAIN = 4


@unrolled
def coefficients(inverse):
    """``inverse`` is 1 / c."""
    square = inverse * inverse
    powers = inverse, inverse * square, inverse * square * square
    powers = *powers, powers[-1] * square
    return tuple(power * a for power, a in zip(powers, NEAR_TANH, strict=True))


@unrolled
def all_near(s, inverse):
    """Whether all scores of the warp are near 0: NaN is not."""
    usable = both(inverse >= LEAST, inverse <= MOST)
    limit = select(usable, approximate_reciprocal(inverse * inverse) * NEAR**2, -1.0)
    sums = []
    for first in range(0, len(s), CHAIN):
        square, *others = s[first : first + CHAIN]
        square = square * square
        for x in others:
            square = fma(x, x, square)
        sums.append(square <= limit)
    return all_lanes(functools.reduce(both, sums))


@unrolled
def far_tanh(s, inverse):
    return tuple(approximate_tanh(x * inverse) for x in s)


def near_tanh(s, a):
    """tanh of one score, by its coefficients."""
    square, (a0, a1, a2, a3) = s * s, a
    return s * fma(square, fma(square, fma(square, a3, a2), a1), a0)


def make_near(step):
    """``step(s, held, at, params, factor)`` whose first function is softcap, by coefficients."""

    @inlined
    def chosen(s, held, at, params, factor):
        a = coefficients(held[0])
        if not all_near(s, held[0]):
            s, a = far_tanh(s, held[0]), AS_IT_IS
        return step(s, (a, *held[1:]), at, params, factor)

    return chosen
