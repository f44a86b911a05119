"""The tile walk on the CPU: softmax and mask in Numba, matrix products in BLAS.

One work item is one row of a `TileSchedule` for one head. Threads take items from the front of the
work list (longest first) by an atomic counter, so the last items to start are the shortest. Every
item writes its own outputs in a fixed order of operations: results do not depend on the threads.

The live tiles of a row are handled in chunks. The scores of a chunk stand side by side in one
scratch matrix, adjacent tiles share a matrix product, and the softmax makes one pass over all of
them, so that narrow tiles cost little more than wide ones.

Masked scores become -inf and their weights exactly 0, but a product with a non-finite row of V
would still be NaN. The walk is optimistic: when a result is not finite, the item is repeated with
the products of partial tiles done by loops that skip zero weights (``careful``).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import carray, njit
from numba.extending import overload

from masks.tiles import BITS, FULL, INTERVAL
from nbflash.cpu.intrinsics import call_gemm, pointer, power_of_two, take

_N, _T = ord("N"), ord("T")
Q, K, V, OUT, DOUT, DQ, DK, DV = range(8)


class Walk(NamedTuple):
    """The arrays of a `TileSchedule` that kernels read."""

    tile_m: int
    tile_n: int
    nq: int
    nk: int
    n_row: int
    transposed: bool
    row_ptr: np.ndarray
    col_idx: np.ndarray
    kind: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    bits: np.ndarray


class Operands(NamedTuple):
    """Tensors as addresses, so that layouts and read-only flags need no further compilation.

    ``table`` int64 (8, 4) holds for each of Q, K, V, OUT, DOUT, DQ, DK, DV the address and the
    strides in bytes along batch, sequence and heads.
    """

    table: np.ndarray
    heads: int
    heads_kv: int
    head_dim: int
    plane_of: np.ndarray
    blas: int


def _taylor(real, degree):
    """Coefficients of 2**f for |f| <= 1/2, highest power first."""
    return tuple(real(math.log(2) ** i / math.factorial(i)) for i in range(degree, -1, -1))


_EXP2 = {
    "float32": (np.float32, _taylor(np.float32, 7), 1.5 * 2.0**23, -127),
    "float64": (np.float64, _taylor(np.float64, 13), 1.5 * 2.0**52, -1023),
}


def exp2(x):
    """2**x for x <= 0, in x's own precision; exactly 0 below the normal range."""
    return np.exp2(x)


@overload(exp2, jit_options={"fastmath": {"contract"}})
def _exp2(x):
    real, coefficients, shifter, lowest = _EXP2[x.name]
    shifter, lowest = real(shifter), real(lowest)

    def polynomial(x):
        x = lowest if x < lowest else x
        t = x + shifter
        f = x - (t - shifter)
        p = coefficients[0]
        for c in coefficients[1:]:
            p = p * f + c
        return p * power_of_two(t)

    return polynomial


@njit
def _run_end(col_idx, p, stop):
    """End of the run of adjacent tiles that begins at p."""
    e = p + 1
    while e < stop and col_idx[e] == col_idx[e - 1] + 1:
        e += 1
    return e


@njit
def _products(walk, blas, alpha, own, n_own, other, d, p, stop, s):
    """S = α own otherᵀ for the tiles p..stop of a row (transposed walk: S = α other ownᵀ)."""
    tile, n = (walk.tile_m, walk.nq) if walk.transposed else (walk.tile_n, walk.nk)
    width = s.itemsize
    zero = alpha * 0
    at = 0
    while p < stop:
        e = _run_end(walk.col_idx, p, stop)
        first = walk.col_idx[p] * tile
        count = min((walk.col_idx[e - 1] + 1) * tile, n) - first
        there = other[0] + first * other[1]
        lda, ldb, lds = own[1] // width, other[1] // width, s.shape[1]
        if walk.transposed:
            c = s.ctypes.data + at * lds * width
            call_gemm(blas, _T, _N, n_own, count, d, alpha, own[0], lda, there, ldb, zero, c, lds)
        else:
            c = s.ctypes.data + at * width
            call_gemm(blas, _T, _N, count, n_own, d, alpha, there, ldb, own[0], lda, zero, c, lds)
        at += (e - p) * tile
        p = e


@njit
def _accumulate(walk, blas, w, other, acc, n_own, p, stop, careful):
    """acc += W other for the tiles p..stop of a row (transposed walk: acc += Wᵀ other)."""
    tile, n = (walk.tile_m, walk.nq) if walk.transposed else (walk.tile_n, walk.nk)
    width, d = w.itemsize, acc.shape[1]
    one = w.dtype.type(1)
    at = 0
    while p < stop:
        e = p + 1 if careful else _run_end(walk.col_idx, p, stop)
        first = walk.col_idx[p] * tile
        count = min((walk.col_idx[e - 1] + 1) * tile, n) - first
        there, ldb, ldw = other[0] + first * other[1], other[1] // width, w.shape[1]
        if careful and walk.kind[p] != FULL:
            _accumulate_nonzero(w, at, n_own, there, other[1], count, acc, walk.transposed)
        else:
            a = w.ctypes.data + at * width * (ldw if walk.transposed else 1)
            trans = _T if walk.transposed else _N
            c = acc.ctypes.data
            call_gemm(blas, _N, trans, d, n_own, count, one, there, ldb, a, ldw, one, c, d)
        at += (e - p) * tile
        p = e


@njit
def _accumulate_nonzero(w, at, n_own, address, step, count, acc, transposed):
    """`_accumulate` for one tile without touching what has weight 0."""
    d = acc.shape[1]
    for j in range(count):
        row = carray(pointer(address + j * step, acc), (d,))
        for i in range(n_own):
            weight = w[at + j, i] if transposed else w[i, at + j]
            if weight != 0:
                for c in range(d):
                    acc[i, c] += weight * row[c]


@njit
def _keep_bits(s, words):
    for j in range(s.size):
        if not (words[j >> 5] >> np.uint32(j & 31)) & np.uint32(1):
            s[j] = -np.inf


@njit
def _mask(walk, plane, own, p, stop, s):
    """Set the masked scores of the tiles p..stop of row ``own`` to -inf."""
    for t in range(p, stop):
        kind = walk.kind[t]
        if kind == FULL:
            continue
        row, col, top, left = own, walk.col_idx[t], 0, (t - p) * walk.tile_n
        if walk.transposed:
            row, col, top, left = walk.col_idx[t], own, (t - p) * walk.tile_m, 0
        q0, kv0 = row * walk.tile_m, col * walk.tile_n
        cols = min(walk.tile_n, walk.nk - kv0)
        for i in range(min(walk.tile_m, walk.nq - q0)):
            scores = s[top + i, left : left + cols]
            if kind == INTERVAL:
                bound = plane * walk.nq + q0 + i
                lo = min(max(walk.lo[bound] - kv0, 0), cols)
                hi = max(min(walk.hi[bound] - kv0, cols), lo)
                scores[:lo] = -np.inf
                scores[hi:] = -np.inf
            else:
                _keep_bits(scores, walk.bits[kind - BITS, i])


@njit(fastmath={"nnan", "nsz", "reassoc"})
def _row_max(s, m):
    for j in range(s.size):
        m = s[j] if s[j] > m else m
    return m


@njit(fastmath={"reassoc", "contract"})
def _weights(s, m):
    """s <- P = 2**(s - m); returns the sum of P."""
    total = m * 0
    for j in range(s.size):
        p = exp2(s[j] - m)
        s[j] = p
        total += p
    return total


@njit(fastmath={"contract"})
def _weights_and_gradients(s, dp, lse, delta):
    """s <- P = 2**(s - lse);  dp <- dS = P ∘ (dP − δ), exactly 0 where P is."""
    zero = s.dtype.type(0)
    for j in range(s.size):
        p = exp2(s[j] - lse)
        s[j] = p
        dp[j] = p * (dp[j] - delta) if p != 0 else zero


@njit(fastmath={"reassoc"})
def _is_finite(x):
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total += x[i, j] * 0
    return total == 0


@njit
def _fill(x, value):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = value


@njit
def _rescale(x, factor):
    for j in range(x.size):
        x[j] *= factor


@njit
def _store(destination, x, factor):
    for i in range(x.shape[0]):
        row = carray(pointer(destination[0] + i * destination[1], x), (x.shape[1],))
        for j in range(x.shape[1]):
            row[j] = x[i, j] * factor


@njit
def _operand(operands, tensor, b, h, first):
    """``(address, row stride)`` of ``tensor[b, first, h, 0]``."""
    address, batch, seq, head = operands.table[tensor]
    return address + b * batch + h * head + first * seq, seq


@njit
def _row_of(walk, plane, row):
    at = plane * walk.n_row + row
    return np.int64(walk.row_ptr[at]), np.int64(walk.row_ptr[at + 1])


@njit
def _forward_rows(walk, operands, row, head, scale, s, acc, m, l, careful):
    """One row of query tiles: acc <- Σ P V (unscaled), m <- row maxima, l <- Σ P, base 2."""
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    n_rows = acc.shape[0]
    q = _operand(operands, Q, b, h, row * walk.tile_m)
    k = _operand(operands, K, b, h_kv, 0)
    v = _operand(operands, V, b, h_kv, 0)
    _fill(acc, 0)
    m[:], l[:] = -np.inf, 0
    p, end = _row_of(walk, plane, row)
    while p < end:
        stop = min(p + s.shape[1] // walk.tile_n, end)
        width = min(walk.tile_n, walk.nk - walk.col_idx[stop - 1] * walk.tile_n)
        width += (stop - 1 - p) * walk.tile_n
        # S = Q Kᵀ
        _products(walk, operands.blas, scale, q, n_rows, k, operands.head_dim, p, stop, s)
        _mask(walk, plane, row, p, stop, s)
        for i in range(n_rows):
            scores = s[i, :width]
            new = _row_max(scores, m[i])
            if new == -np.inf:
                scores[:] = 0
                continue
            correction = exp2(m[i] - new)
            l[i] = l[i] * correction + _weights(scores, new)
            m[i] = new
            if correction != 1:
                _rescale(acc[i], correction)
        # O += P V
        _accumulate(walk, operands.blas, s, v, acc, n_rows, p, stop, careful)
        p = stop


@njit(nogil=True, cache=True)
def forward(walk, operands, work, counter, chunk, scale, lse):
    """Take rows of query tiles from the work list; write their OUT and ``lse``.

    Parameters
    ----------
    work : int64 (n_work, 2)
        ``TileSchedule.work(batch, heads)``.
    counter : int64 (1,)
        The next item of the work list, shared by the threads.
    chunk : int
        Columns of the score matrix, at least one tile.
    scale : float
        Softmax scale times log2(e), in the working precision.
    lse : (batch * heads, nq)
        Natural logarithm, written.
    """
    real = lse.dtype
    s = np.empty((walk.tile_m, chunk), real)
    acc = np.empty((walk.tile_m, operands.head_dim), real)
    m, l = np.empty(walk.tile_m, real), np.empty(walk.tile_m, real)
    item = take(counter)
    while item < work.shape[0]:
        row, head = work[item]
        first = row * walk.tile_m
        n_rows = min(walk.tile_m, walk.nq - first)
        for careful in (False, True):
            _forward_rows(walk, operands, row, head, scale, s, acc[:n_rows], m, l, careful)
            if _is_finite(acc[:n_rows]):
                break
        for i in range(n_rows):
            if l[i] == 0:
                lse[head, first + i] = -np.inf
            else:
                _rescale(acc[i], 1 / l[i])
                lse[head, first + i] = (m[i] + np.log2(np.float64(l[i]))) * np.log(2.0)
        b, h = divmod(head, operands.heads)
        _store(_operand(operands, OUT, b, h, first), acc[:n_rows], real.type(1))
        item = take(counter)


@njit
def _gradient_rows(walk, operands, row, head, scale, lse, delta, s, ds, dq, careful):
    """One row of query tiles: dq <- Σ dS K, without the softmax scale."""
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    first, n_rows, d = row * walk.tile_m, dq.shape[0], operands.head_dim
    q = _operand(operands, Q, b, h, first)
    dout = _operand(operands, DOUT, b, h, first)
    k = _operand(operands, K, b, h_kv, 0)
    v = _operand(operands, V, b, h_kv, 0)
    p, end = _row_of(walk, plane, row)
    while p < end:
        stop = min(p + s.shape[1] // walk.tile_n, end)
        width = min(walk.tile_n, walk.nk - walk.col_idx[stop - 1] * walk.tile_n)
        width += (stop - 1 - p) * walk.tile_n
        # S = Q Kᵀ,  dP = dO Vᵀ
        _products(walk, operands.blas, scale, q, n_rows, k, d, p, stop, s)
        _products(walk, operands.blas, s.dtype.type(1), dout, n_rows, v, d, p, stop, ds)
        _mask(walk, plane, row, p, stop, s)
        for i in range(n_rows):
            at = first + i
            _weights_and_gradients(s[i, :width], ds[i, :width], lse[head, at], delta[head, at])
        # dQ += dS K
        _accumulate(walk, operands.blas, ds, k, dq, n_rows, p, stop, careful)
        p = stop


@njit
def _gradient_columns(walk, operands, row, head, scale, lse, delta, s, ds, dk, dv, careful):
    """One row of key tiles, one query head: dv += Σ Pᵀ dO, dk += Σ dSᵀ Q without the scale."""
    b, h = divmod(head, operands.heads)
    h_kv = h // (operands.heads // operands.heads_kv)
    plane = operands.plane_of[head]
    n_keys, d, tile = dk.shape[0], operands.head_dim, walk.tile_m
    k = _operand(operands, K, b, h_kv, row * walk.tile_n)
    v = _operand(operands, V, b, h_kv, row * walk.tile_n)
    q = _operand(operands, Q, b, h, 0)
    dout = _operand(operands, DOUT, b, h, 0)
    p, end = _row_of(walk, plane, row)
    while p < end:
        stop = min(p + s.shape[0] // tile, end)
        # S = Q Kᵀ,  dP = dO Vᵀ
        _products(walk, operands.blas, scale, k, n_keys, q, d, p, stop, s)
        _products(walk, operands.blas, s.dtype.type(1), v, n_keys, dout, d, p, stop, ds)
        _mask(walk, plane, row, p, stop, s)
        for t in range(p, stop):
            first, top = walk.col_idx[t] * tile, (t - p) * tile
            for i in range(min(tile, walk.nq - first)):
                at, r = first + i, top + i
                _weights_and_gradients(
                    s[r, :n_keys], ds[r, :n_keys], lse[head, at], delta[head, at]
                )
        # dV += Pᵀ dO,  dK += dSᵀ Q
        _accumulate(walk, operands.blas, s, dout, dv, n_keys, p, stop, careful)
        _accumulate(walk, operands.blas, ds, q, dk, n_keys, p, stop, careful)
        p = stop


@njit(nogil=True, cache=True)
def backward_dq(walk, operands, work, counter, chunk, scale, lse, delta, factor):
    """Take rows of query tiles; write their DQ.

    ``lse`` is in base 2 and +inf where a row attends nothing, ``factor`` the softmax scale;
    the rest as for `forward`.
    """
    real = lse.dtype
    s, ds = np.empty((walk.tile_m, chunk), real), np.empty((walk.tile_m, chunk), real)
    acc = np.empty((walk.tile_m, operands.head_dim), real)
    item = take(counter)
    while item < work.shape[0]:
        row, head = work[item]
        first = row * walk.tile_m
        dq = acc[: min(walk.tile_m, walk.nq - first)]
        for careful in (False, True):
            _fill(dq, 0)
            _gradient_rows(walk, operands, row, head, scale, lse, delta, s, ds, dq, careful)
            if _is_finite(dq):
                break
        b, h = divmod(head, operands.heads)
        _store(_operand(operands, DQ, b, h, first), dq, factor)
        item = take(counter)


@njit(nogil=True, cache=True)
def backward_dkdv(walk, operands, work, counter, chunk, scale, lse, delta, factor):
    """Take rows of key tiles (transposed walk); write their DK and DV; see `backward_dq`."""
    real = lse.dtype
    s, ds = np.empty((chunk, walk.tile_n), real), np.empty((chunk, walk.tile_n), real)
    acc = np.empty((2, walk.tile_n, operands.head_dim), real)
    group = operands.heads // operands.heads_kv
    item = take(counter)
    while item < work.shape[0]:
        row, kv_head = work[item]
        first = row * walk.tile_n
        n_keys = min(walk.tile_n, walk.nk - first)
        dk, dv = acc[0, :n_keys], acc[1, :n_keys]
        for careful in (False, True):
            _fill(dk, 0)
            _fill(dv, 0)
            for head in range(kv_head * group, (kv_head + 1) * group):
                _gradient_columns(
                    walk, operands, row, head, scale, lse, delta, s, ds, dk, dv, careful
                )
            if _is_finite(dk) and _is_finite(dv):
                break
        b, h_kv = divmod(kv_head, operands.heads_kv)
        _store(_operand(operands, DK, b, h_kv, first), dk, factor)
        _store(_operand(operands, DV, b, h_kv, first), dv, real.type(1))
        item = take(counter)
