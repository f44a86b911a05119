"""The online softmax of the Hopper kernels: P, m and l from scores in registers.

    P = 2^(S · scale − m)        l += Σ P

m is a reference that seldom changes, so P is computed before anything has looked at the scores. Its
sums tell whether m still serves:

    Σ P of a thread's part of a row     not above LIMIT    it does
                                        below HUGE         m rises, P, l and O shrink
                                        else               P is lost, and so are the scores, whose
                                                           registers it took

A row that has met no key has no m yet. Until all rows of a warp have met one, m comes first; and
in the tile after one in which it has risen.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.wgmma.softmax import make_wgmma_softmax, row_total, scale_fragment


class OnlineSoftmax(NamedTuple):
    """The steps of `make_online_softmax`.

        begin(s, scale)                  P, m, Σ P and ``fresh`` of a row's first scores
        attempt(s, m, scale)             P, Σ P of further ones, and whether m must rise
        careful(s, m, l, scale)          P, m, l, Σ P, ``fresh`` and α, by scores that are looked
                                         at first
        update(s, m, l, fresh, scale)    `careful` where ``fresh``, else `attempt`: P, m, l, Σ P,
                                         ``fresh``, α, and whether P is too large or α is not 1
        shrunk(p, m, l)                  P, m, l, Σ P and α from a P that is too large
        outgrown(sums)                   whether P is too large
        lost(sums)                       whether it is infinite

    ``fresh`` is whether a row of the warp has met no key yet, or m has risen; Σ P is yet to be
    added to l, and O to be multiplied by α.
    """

    begin: Callable
    attempt: Callable
    careful: Callable
    update: Callable
    shrunk: Callable
    outgrown: Callable
    lost: Callable


def make_online_softmax(n, dtype, most=None):
    """`OnlineSoftmax` of ``n`` columns of scores and weights up to 2^``most``."""
    PAIR, ONE = (types.float32(0),) * 2, (types.float32(1),) * 2
    softmax = make_wgmma_softmax(n, dtype, most)
    row_max, row_sum, reference = softmax.row_max, softmax.row_sum, softmax.reference
    exponents, lower, exponentials = softmax.exponents, softmax.lower, softmax.exponentials
    without_key, unsettled, rise = softmax.without_key, softmax.unsettled, softmax.rise
    outgrown, overshot, rescale = softmax.outgrown, softmax.overshot, softmax.rescale

    @inlined
    def begin(s, scale):
        best = row_max(s)
        m = reference(best, scale)
        weights = exponentials(exponents(s, m, scale))
        return weights, m, row_sum(PAIR, weights), without_key(best, PAIR)

    @inlined
    def attempt(s, m, scale):
        weights = exponentials(exponents(s, m, scale))
        sums = row_sum(PAIR, weights)
        return weights, sums, outgrown(sums)

    @inlined
    def raised(m, l, risen):
        """m, l and α where m rises."""
        alpha = rescale(risen)
        m = m[0] + risen[0], m[1] + risen[1]
        return m, (l[0] * alpha[0], l[1] * alpha[1]), alpha

    @inlined
    def careful(s, m, l, scale):
        e = exponents(s, m, opaque(scale))  # or the compiler computes it in all cases
        best, total = row_max(e), row_total(l)
        risen = rise(best, total)
        m, l, alpha = raised(m, l, risen)
        weights = exponentials(lower(e, risen))
        return weights, m, l, row_sum(PAIR, weights), unsettled(best, total), alpha

    @inlined
    def update(s, m, l, fresh, scale):
        if fresh:
            weights, m, l, sums, fresh, alpha = careful(s, m, l, scale)
            return weights, m, l, sums, fresh, alpha, True
        weights, sums, outgrew = attempt(s, m, scale)
        return weights, m, l, sums, outgrew, ONE, outgrew

    @inlined
    def shrunk(weights, m, l):
        m, l, alpha = raised(m, l, overshot(row_max(weights)))
        weights = scale_fragment(weights, alpha)
        return weights, m, l, row_sum(PAIR, weights), alpha

    return OnlineSoftmax(begin, attempt, careful, update, shrunk, outgrown, softmax.lost)
