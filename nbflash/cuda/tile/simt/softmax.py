"""Online softmax on score fragments, in base 2.

A row's columns are spread over the ``tx`` lanes of one warp, so a row maximum is a
butterfly of shuffles. ``m`` and ``l`` are fragments with one value per row; ``l`` stays a
partial sum per lane until :func:`row_total`.

    m' = max(m, max_j S_j)        α = 2^(m − m')
    P  = 2^(S − m')               l' = α l + Σ P        (Algorithm 1, lines 10 to 12)
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.tracing import equal, exp2, fma, maximum, reciprocal, select, total, unrolled
from nbflash.cuda.tile.warp_reduce import across_lanes


class Softmax(NamedTuple):
    """The steps of `make_softmax`: ``m'`` is ``m_new``, α is ``alpha``.

    row_max(m, s)             m'
    rescale(m, m_new)         α
    probabilities(s, m_new)   P
    row_sum(l, alpha, p)      l'
    row_total(l)              l of all lanes of a row
    inverse(l)                1 / l, 0 where l is
    """

    row_max: Callable
    rescale: Callable
    probabilities: Callable
    row_sum: Callable
    row_total: Callable
    inverse: Callable


def make_softmax(rows, columns, tx):
    """`Softmax` of fragments of ``rows × columns`` over ``tx`` lanes."""

    def row(s, i):
        return s[i * columns : (i + 1) * columns]

    @unrolled
    def row_max(m, s):
        new = []
        for i in range(rows):
            best = m[i]
            for x in row(s, i):
                best = maximum(best, x)
            new.extend(across_lanes((best,), tx, maximum))
        return tuple(new)

    @unrolled
    def rescale(m, m_new):
        return tuple(exp2(m[i] - guarded(m_new[i])) for i in range(rows))

    @unrolled
    def probabilities(s, m_new):
        out = []
        for i in range(rows):
            shift = guarded(m_new[i])
            out.extend(exp2(x - shift) for x in row(s, i))
        return tuple(out)

    @unrolled
    def row_sum(l, alpha, p):
        return tuple(fma(l[i], alpha[i], total(row(p, i))) for i in range(rows))

    @unrolled
    def row_total(l):
        return across_lanes(l, tx, operator.add)

    @unrolled
    def inverse(l):
        return tuple(select(equal(x, 0.0), 0.0, reciprocal(x)) for x in l)

    return Softmax(row_max, rescale, probabilities, row_sum, row_total, inverse)


def make_scale_rows(rows, columns):
    """``acc[i, :] *= factor[i]``."""

    @unrolled
    def scale_rows(acc, factor):
        return tuple(acc[i * columns + j] * factor[i] for i in range(rows) for j in range(columns))

    return scale_rows
