"""P B of a B that is not finite, by mma: what is 0 in P meets nothing, as if it were not there.

    C += P B'  + ∞ · [N X⁺ > 0]  − ∞ · [N X⁻ > 0]

B' has zeros where B is infinite or NaN; N is 1 where P is not 0; X⁺ is 1 where B is +∞ or NaN, X⁻
where it is −∞ or NaN. Three products instead of one: for tiles with garbage in masked places.
"""

import math

from nbflash.cuda.ptx.ldmatrix import ldmatrix
from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.finite import SIGNS
from nbflash.cuda.tile.float_bits import bits_float
from nbflash.cuda.tile.mma.layout import STEP
from nbflash.cuda.tile.tracing import select, unrolled

ALL, LOWER = 0xFFFFFFFF, 0x7FFF7FFF  # and both halves without their signs


def make_sort(dtype):
    """``ones(word)`` and ``sort(word)``: N of two halves of P; B', X⁺ and X⁻ of two of B."""
    EXPONENTS, LOWEST, ONE = {
        "float16": (0x7C007C00, 0x04000400, 0x3C00),
        "bfloat16": (0x7F807F80, 0x00800080, 0x3F80),
    }[dtype]
    MANTISSAS = LOWER ^ EXPONENTS

    def above_zero(word):
        """The lowest bits of the halves that are not 0, of halves without signs."""
        return (word + LOWER & SIGNS) >> 15

    def ones(word):
        return above_zero(word & LOWER) * ONE

    def sort(word):
        bad = ((word & EXPONENTS) + LOWEST & SIGNS) >> 15
        nan, negative = above_zero(word & MANTISSAS), (word & SIGNS) >> 15
        plus, minus = bad & (nan | negative ^ 0x10001), bad & (nan | negative)
        return word & (bad * 0xFFFF ^ ALL), plus * ONE, minus * ONE

    return ones, sort


def make_gemm_careful(dtype, m_tiles, n, tile):
    """``gemm(acc, p, b)``: as that of :func:`~.gemm.make_gemm_pb`."""
    rows, pairs = 16 * tile.row_bytes, tile.width // 16
    ones, sort = make_sort(dtype)

    @unrolled
    def gemm(acc, p, b):
        acc, size, zero = list(acc), len(p) // m_tiles, bits_float(b * 0)
        for j in range(pairs):
            counts = {}
            for k in range(n // STEP):
                words = ldmatrix(tile.step(b, j) + k * rows, transposed=True)
                clean, plus, minus = zip(*map(sort, words), strict=True)
                for t in range(m_tiles):
                    a = tuple(p[size * t + 4 * k : size * t + 4 * k + 4])
                    present = tuple(map(ones, a))
                    for half in (0, 1):
                        at, both = 4 * (2 * (pairs * t + j) + half), slice(2 * half, 2 * half + 2)
                        acc[at : at + 4] = mma(dtype, acc[at : at + 4], a, clean[both])
                        up, down = counts.get(at, ((zero,) * 4,) * 2)
                        up = mma(dtype, up, present, plus[both])
                        counts[at] = up, mma(dtype, down, present, minus[both])
            for at, (up, down) in counts.items():
                for e in range(4):
                    x = acc[at + e]
                    x = select(up[e] > 0.0, x + math.inf, x)
                    acc[at + e] = select(down[e] > 0.0, x - math.inf, x)
        return tuple(acc)

    return gemm
