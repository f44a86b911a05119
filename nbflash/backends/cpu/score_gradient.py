"""Gradients of a score's arrays on the CPU: a walk over rows, with sums in the place of dQ.

Rows that add to the same elements are one item of work and go one after the other: every sum is
taken in one order, whatever the threads do.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import carray, from_dtype, types
from numba.core.errors import NumbaError

from nbflash.backends.cpu.compiling import compiled, inlined
from nbflash.backends.cpu.dropout import drop
from nbflash.backends.cpu.intrinsics import given_up, pointer, read, take
from nbflash.backends.cpu.score import contiguous, jitted, result_of
from nbflash.backends.cpu.softmax import exp2
from nbflash.backends.cpu.tile_function import bind, compile_tile_function, kind_of, on_tiles
from nbflash.backends.cpu.walk import DOUT, K, Q, V, mask, operand, products, row_of
from nbflash.definitions.constants import LOG2_E
from nbflash.definitions.score_chain import chain
from nbflash.inputs.score_functions import where

PAIR = types.BaseTuple, "an index and a number"


class ScoreGradient(NamedTuple):
    """A compiled tile function, the parameters of its score, and the arrays with gradients."""

    compiled: object
    params: tuple
    parts: list
    problem: object

    def zeros(self):
        """Of every array: sums of many terms, one after the other, are of float64."""
        real = np.dtype(self.problem.lse_dtype)
        kinds = (real if part.alone(self.problem) else np.float64 for part in self.parts)
        return tuple(
            np.zeros(part.shape, kind) for part, kind in zip(self.parts, kinds, strict=True)
        )

    def bind(self, operands, sums):
        """The `TileFunction` that adds to ``sums``."""
        values = self.params, operands.lse, operands.delta, np.int64(operands.heads), sums
        return bind(self.compiled, values)

    def wrong_index(self):
        """What to say of an index that no array has."""
        names = (f"{where(part.function)} for shape {part.shape}" for part in self.parts)
        return f"score: a wrong index, returned by {' or '.join(names)}"


def prepare_gradient(score, problem):
    """The `ScoreGradient` of a score with arrays to learn.

    Raises
    ------
    TypeError
        If Numba cannot compile a part, with its reason and the line that defines it; if it does not
        return an index and a number, or an index with too few or too many axes.
    """
    stages = score.stages(problem.nq, problem.nk)
    params = contiguous(params for _, _, params in stages)
    functions = tuple(
        (fn, grad, tuple(part.function for part in parts))
        for (fn, grad, _), parts in zip(stages, score.parts, strict=True)
    )
    gradient = ScoreGradient(None, params, [x for parts in score.parts for x in parts], problem)
    real = np.dtype(problem.lse_dtype).type
    try:
        compiled = _compiled(functions, kind_of(params), kind_of(gradient.zeros()), real)
    except NumbaError as error:
        raise TypeError(gradient.wrong_index()) from error
    return gradient._replace(compiled=compiled)


@functools.lru_cache(maxsize=64)
def _compiled(functions, params, sums, real):
    make = functools.partial(_tile_function, functions, params, sums, real)
    return compile_tile_function(make, "gradient", functions, str(params), str(sums), real)


def _tile_function(functions, params, sums, real):
    for (_, _, parts), kinds in zip(functions, params, strict=True):
        for part in parts:
            result_of(jitted(part), from_dtype(np.dtype(real)), kinds, *PAIR)
    run = chain(functions, jitted, real)
    add = _adding(len(sums))
    rows_of = types.Array(from_dtype(np.dtype(real)), 2, "C")
    described = read(types.Tuple([params, rows_of, rows_of, types.int64, sums]))

    @inlined
    def tile(s, ds, step, rows, columns, b, h, q0, kv0, record):
        given, lse, delta, heads, totals = described(record)
        for i in range(rows):
            scores = carray(pointer(s + i * step, real), (columns,))
            dp = carray(pointer(ds + i * step, real), (columns,))
            at = b * heads + h, q0 + i
            for j in range(columns):
                x = scores[j]
                if x != -np.inf:
                    x, _, pairs = run(x, b, h, q0 + i, kv0 + j, given)
                    # dS = P ∘ (dP − δ)
                    weight = exp2(x * real(LOG2_E) - lse[at])
                    if weight != 0:
                        add(totals, pairs, weight * (dp[j] - delta[at]))

    return tile


@functools.cache
def _adding(count):
    """``add(sums, pairs, ds)`` for ``count`` arrays; IndexError for an index outside of one."""
    if not count:
        return inlined(lambda sums, pairs, ds: None)
    rest = _adding(count - 1)

    @inlined(boundscheck=True)
    def add(sums, pairs, ds):
        index, factor = pairs[0]
        own = sums[0]
        own[index] = float(own[index]) + ds * factor  # of a row, an axis missing, no float
        rest(sums[1:], pairs[1:], ds)

    return add


def grouped(work, heads, parts, problem):
    """The work list with rows that share elements side by side, and where each group begins."""
    row, head = work.T.astype(np.int64)
    b, h = np.divmod(head, heads)
    apart = np.zeros((len(work), 3), np.int64)
    for i, (axis, place) in enumerate((("batch", b), ("heads", h), ("nq", row))):
        if all(part.follows(axis, problem) for part in parts):
            apart[:, i] = place
    _, first, group = np.unique(apart, axis=0, return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(work)), first[group.ravel()]))
    starts = np.flatnonzero(np.diff(group.ravel()[order], prepend=-1))
    return work[order].astype(np.int64), np.append(starts, len(work))


@inlined
def _sum_row(walk, operands, row, head, counter, scratch, gradient, dropout):
    """One row of query tiles: dS' of every score to where it belongs."""
    s, ds, z = scratch
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    first, one = row * walk.tile_m, s.dtype.type(1)
    n_rows = min(walk.tile_m, walk.nq - first)
    q = operand(operands.table[Q], b, h, first)
    dout = operand(operands.table[DOUT], b, h, first)
    k = operand(operands.table[K], b, h_kv, 0)
    v = operand(operands.table[V], b, h_kv, 0)
    p, end = row_of(walk, plane, row)
    while p < end and not given_up(counter):
        stop = min(p + s.shape[1] // walk.tile_n, end)
        # S = Q Kᵀ,  dP = dO Vᵀ ∘ Z
        products(walk, operands, operands.scale, q, n_rows, k, p, stop, s)
        products(walk, operands, one, dout, n_rows, v, p, stop, ds)
        mask(walk, plane, row, p, stop, s)
        on_tiles(walk, dropout, b, h, row, p, stop, z, None)
        for i in range(n_rows):
            drop(dropout, ds[i], z[i])
        on_tiles(walk, gradient, b, h, row, p, stop, s, ds)
        p = stop


@compiled
def backward_scores(walk, operands, work, starts, counter, chunk, gradient, dropout):
    """Take groups of rows from the work list; add what they have to the sums of ``gradient``."""
    real = operands.lse.dtype
    s, ds = np.empty((walk.tile_m, chunk), real), np.empty((walk.tile_m, chunk), real)
    scratch = s, ds, s if dropout.address == 0 else np.empty_like(s)
    item = take(counter)
    while item < starts.size - 1:
        for at in range(starts[item], starts[item + 1]):
            row, head = work[at]
            _sum_row(walk, operands, row, head, counter, scratch, gradient, dropout)
        item = take(counter)
