"""P and dS of a backward's fragments of mma (:mod:`.fragment`), from S and dP.

    P = 2^(unit · S + shift)        dS = P ∘ ∂S'/∂S ∘ (dP − δ)        shift = −LSE · log2 e

A query's numbers belong to a lane's rows, or, where keys are down and queries across
(``transposed``), to its columns: then there are n / 4 of them. The shift of a query that attends
nothing is −∞.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.score import slope_at, weighed
from nbflash.cuda.tile.tracing import equal, exp2, fma, load, load2, select, unrolled


def make_query_numbers(fragment, *, transposed):
    """``of_columns(memory, at)``, from the lane's first; or ``of_rows(memory, at, row, last)``."""

    @unrolled
    def of_columns(memory, at):
        return tuple(x for j in range(fragment.n // 8) for x in load2(memory, at + 8 * j))

    @unrolled
    def of_rows(memory, at, row):
        return tuple(load(memory, at + row + fragment.row_offset(i)) for i in range(fragment.rows))

    return of_columns if transposed else of_rows


class Gradients(NamedTuple):
    """The steps of `make_gradients`.

    exponents(s, units, shifts)   of P
    weights(e)                    P
    full(p, s, dp, deltas)        dS where nothing is hidden
    masked(p, s, dp, deltas)      dS, 0 where P is
    """

    exponents: Callable
    weights: Callable
    full: Callable
    masked: Callable


def make_gradients(m_tiles, n, score=None, *, transposed):
    """`Gradients` of a tile.

    ``score`` is a chain with slopes, and ``s`` what it made of the scores
    (:func:`nbflash.cuda.tile.score.make_score`); without one, None, ``s`` is not read.
    """
    fragment = Fragment(m_tiles, n)

    def query(element):
        if transposed:
            return fragment.column(element) // 8 * 2 + element % 2
        return fragment.row(element)

    @unrolled
    def exponents(s, units, shifts):
        """``units`` are those of the lane's rows: NaN for one whose results must be."""
        steps = ((s[i], units[fragment.row(i)], shifts[query(i)]) for i in range(fragment.size))
        return tuple(fma(*step) for step in steps)

    @unrolled
    def weights(e):
        return tuple(map(exp2, e))

    def gradient(p, s, dp, deltas, i):
        # 0 where P is: a slope may be NaN.
        weight = p[i] if score is None else weighed(p[i], slope_at(score, s, i), True)
        return weight * (dp[i] - deltas[query(i)])

    @unrolled
    def full(p, s, dp, deltas):
        return tuple(gradient(p, s, dp, deltas, i) for i in range(fragment.size))

    @unrolled
    def masked(p, s, dp, deltas):
        """0 where P is 0: there dP may be NaN."""
        values = (gradient(p, s, dp, deltas, i) for i in range(fragment.size))
        return tuple(select(equal(x, 0.0), 0.0, y) for x, y in zip(p, values, strict=True))

    return Gradients(exponents, weights, full, masked)
