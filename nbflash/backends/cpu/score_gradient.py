"""Gradients of a score's arrays on the CPU: a walk over rows, with sums in the place of dQ.

Rows that add to the same elements are one item of work and go one after the other: every sum is
taken in one order, whatever the threads do.
"""

import functools

import numpy as np
from numba import njit

from nbflash.backends.cpu.dropout import drop, factors
from nbflash.backends.cpu.intrinsics import take
from nbflash.backends.cpu.score import jitted
from nbflash.backends.cpu.softmax import exp2
from nbflash.backends.cpu.walk import DOUT, K, Q, V, mask, operand, place, products, row_of
from nbflash.definitions.constants import LOG2_E
from nbflash.definitions.score_chain import chain


@functools.lru_cache(maxsize=64)
def compiled_chain(functions, real):
    """:func:`nbflash.definitions.score_chain.chain`, and what adds its pairs to as many arrays."""
    return chain(functions, jitted, real), _adding(sum(len(parts) for *_, parts in functions))


@functools.cache
def _adding(count):
    """``add(sums, pairs, ds)`` for ``count`` arrays; IndexError for an index outside of one."""
    if not count:

        @njit
        def nothing(sums, pairs, ds):
            pass

        return nothing
    rest = _adding(count - 1)

    @njit(boundscheck=True)
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
    for i, (axis, where) in enumerate((("batch", b), ("heads", h), ("nq", row))):
        if all(part.follows(axis, problem) for part in parts):
            apart[:, i] = where
    _, first, group = np.unique(apart, axis=0, return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(work)), first[group.ravel()]))
    starts = np.flatnonzero(np.diff(group.ravel()[order], prepend=-1))
    return work[order].astype(np.int64), np.append(starts, len(work))


@njit
def _sum_row(walk, operands, row, head, scratch, run, add, params, sums, dropout):
    """One row of query tiles: dS' of every score to where it belongs."""
    s, ds, z = scratch
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    first, one = row * walk.tile_m, s.dtype.type(1)
    n_rows = min(walk.tile_m, walk.nq - first)
    q = operand(operands, Q, b, h, first)
    dout = operand(operands, DOUT, b, h, first)
    k = operand(operands, K, b, h_kv, 0)
    v = operand(operands, V, b, h_kv, 0)
    p, end = row_of(walk, plane, row)
    while p < end:
        stop = min(p + s.shape[1] // walk.tile_n, end)
        # S = Q Kᵀ,  dP = dO Vᵀ ∘ Z
        products(walk, operands, operands.scale, q, n_rows, k, p, stop, s)
        products(walk, operands, one, dout, n_rows, v, p, stop, ds)
        mask(walk, plane, row, p, stop, s)
        factors(walk, dropout, b, h, row, p, stop, z)
        for t in range(p, stop):
            _, kv0, _, left = place(walk, row, p, t)
            columns = min(walk.tile_n, walk.nk - kv0)
            for i in range(n_rows):
                drop(dropout, ds[i, left : left + columns], z[i, left : left + columns])
                lse, delta = operands.lse[head, first + i], operands.delta[head, first + i]
                for j in range(columns):
                    x = s[i, left + j]
                    if x != -np.inf:
                        x, _, pairs = run(x, b, h, first + i, kv0 + j, params)
                        # dS = P ∘ (dP − δ)
                        weight = exp2(x * s.dtype.type(LOG2_E) - lse)
                        if weight != 0:
                            add(sums, pairs, weight * (ds[i, left + j] - delta))
        p = stop


@njit(nogil=True)
def backward_scores(walk, operands, work, starts, counter, chunk, run, add, params, sums, dropout):
    """Take groups of rows from the work list; add what they have to ``sums``."""
    real = operands.lse.dtype
    s, ds = np.empty((walk.tile_m, chunk), real), np.empty((walk.tile_m, chunk), real)
    scratch = s, ds, s if dropout is None else np.empty_like(s)
    item = take(counter)
    while item < starts.size - 1:
        for at in range(starts[item], starts[item + 1]):
            row, head = work[at]
            _sum_row(walk, operands, row, head, scratch, run, add, params, sums, dropout)
        item = take(counter)
