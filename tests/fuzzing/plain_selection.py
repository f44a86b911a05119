"""What the functions of `nbflash.selection` choose by, with loops over blocks, queries and heads.

A function has the name and the arguments of the one that it defines, and returns the score of each
block, (batch, heads, rows, columns); ``real`` is the dtype that it computes in.
"""

import numpy as np


def blocks_of(n, size):
    """First and last + 1 token of each block."""
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def admissible(nq, nk, block, causal):
    """Whether a pair of a block may be attended: bool (rows, columns)."""
    ends = np.array([end - 1 + nk - nq if causal else nk - 1 for _, end in blocks_of(nq, block[0])])
    starts = np.array([start for start, _ in blocks_of(nk, block[1])])
    return starts[None, :] <= ends[:, None]


def always(nq, nk, block, causal, sinks, local):
    """The first ``sinks`` blocks, and the last ``local`` ones that a row may attend to."""
    possible = admissible(nq, nk, block, causal)
    chosen = np.zeros(possible.shape, bool)
    for row, there in zip(chosen, possible, strict=True):
        columns = np.flatnonzero(there)
        row[columns[: max(sinks, 0)]] = True
        row[columns[max(columns.size - local, 0) :]] = True
    return chosen


def softmax(s, seen):
    """Over the last axis of what is seen; 0 where nothing is."""
    s = np.where(seen, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(top == -np.inf, 0, top))
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.finfo(s.dtype).tiny)


def _means(x, size):
    return np.stack([x[:, a:b].mean(axis=1) for a, b in blocks_of(x.shape[1], size)], axis=1)


def _for_heads(q, k):
    return k.repeat(q.shape[2] // k.shape[2], axis=2)


def mean_pooled(q, k, block, real):
    q, k = _means(q.astype(real), block[0]), _means(_for_heads(q, k).astype(real), block[1])
    return np.einsum("bihd,bjhd->bhij", q, k)


def cumulative(q, k, block, causal, real):
    s = mean_pooled(q, k, block, real) * real(q.shape[3] ** -0.5)
    return softmax(s, admissible(q.shape[1], k.shape[1], block, causal))


def compressed(q, k, block, causal, length, real):
    """A query sees a mean of keys that are all past."""
    nq, nk = q.shape[1], k.shape[1]
    keys = _means(k.astype(real), length)
    keys = keys.astype(k.dtype).astype(real) if k.itemsize == 2 else keys
    s = np.einsum("bihd,bjhd->bhij", q.astype(real), _for_heads(q, keys)) * real(q.shape[3] ** -0.5)
    ends = np.array([end - 1 for _, end in blocks_of(nk, length)])
    own = np.arange(nq) + nk - nq if causal else np.full(nq, nk - 1)
    weights = softmax(s, ends <= own[:, None])
    per = block[1] // length
    by_rows = np.stack([weights[:, :, a:b].sum(axis=2) for a, b in blocks_of(nq, block[0])], 2)
    columns = [by_rows[..., a:b].sum(axis=3) for a, b in blocks_of(keys.shape[1], per)]
    by_heads = np.stack(columns, axis=3)
    groups = by_heads.reshape(len(q), k.shape[2], -1, *by_heads.shape[2:])
    return groups.sum(axis=2)


def antidiagonal(q, k, block, causal, stride, real):
    """Sums over the antidiagonals of squares; what lies behind the end counts 0."""
    (batch, nq, heads, head_dim), nk = q.shape, k.shape[1]
    rows, columns = len(blocks_of(nq, stride)), len(blocks_of(nk, stride))
    k, sums = _for_heads(q, k), np.zeros((batch, heads, rows, columns), real)
    for i, j, t in np.ndindex(rows, columns, stride):
        query, key = i * stride + stride - 1 - t, j * stride + t
        if query < nq and key < nk:
            pair = q[:, query].astype(real), k[:, key].astype(real)
            sums[:, :, i, j] += np.einsum("bhd,bhd->bh", *pair)
    ends = np.array([end - 1 + nk - nq if causal else nk - 1 for _, end in blocks_of(nq, stride)])
    starts = np.array([start for start, _ in blocks_of(nk, stride)])
    weights = softmax(sums * real(head_dim**-0.5 / stride), starts <= ends[:, None])
    m, n = block[0] // stride, block[1] // stride
    by_rows = np.stack([weights[:, :, a:b].sum(axis=2) for a, b in blocks_of(rows, m)], axis=2)
    return np.stack([by_rows[..., a:b].sum(axis=3) for a, b in blocks_of(columns, n)], axis=3)


def vertical_slash(q, k, last, real):
    """Sums over the last queries for each key, and for each distance: (batch, heads, nk) each."""
    nq, nk = q.shape[1], k.shape[1]
    last = min(last, nq)
    own = np.arange(nk - last, nk)
    s = np.einsum("bihd,bjhd->bhij", q[:, nq - last :].astype(real), _for_heads(q, k).astype(real))
    weights = softmax(s * real(q.shape[3] ** -0.5), np.arange(nk) <= own[:, None])
    distances = np.zeros((*weights.shape[:2], nk), real)
    for i, j in np.ndindex(last, nk):
        if own[i] - j >= 0:
            distances[:, :, own[i] - j] += weights[:, :, i, j]
    return weights.sum(axis=2), distances
