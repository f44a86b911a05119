"""Operands that are not finite, where a mask hides some of them: 0 times one of them is no 0.

Such chunks become zeros in shared memory (`ChunkCopy.clean`), once the results that depend on them
have been made NaN: a warp finds them in the fragments that it multiplies with.

Values pass between lanes in products, not by shuffles: with shuffles here ptxas spills accumulators
on architectures before Hopper (notes/sm80.md).
"""

import math

from nbflash.cuda.ptx.ldmatrix import ldmatrix
from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.finite import not_finite_in
from nbflash.cuda.tile.float_bits import bits_float, signed, unsigned
from nbflash.cuda.tile.mma.layout import STEP
from nbflash.cuda.tile.tracing import select, unrolled

ONE = {"float16": 0x3C00, "bfloat16": 0x3F80}
NAN = 0x7FFF7FFF  # two, of either type


def make_ones_where(dtype):
    """``ones_where(word)``: 1 for each of two numbers that is not finite, 0 for the other."""
    not_finite = not_finite_in(dtype)

    def ones_where(word):
        return (unsigned(not_finite([signed(word)])) >> 15 & 0x10001) * ONE[dtype]

    return ones_where


def make_poison_rows(dtype, m_tiles, n, tile):
    """``poison_rows(p, b)``: P with a NaN in each row that meets a row of B with NaN or infinities;
    operands as of :func:`~.gemm.make_gemm_pb`, P ≥ 0.
    """
    rows, ones_where = 16 * tile.row_bytes, make_ones_where(dtype)

    def bad_rows(b, k):
        """B of a product: 1 for each row of step ``k`` that is not finite, in one of 8 columns."""
        found = [unsigned(b & 0)] * 2
        for j in range(tile.width // 16):
            words = ldmatrix(tile.step(b, j) + k * rows, transposed=True)
            for i, word in enumerate(words):
                found[i % 2] = found[i % 2] | ones_where(word)
        return tuple(found)

    @unrolled
    def poison_rows(p, b):
        size, zero, p = len(p) // m_tiles, bits_float(b & 0), list(p)
        counts = [(zero,) * 4] * m_tiles
        for k in range(n // STEP):
            bad = bad_rows(b, k)
            for t in range(m_tiles):
                a = tuple(p[size * t + 4 * k : size * t + 4 * k + 4])
                counts[t] = mma(dtype, counts[t], a, bad)
        for t in range(m_tiles):
            for i in (0, 1):  # a lane has two of a row's eight counts, and one of its words of P
                at, found = size * t + i, counts[t][2 * i] + counts[t][2 * i + 1]
                p[at] = select(found > 0.0, NAN, p[at])
        return tuple(p)

    return poison_rows


def make_poison_units(dtype, m_tiles, tile):
    """``poison_units(units, a)``: NaN for a warp's rows of A that hold NaN or infinities; ``a`` is
    a lane's address by rows.
    """
    rows, ones_where = 16 * tile.row_bytes, make_ones_where(dtype)

    @unrolled
    def poison_units(units, a):
        zero, ones = bits_float(a & 0), unsigned(a & 0) + 0x10001 * ONE[dtype]
        counts = [(zero,) * 4] * m_tiles
        for t in range(m_tiles):
            for k in range(tile.width // STEP):
                bad = tuple(map(ones_where, ldmatrix(tile.step(a, k) + t * rows)))
                counts[t] = mma(dtype, counts[t], bad, (ones, ones))
        found = [counts[i // 2][i % 2 * 2] for i in range(2 * m_tiles)]
        return tuple(select(x > 0.0, math.nan, unit) for x, unit in zip(found, units, strict=True))

    return poison_units
