"""The tile walk on the CPU: softmax and mask in Numba, matrix products in BLAS.

One work item is one row of a `TileSchedule` for one head. Threads take items from the front of the
work list (longest first) by an atomic counter, so the last items to start are the shortest. Every
item writes its own outputs in a fixed order of operations: results do not depend on the threads.
A call that is given up, by Ctrl-C say, ends after the chunks that its threads are at.

The live tiles of a row are handled in chunks. The scores of a chunk stand side by side in one
scratch matrix, adjacent tiles share a matrix product, and the softmax makes one pass over all of
them, so that narrow tiles cost little more than wide ones.

Masked scores become -inf and their weights exactly 0, but a product with a non-finite row of V
would still be NaN. The walk is optimistic: when a result is not finite, the item is repeated with
the products of partial tiles done by loops that skip zero weights (``careful``).
"""

import numpy as np

from nbflash.backends.cpu.compiling import compiled, inlined
from nbflash.backends.cpu.dropout import drop
from nbflash.backends.cpu.intrinsics import given_up, take
from nbflash.backends.cpu.score import factor, times_slope
from nbflash.backends.cpu.softmax import exp2, row_max, weights, weights_and_gradients
from nbflash.backends.cpu.tile_function import on_tiles
from nbflash.backends.cpu.walk import (
    DK,
    DOUT,
    DQ,
    DV,
    OUT,
    K,
    Q,
    V,
    accumulate,
    fill,
    is_finite,
    mask,
    operand,
    products,
    rescale,
    row_of,
    store,
)


@inlined(inline="always")
def _forward_rows(walk, operands, row, head, counter, scratch, acc, m, l, careful, score, dropout):
    """One row of query tiles: acc <- Σ (P ∘ Z) V (unscaled), m <- row maxima, l <- Σ P, base 2."""
    s, z = scratch
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    n_rows = acc.shape[0]
    q = operand(operands.table[Q], b, h, row * walk.tile_m)
    k = operand(operands.table[K], b, h_kv, 0)
    v = operand(operands.table[V], b, h_kv, 0)
    fill(acc, 0)
    m[:], l[:] = -np.inf, 0
    p, end = row_of(walk, plane, row)
    while p < end and not given_up(counter):
        stop = min(p + s.shape[1] // walk.tile_n, end)
        width = min(walk.tile_n, walk.nk - walk.col_idx[stop - 1] * walk.tile_n)
        width += (stop - 1 - p) * walk.tile_n
        # S = Q Kᵀ
        products(walk, operands, factor(operands, score), q, n_rows, k, p, stop, s)
        on_tiles(walk, score, b, h, row, p, stop, s, None)
        mask(walk, plane, row, p, stop, s)
        on_tiles(walk, dropout, b, h, row, p, stop, z, None)
        for i in range(n_rows):
            scores = s[i, :width]
            new = row_max(scores, m[i])
            # NaN minus this is NaN, also in a row that holds nothing else and is not empty.
            base = new if new > -np.inf else s.dtype.type(0)
            correction = exp2(m[i] - base)
            l[i] = l[i] * correction + weights(scores, base)
            m[i] = new
            drop(dropout, scores, z[i, :width])
            if correction != 1:
                rescale(acc[i], correction)
        # O += (P ∘ Z) V
        accumulate(walk, operands, s, v, acc, n_rows, p, stop, careful)
        p = stop


@compiled
def forward(walk, operands, work, counter, chunk, score, dropout):
    """Take rows of query tiles from the work list; write their OUT and LSE.

    Parameters
    ----------
    work : int64 (n_work, 2)
        ``TileSchedule.work(batch, heads)``.
    counter : COUNTER (1,)
        The next item of the work list, shared by the threads.
    chunk : int
        Columns of the score matrix, at least one tile.
    score, dropout : TileFunction
        See :mod:`.score` and :mod:`.dropout`.
    """
    real = operands.lse.dtype
    s = np.empty((walk.tile_m, chunk), real)
    scratch = s, s if dropout.address == 0 else np.empty_like(s)
    acc = np.empty((walk.tile_m, operands.head_dim), real)
    m, l = np.empty(walk.tile_m, real), np.empty(walk.tile_m, real)
    item = take(counter)
    while item < work.shape[0]:
        row, head = work[item]
        first = row * walk.tile_m
        n_rows = min(walk.tile_m, walk.nq - first)
        for careful in (False, True):
            _forward_rows(
                walk,
                operands,
                row,
                head,
                counter,
                scratch,
                acc[:n_rows],
                m,
                l,
                careful,
                score,
                dropout,
            )
            if is_finite(acc[:n_rows]):
                break
        for i in range(n_rows):
            if l[i] == 0:
                operands.lse[head, first + i] = -np.inf
            else:
                rescale(acc[i], 1 / l[i])
                operands.lse[head, first + i] = (m[i] + np.log2(np.float64(l[i]))) * np.log(2.0)
        b, h = divmod(head, operands.heads)
        store(operand(operands.table[OUT], b, h, first), acc[:n_rows], real.type(1))
        item = take(counter)


@inlined(inline="always")
def _gradient_rows(walk, operands, row, head, counter, scratch, dq, careful, score, dropout):
    """One row of query tiles: dq <- Σ dS K, without the softmax scale."""
    s, ds, slope, z = scratch
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    first, n_rows = row * walk.tile_m, dq.shape[0]
    q = operand(operands.table[Q], b, h, first)
    dout = operand(operands.table[DOUT], b, h, first)
    k = operand(operands.table[K], b, h_kv, 0)
    v = operand(operands.table[V], b, h_kv, 0)
    p, end = row_of(walk, plane, row)
    while p < end and not given_up(counter):
        stop = min(p + s.shape[1] // walk.tile_n, end)
        width = min(walk.tile_n, walk.nk - walk.col_idx[stop - 1] * walk.tile_n)
        width += (stop - 1 - p) * walk.tile_n
        # S = Q Kᵀ,  dP = dO Vᵀ ∘ Z
        products(walk, operands, factor(operands, score), q, n_rows, k, p, stop, s)
        products(walk, operands, s.dtype.type(1), dout, n_rows, v, p, stop, ds)
        on_tiles(walk, score, b, h, row, p, stop, s, slope)
        mask(walk, plane, row, p, stop, s)
        on_tiles(walk, dropout, b, h, row, p, stop, z, None)
        for i in range(n_rows):
            at = first + i
            drop(dropout, ds[i, :width], z[i, :width])
            weights_and_gradients(
                s[i, :width], ds[i, :width], operands.lse[head, at], operands.delta[head, at]
            )
            times_slope(score, ds[i, :width], slope[i, :width])
        # dQ += dS K
        accumulate(walk, operands, ds, k, dq, n_rows, p, stop, careful)
        p = stop


@inlined(inline="always")
def _gradient_columns(walk, operands, row, head, counter, scratch, dk, dv, careful, score, dropout):
    """One row of key tiles, one query head: dv += Σ (P ∘ Z)ᵀ dO, dk += Σ dSᵀ Q unscaled."""
    s, ds, slope, z = scratch
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    n_keys, tile = dk.shape[0], walk.tile_m
    k = operand(operands.table[K], b, h_kv, row * walk.tile_n)
    v = operand(operands.table[V], b, h_kv, row * walk.tile_n)
    q = operand(operands.table[Q], b, h, 0)
    dout = operand(operands.table[DOUT], b, h, 0)
    p, end = row_of(walk, plane, row)
    while p < end and not given_up(counter):
        stop = min(p + s.shape[0] // tile, end)
        # S = Q Kᵀ,  dP = dO Vᵀ ∘ Z
        products(walk, operands, factor(operands, score), k, n_keys, q, p, stop, s)
        products(walk, operands, s.dtype.type(1), v, n_keys, dout, p, stop, ds)
        on_tiles(walk, score, b, h, row, p, stop, s, slope)
        mask(walk, plane, row, p, stop, s)
        on_tiles(walk, dropout, b, h, row, p, stop, z, None)
        for t in range(p, stop):
            first, top = walk.col_idx[t] * tile, (t - p) * tile
            for i in range(min(tile, walk.nq - first)):
                at, r = first + i, top + i
                drop(dropout, ds[r, :n_keys], z[r, :n_keys])
                weights_and_gradients(
                    s[r, :n_keys], ds[r, :n_keys], operands.lse[head, at], operands.delta[head, at]
                )
                times_slope(score, ds[r, :n_keys], slope[r, :n_keys])
                drop(dropout, s[r, :n_keys], z[r, :n_keys])
        # dV += (P ∘ Z)ᵀ dO,  dK += dSᵀ Q
        accumulate(walk, operands, s, dout, dv, n_keys, p, stop, careful)
        accumulate(walk, operands, ds, q, dk, n_keys, p, stop, careful)
        p = stop


@compiled
def backward_dq(walk, operands, work, counter, chunk, score, dropout):
    """Take rows of query tiles from the work list; write their DQ."""
    real = operands.lse.dtype
    s, ds = np.empty((walk.tile_m, chunk), real), np.empty((walk.tile_m, chunk), real)
    slope = s if score.address == 0 else np.empty_like(s)
    z = s if dropout.address == 0 else np.empty_like(s)
    scratch = s, ds, slope, z
    acc = np.empty((walk.tile_m, operands.head_dim), real)
    item = take(counter)
    while item < work.shape[0]:
        row, head = work[item]
        first = row * walk.tile_m
        dq = acc[: min(walk.tile_m, walk.nq - first)]
        for careful in (False, True):
            fill(dq, 0)
            _gradient_rows(walk, operands, row, head, counter, scratch, dq, careful, score, dropout)
            if is_finite(dq):
                break
        b, h = divmod(head, operands.heads)
        store(operand(operands.table[DQ], b, h, first), dq, operands.scale)
        item = take(counter)


@compiled
def backward_dkdv(walk, operands, work, counter, chunk, score, dropout):
    """Take rows of key tiles (transposed walk) from the work list; write their DK and DV."""
    real = operands.lse.dtype
    s, ds = np.empty((chunk, walk.tile_n), real), np.empty((chunk, walk.tile_n), real)
    slope = s if score.address == 0 else np.empty_like(s)
    z = s if dropout.address == 0 else np.empty_like(s)
    scratch = s, ds, slope, z
    acc = np.empty((2, walk.tile_n, operands.head_dim), real)
    group = operands.heads // operands.heads_kv
    item = take(counter)
    while item < work.shape[0]:
        row, kv_head = work[item]
        first = row * walk.tile_n
        n_keys = min(walk.tile_n, walk.nk - first)
        dk, dv = acc[0, :n_keys], acc[1, :n_keys]
        for careful in (False, True):
            fill(dk, 0)
            fill(dv, 0)
            for head in range(kv_head * group, (kv_head + 1) * group):
                _gradient_columns(
                    walk, operands, row, head, counter, scratch, dk, dv, careful, score, dropout
                )
            if is_finite(dk) and is_finite(dv):
                break
        b, h_kv = divmod(kv_head, operands.heads_kv)
        store(operand(operands.table[DK], b, h_kv, first), dk, operands.scale)
        store(operand(operands.table[DV], b, h_kv, first), dv, real.type(1))
        item = take(counter)
