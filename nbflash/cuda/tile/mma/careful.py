"""P B of a B that is not finite, by mma: what is 0 in P meets nothing, as if it were not there.

    C += P B'  + ∞ · [|P| X⁺ > 0]  − ∞ · [|P| X⁻ > 0]

B' has zeros where B is infinite or NaN; X⁺ is 1 where B is +∞ or NaN, X⁻ where it is −∞ or NaN.
Three products instead of one: for tiles with garbage in masked places.
"""

import itertools
import math

from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.finite import SIGNS
from nbflash.cuda.tile.float_bits import bits_float
from nbflash.cuda.tile.tracing import opaque, select

ALL, LOWER = 0xFFFFFFFF, 0x7FFF7FFF  # and both halves without their signs


def make_sort(dtype):
    """``sort(word)``: B', X⁺ and X⁻ of two halves of B."""
    EXPONENTS, LOWEST, ONE = {
        "float16": (0x7C007C00, 0x04000400, 0x3C00),
        "bfloat16": (0x7F807F80, 0x00800080, 0x3F80),
    }[dtype]
    MANTISSAS = LOWER ^ EXPONENTS

    def sort(word):
        bad = ((word & EXPONENTS) + LOWEST & SIGNS) >> 15
        nan = ((word & MANTISSAS) + LOWER & SIGNS) >> 15
        negative = (word & SIGNS) >> 15
        plus, minus = bad & (nan | negative ^ 0x10001), bad & (nan | negative)
        return word & (bad * 0xFFFF ^ ALL), plus * ONE, minus * ONE

    return sort


def careful_products(dtype, acc, m_tiles, steps, pairs, a_of, b_of, *, signed):
    """As :func:`~.gemm.products`, one 16-row tile and 8 columns after the other: registers are few.

    ``signed``: P may be negative.
    """
    acc, sort = list(acc), make_sort(dtype)
    for j, t, half in itertools.product(range(pairs), range(m_tiles), (0, 1)):
        at, two = 4 * (2 * (pairs * t + j) + half), slice(2 * half, 2 * half + 2)
        c = acc[at : at + 4]
        up = down = None
        for k in range(steps):
            words, a = b_of(k, j)[two], a_of(k)[t]
            zero = bits_float(words[0] & 0)
            up, down = up or (zero,) * 4, down or (zero,) * 4
            weights = tuple(opaque(x) & LOWER for x in a) if signed else a
            finite, plus, minus = zip(*map(sort, words), strict=True)
            c = mma(dtype, c, a, finite)
            up, down = mma(dtype, up, weights, plus), mma(dtype, down, weights, minus)
        for e in range(4):
            x = select(up[e] > 0.0, c[e] + math.inf, c[e])
            acc[at + e] = select(down[e] > 0.0, x - math.inf, x)
    return tuple(acc)
