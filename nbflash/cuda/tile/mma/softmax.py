"""Online softmax on fragments of mma (:mod:`.fragment`), in base 2.

    m' = max(m, unit · max_j S_j)        α = 2^(m − m')
    P  = 2^(unit · S − m')               l' = α l + Σ P        (Algorithm 1, lines 10 to 12)

``m`` and ``l`` have a number a row of the lane; ``l`` is that of the lane alone until `row_total`.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.tracing import either, equal, exp2, fma, maximum, select, unrolled
from nbflash.cuda.tile.warp_math import any_lane, approximate_reciprocal
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes


class Softmax(NamedTuple):
    """The steps of `make_softmax`: ``m'`` is ``m_new``.

    row_max(m, s, unit)             m'
    has_grown(m, m_new)             whether α is anything but 1 in some row of the warp
    rescale(m, m_new)               α
    probabilities(s, m_new, unit)   P
    row_sums(p)                     Σ P of the lane
    add_sums(l, alpha, sums)        l' of the lane
    row_total(l)                    l of all lanes of a row
    inverse(l)                      1 / l, 0 where l is
    """

    row_max: Callable
    has_grown: Callable
    rescale: Callable
    probabilities: Callable
    row_sums: Callable
    add_sums: Callable
    row_total: Callable
    inverse: Callable


def make_softmax(m_tiles, n):
    """`Softmax` of ``m_tiles`` tiles of 16 rows, ``n`` columns."""
    fragment = Fragment(m_tiles, n)

    @unrolled
    def row_max(m, s, unit):
        best = across_lanes(fragment.fold(s, maximum), QUAD, maximum)
        return tuple(maximum(old, x * unit) for old, x in zip(m, best, strict=True))

    @unrolled
    def has_grown(m, m_new):
        """Whether α is anything but 1 in some row of the warp."""
        found = None
        for old, new in zip(m, m_new, strict=True):
            found = new > old if found is None else either(found, new > old)
        return any_lane(found)

    @unrolled
    def rescale(m, m_new):
        return tuple(exp2(old - guarded(new)) for old, new in zip(m, m_new, strict=True))

    @unrolled
    def probabilities(s, m_new, unit):
        shifts = [guarded(x) * -1.0 for x in m_new]
        return tuple(exp2(fma(x, unit, shifts[fragment.row(i)])) for i, x in enumerate(s))

    @unrolled
    def row_sums(p):
        return tuple(fragment.fold(p, operator.add))

    @unrolled
    def add_sums(l, alpha, sums):
        return tuple(x * a + y for x, a, y in zip(l, alpha, sums, strict=True))

    @unrolled
    def row_total(l):
        return across_lanes(l, QUAD, operator.add)

    @unrolled
    def inverse(l):
        return tuple(select(equal(x, 0.0), 0.0, approximate_reciprocal(x)) for x in l)

    return Softmax(
        row_max, has_grown, rescale, probabilities, row_sums, add_sums, row_total, inverse
    )
