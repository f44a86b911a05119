"""A row of the tile schedule as matrices: products through BLAS, and the mask."""

from typing import NamedTuple

import numpy as np
from numba import carray

from masks.tiles import BITS, FULL, INTERVAL
from nbflash.backends.cpu.compiling import inlined
from nbflash.backends.cpu.intrinsics import call_gemm, pointer

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
    strides in bytes along batch, sequence and heads.  ``lse`` and ``delta`` are
    (batch * heads, nq) in the working precision: the forward writes ``lse`` as the natural
    logarithm; the backward reads it in base 2, +inf where a row attends nothing.
    """

    table: np.ndarray
    heads: int
    heads_kv: int
    head_dim: int
    plane_of: np.ndarray
    scale: float
    scale_log2: float
    lse: np.ndarray
    delta: np.ndarray
    blas: int


@inlined
def operand(tensor, b, h, first):
    """``(address, row stride)`` of element ``[b, first, h, 0]`` of a tensor of the table."""
    return tensor[0] + b * tensor[1] + h * tensor[3] + first * tensor[2], tensor[2]


@inlined
def row_of(walk, plane, row):
    at = plane * walk.n_row + row
    return np.int64(walk.row_ptr[at]), np.int64(walk.row_ptr[at + 1])


@inlined
def _run_end(col_idx, p, stop):
    """End of the run of adjacent tiles that begins at p."""
    e = p + 1
    while e < stop and col_idx[e] == col_idx[e - 1] + 1:
        e += 1
    return e


@inlined
def products(walk, operands, alpha, own, n_own, other, p, stop, s):
    """S = α own otherᵀ for the tiles p..stop of a row (transposed walk: S = α other ownᵀ)."""
    tile, n = (walk.tile_m, walk.nq) if walk.transposed else (walk.tile_n, walk.nk)
    blas, d, width, zero = operands.blas, operands.head_dim, s.itemsize, alpha * 0
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


@inlined
def accumulate(walk, operands, w, other, acc, n_own, p, stop, careful):
    """acc += W other for the tiles p..stop of a row (transposed walk: acc += Wᵀ other)."""
    tile, n = (walk.tile_m, walk.nq) if walk.transposed else (walk.tile_n, walk.nk)
    blas, d, width = operands.blas, operands.head_dim, w.itemsize
    one = w.dtype.type(1)
    at = np.int64(0)  # as it is after a tile: what it is passed to is compiled once
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


@inlined
def _accumulate_nonzero(w, at, n_own, address, step, count, acc, transposed):
    """`accumulate` for one tile without touching what has weight 0."""
    d = acc.shape[1]
    for j in range(count):
        row = carray(pointer(address + j * step, acc), (d,))
        for i in range(n_own):
            weight = w[at + j, i] if transposed else w[i, at + j]
            if weight != 0:
                for c in range(d):
                    acc[i, c] += weight * row[c]


@inlined
def _keep_bits(s, words):
    for j in range(s.size):
        if not (words[j >> 5] >> np.uint32(j & 31)) & np.uint32(1):
            s[j] = -np.inf


@inlined
def place(walk, own, p, t):
    """First query and key of tile t of the row ``own``, and where in S its scores begin."""
    if walk.transposed:
        return walk.col_idx[t] * walk.tile_m, own * walk.tile_n, (t - p) * walk.tile_m, 0
    return own * walk.tile_m, walk.col_idx[t] * walk.tile_n, 0, (t - p) * walk.tile_n


@inlined
def mask(walk, plane, own, p, stop, s):
    """Set the masked scores of the tiles p..stop of row ``own`` to -inf."""
    for t in range(p, stop):
        kind = walk.kind[t]
        if kind == FULL:
            continue
        q0, kv0, top, left = place(walk, own, p, t)
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


@inlined(fastmath={"reassoc"})
def is_finite(x):
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total += x[i, j] * 0
    return total == 0


@inlined
def fill(x, value):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = value


@inlined
def rescale(x, factor):
    for j in range(x.size):
        x[j] *= factor


@inlined
def store(destination, x, factor):
    for i in range(x.shape[0]):
        row = carray(pointer(destination[0] + i * destination[1], x), (x.shape[1],))
        for j in range(x.shape[1]):
            row[j] = x[i, j] * factor
