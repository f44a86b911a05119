"""P B of a B that is not finite, by mma: what is 0 in P meets nothing, as if it were not there.

    C += P B'  + ∞ · [|P| X⁺ > 0]  − ∞ · [|P| X⁻ > 0]

B' has zeros where B is infinite or NaN; X⁺ is 1 where B is +∞ or NaN, X⁻ where it is −∞ or NaN.
Three products instead of one: for tiles with garbage in masked places.
"""

import itertools
import math

from nbflash.cuda.ptx.ldmatrix import ldmatrix
from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.finite import SIGNS
from nbflash.cuda.tile.float_bits import bits_float
from nbflash.cuda.tile.mma.layout import STEP
from nbflash.cuda.tile.tracing import opaque, select, unrolled

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


def make_gemm_careful(dtype, m_tiles, n, tile, *, signed=False):
    """``gemm(acc, p, b)``: as that of :func:`~.gemm.make_gemm_pb`; P may be negative if ``signed``."""
    rows, pairs, sort = 16 * tile.row_bytes, tile.width // 16, make_sort(dtype)

    @unrolled
    def gemm(acc, p, b):
        acc, size, zero = list(acc), len(p) // m_tiles, bits_float(b * 0)
        for j, t, half in itertools.product(range(pairs), range(m_tiles), (0, 1)):
            at, two = 4 * (2 * (pairs * t + j) + half), slice(2 * half, 2 * half + 2)
            c, up, down = acc[at : at + 4], (zero,) * 4, (zero,) * 4
            for k in range(n // STEP):
                words = ldmatrix(tile.step(b, j) + k * rows, transposed=True)[two]
                a = tuple(p[size * t + 4 * k : size * t + 4 * k + 4])
                weights = tuple(opaque(x) & LOWER for x in a) if signed else a
                finite, plus, minus = zip(*map(sort, words), strict=True)
                c = mma(dtype, c, a, finite)
                up, down = mma(dtype, up, weights, plus), mma(dtype, down, weights, minus)
            for e in range(4):
                x = select(up[e] > 0.0, c[e] + math.inf, c[e])
                acc[at + e] = select(down[e] > 0.0, x - math.inf, x)
        return tuple(acc)

    return gemm
