"""decode on NumPy arrays: the last few queries of every sequence against its keys, in one kernel.

Two matrix products and a softmax for the queries of a sequence. There is no schedule: bounds of
keys follow from positions, and a mask is given by its cells.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from nbflash.backends.cpu import blas
from nbflash.backends.cpu.compiling import COUNTER, compiled, inlined
from nbflash.backends.cpu.intrinsics import (
    call,
    call_gemm,
    call_gemv,
    given_up,
    pointer,
    take,
)
from nbflash.backends.cpu.passes import MAX_ROW_STRIDE
from nbflash.backends.cpu.softmax import row_max, weights
from nbflash.backends.cpu.threads import run_in_threads
from nbflash.backends.cpu.tile_function import ABSENT
from nbflash.backends.cpu.walk import is_finite
from nbflash.definitions.constants import score_factor

_N, _T = ord("N"), ord("T")

#: Scores of an item that are held at once, unless those of one token are more.
SCORES = 1 << 20
#: Multiplications below which a call takes one thread: those of others cost more to start.
ALONE = 1 << 22


class Keys(NamedTuple):
    """Where the keys and values of the sequences are, int64.

    ``table`` (batch, 6) has for each sequence the address of its first key, the bytes from token
    to token and from head to head, and the same of its values. ``lengths`` (batch,) counts keys.
    """

    table: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of_sequences(cls, pairs):
        """Of each sequence ``(k, v)``, as `addressable` made them, (length, heads_kv, head_dim)."""
        table = [[*_place(k, k.strides), *_place(v, v.strides)] for k, v in pairs]
        lengths = np.array([len(k) for k, _ in pairs], np.int64)
        return cls(np.array(table, np.int64).reshape(-1, 6), lengths)

    @classmethod
    def of_caches(cls, k, v, lengths):
        """Of `addressable` caches (batch, capacity, heads_kv, head_dim)."""
        steps = k.strides[0], 0, 0, v.strides[0], 0, 0
        table = np.multiply.outer(np.arange(len(k)), steps)
        table += *_place(k, k.strides[1:]), *_place(v, v.strides[1:])
        return cls(table, lengths.astype(np.int64))


class Cells(NamedTuple):
    """What may be attended: keys from ``left`` before a query's position to ``right`` behind it.

    And of these the cells of a mask, bool (planes, nq, keys), where there is any plane: that of
    query head ``h`` of sequence ``b`` is ``plane_of[b, h]``.
    """

    left: int
    right: int
    keep: np.ndarray
    plane_of: np.ndarray


def cells_of(mask, window, batch, heads):
    """The `Cells` of a mask, or of none, and of ``window``, keys to the left and to the right."""
    left, right = window
    if mask is None:
        empty = np.zeros((0, 0, 0), bool), np.zeros((batch, heads), np.int32)
        return Cells(left, right, *empty)
    keep = np.stack([plane.dense() for plane in mask.planes])
    plane_of = np.broadcast_to(mask.plane_index, (batch, heads)).astype(np.int32)
    return Cells(left, right, keep, plane_of)


def decode(q, keys, heads_kv, out, lse, cells, scale, score=ABSENT):
    """Attention of the last tokens of sequences.

    Parameters
    ----------
    q : (batch, nq, heads, head_dim)
    keys : Keys
        Of arrays that the caller keeps.
    heads_kv : int
    out, lse
        As `passes.forward` writes them.
    cells : Cells
    scale : float
    score : Bound
        What `score.prepare` returned for as many keys as queries: ``q_idx`` is a position.
    """
    real = np.dtype(lse.dtype).type
    batch, nq, heads, head_dim = q.shape
    grouped = batch, nq, heads_kv, heads // heads_kv, head_dim
    q = np.array(q.reshape(grouped).swapaxes(1, 2), real, order="C")
    target, sums = np.empty(q.shape, real), np.empty((batch, heads_kv, nq, grouped[3]), real)
    factor = real(score_factor(scale, score.function.address != 0))
    counter = np.zeros(1, COUNTER)
    shared = q, keys, target, sums, cells, factor, score.function
    products = blas.address("gemm", real), blas.address("gemv", real)
    shared = *shared, products, counter
    size = int(keys.lengths.sum()) * nq * heads * head_dim
    with blas.one_thread():
        if size <= ALONE:
            _decode(*shared)
        else:
            run_in_threads(_decode, shared, counter, batch * heads_kv)
    out[...] = target.swapaxes(1, 2).reshape(out.shape)
    lse[...] = sums.transpose(0, 1, 3, 2).reshape(lse.shape)


def is_addressable(x, real):
    """Whether BLAS reads keys (..., tokens, heads_kv, head_dim) where they are."""
    token, _, element = x.strides[-3:]
    fits = x.dtype == real and x.flags.aligned and element == x.itemsize
    return fits and x.shape[-1] * element <= token <= MAX_ROW_STRIDE * element


def addressable(x, real):
    """Keys as BLAS reads them."""
    return x if is_addressable(x, real) else np.array(x, real, order="C")


def _place(x, strides):
    return x.__array_interface__["data"][0], *strides[:2]


@inlined(fastmath={"contract"})
def _add(acc, factor, x):
    for d in range(acc.size):
        acc[d] += factor * x[d]


@inlined
def _scores(q, k, step, s, factor, products):
    """S = factor · Q Kᵀ; k is the address of the first key.

    One row is a product with a vector: a product of matrices copies K first on many processors.
    """
    (rows, head_dim), n = q.shape, s.shape[1]
    if n == 0:
        return
    gemm, gemv = products
    ld, item, one, zero = step // q.itemsize, q.ctypes.data, q.dtype.type(1), q.dtype.type(0)
    at = s.ctypes.data
    if rows == 1:
        s[:] = 0
        call_gemv(gemv, _T, head_dim, n, factor, k, ld, item, 1, one, at, 1)
    else:
        call_gemm(gemm, _T, _N, n, rows, head_dim, factor, k, ld, item, head_dim, zero, at, n)


@inlined
def _call_score(score, s, b, h_kv, group, at, lo):
    """A score function on the rows of tokens from position ``at`` on, but those before the first.

    Rows of a head lie ``group`` apart; the first column is key ``lo``.
    """
    rows, width = s.shape[0] // group, s.shape[1] * s.itemsize
    skipped = min(max(-at, 0), rows)
    for g in range(group):
        x = s.ctypes.data + (skipped * group + g) * width
        block = x, 0, group * width, rows - skipped, s.shape[1]
        call(score.address, (*block, b, h_kv * group + g, at + skipped, lo, score.record))


@inlined
def _products(p, v, step, acc, products, careful):
    """O = P V; where ``careful`` only of the keys that have a weight."""
    (rows, head_dim), n = acc.shape, p.shape[1]
    if n == 0 or careful:
        acc[:] = 0
        for j in range(n):
            for i in range(rows):
                if p[i, j] != 0:
                    _add(acc[i], p[i, j], carray(pointer(v + j * step, p.dtype), head_dim))
        return
    one, zero, ld = p.dtype.type(1), p.dtype.type(0), step // p.itemsize
    at, weight, (gemm, gemv) = acc.ctypes.data, p.ctypes.data, products
    if rows == 1:
        acc[:] = 0
        call_gemv(gemv, _N, head_dim, n, one, v, ld, weight, 1, one, at, 1)
    else:
        call_gemm(gemm, _N, _N, head_dim, rows, n, one, v, ld, weight, n, zero, at, head_dim)


@inlined
def _hide(s, cells, b, h, i, lo, hi, first):
    """-inf outside lo..hi, and where the mask has no cell; the row begins at key ``first``."""
    n = s.size
    s[: min(max(lo - first, 0), n)] = -np.inf
    s[min(max(hi - first, 0), n) :] = -np.inf
    if cells.keep.shape[0]:
        keep = cells.keep[cells.plane_of[b, h], i]
        for j in range(n):
            if not keep[first + j]:
                s[j] = -np.inf


@compiled
def _decode(q, keys, out, lse, cells, factor, score, products, counter):
    """Take pairs (sequence, key/value head) from the counter; write their ``out`` and ``lse``.

    Parameters
    ----------
    q, out : (batch, heads_kv, nq, group, head_dim)
        C-contiguous, of the working precision.
    lse : (batch, heads_kv, nq, group)
    """
    batch, heads_kv, nq, group, head_dim = q.shape
    item = take(counter)
    while item < batch * heads_kv:
        b, h_kv = divmod(item, heads_kv)
        n = keys.lengths[b]
        k, k_step, k_head, v, v_step, v_head = keys.table[b]
        together = min(nq, max(1, SCORES // max(n * group, 1)))
        for i0 in range(0, nq, together):
            if given_up(counter):
                break
            i1 = min(i0 + together, nq)
            rows, at = (i1 - i0) * group, n - nq + i0  # position of the first token
            lo = min(max(at - cells.left, 0), n)
            hi = min(max(n - nq + i1 + cells.right, lo), n)
            s = np.empty((rows, hi - lo), q.dtype)
            own, begin = q[b, h_kv, i0:i1].reshape(rows, head_dim), k + h_kv * k_head + lo * k_step
            _scores(own, begin, k_step, s, factor, products)
            if score.address != 0:
                _call_score(score, s, b, h_kv, group, at, lo)
            sums = np.empty(rows, q.dtype)
            for r in range(rows):
                i, g = divmod(r, group)
                first, last = at + i - cells.left, at + i + cells.right + 1
                last = 0 if score.address != 0 and at + i < 0 else last
                _hide(s[r], cells, b, h_kv * group + g, i0 + i, first, last, lo)
                m = row_max(s[r], q.dtype.type(-np.inf))
                base = m if m > -np.inf else q.dtype.type(0)
                sums[r] = weights(s[r], base)
                if sums[r] == 0:
                    lse[b, h_kv, i0 + i, g] = -np.inf
                else:
                    lse[b, h_kv, i0 + i, g] = (m + np.log2(np.float64(sums[r]))) * np.log(2.0)
            acc = out[b, h_kv, i0:i1].reshape(rows, head_dim)
            for careful in (False, True):
                _products(s, v + h_kv * v_head + lo * v_step, v_step, acc, products, careful)
                if is_finite(acc):
                    break
            for r in range(rows):
                if sums[r] == 0:
                    acc[r] = 0
                else:
                    acc[r] *= 1 / sums[r]
        item = take(counter)
