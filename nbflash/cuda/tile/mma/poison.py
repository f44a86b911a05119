"""Operands that are not finite, where a mask hides some of them: 0 times one of them is no 0.

Such chunks become zeros in shared memory (`ChunkCopy.clean`), once the results that depend on them
have been made NaN: a warp finds them in the fragments that it multiplies with.
"""

import math
import operator

from nbflash.cuda.ptx.ldmatrix import ldmatrix
from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.finite import not_finite_in
from nbflash.cuda.tile.float_bits import bits_float, signed, unsigned
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.layout import STEP
from nbflash.cuda.tile.tracing import equal, select, unrolled
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes
from nbflash.definitions.constants import WARP

ONE = {"float16": 0x3C00, "bfloat16": 0x3F80}


def make_poison_rows(dtype, m_tiles, n, tile):
    """``poison_rows(acc, p, b)``: NaN in the rows of C += P B that meet a row of B with NaN or
    infinities, by a product with what says so; operands as of :func:`~.gemm.make_gemm_pb`, P ≥ 0.
    """
    rows, output = 16 * tile.row_bytes, Fragment(m_tiles, tile.width)
    not_finite = not_finite_in(dtype)

    def bad_rows(b, k):
        """B of a product, of 8 equal columns: 1 for each row of step ``k`` that is not finite."""
        found = [b & 0, b & 0]
        for j in range(tile.width // 16):
            words = ldmatrix(tile.step(b, j) + k * rows, transposed=True)
            for i, word in enumerate(words):
                found[i % 2] = found[i % 2] | not_finite([signed(word)])
        found = across_lanes(found, WARP // QUAD, operator.or_, first=QUAD)
        return tuple((unsigned(x) >> 15 & 0x10001) * ONE[dtype] for x in found)

    @unrolled
    def poison_rows(acc, p, b):
        size, zero = len(p) // m_tiles, bits_float(b & 0)
        counts = [(zero,) * 4] * m_tiles
        for k in range(n // STEP):
            bad = bad_rows(b, k)
            for t in range(m_tiles):
                a = tuple(p[size * t + 4 * k : size * t + 4 * k + 4])
                counts[t] = mma(dtype, counts[t], a, bad)
        numbers = [counts[i // 2][i % 2 * 2] for i in range(output.rows)]
        poison = [select(x > 0.0, math.nan, x * 0.0) for x in numbers]
        return tuple(x + poison[output.row(i)] for i, x in enumerate(acc))

    return poison_rows


def make_poison_units(dtype, m_tiles, tile):
    """``poison_units(units, a)``: NaN for a warp's rows of A that hold NaN or infinities; ``a`` is
    a lane's address by rows.
    """
    rows, not_finite = 16 * tile.row_bytes, not_finite_in(dtype)

    @unrolled
    def poison_units(units, a):
        found = [a & 0] * (2 * m_tiles)
        for t in range(m_tiles):
            for k in range(tile.width // STEP):
                for i, word in enumerate(ldmatrix(tile.step(a, k) + t * rows)):
                    found[2 * t + i % 2] = found[2 * t + i % 2] | not_finite([signed(word)])
        found = across_lanes(found, QUAD, operator.or_)
        return tuple(
            select(equal(bad, 0), unit, math.nan) for bad, unit in zip(found, units, strict=True)
        )

    return poison_units
