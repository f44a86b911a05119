"""How much of dense softmax attention a mask keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks import _check
from masks.base import Mask

SCORES_PER_CHUNK = 1 << 22


def coverage(
    q: ArrayLike,
    k: ArrayLike,
    mask: Mask,
    *,
    scale: float | None = None,
    within: Mask | None = None,
    queries: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Share of the softmax attention mass that falls on the pairs `mask` keeps.

    For every query the attention probabilities over all keys are computed, those the mask keeps
    are summed, and the sums are averaged over queries: 1 means the mask loses nothing.

    Parameters
    ----------
    q : ndarray
        ``(batch, nq, heads, head_dim)``, any real floating dtype.
    k : ndarray
        ``(batch, nk, heads_kv, head_dim)`` with ``heads % heads_kv == 0``: query head ``h`` reads
        key head ``h // (heads // heads_kv)``.
    mask : Mask
        Shape ``(nq, nk)``, plain or per head and per batch.
    scale : float, optional
        Default ``head_dim ** -0.5``.
    within : Mask, optional
        Pairs that the model attends to in the first place (causal, say): probabilities are
        computed over these. Default all. A query without any is left out of the average.
    queries : array of int, optional
        Places of the queries that are averaged, in ``[0, nq)``: a sample, where sequences are
        long. Default all.

    Returns
    -------
    ndarray
        float64 ``(batch, heads)`` in ``[0, 1]``; NaN where no query attends to anything.

    Notes
    -----
    O(batch * heads * queries * nk * head_dim) time, chunked over queries: the score matrix is never
    stored. Scores are float64 for float64 inputs, else float32; sums are float64.
    """
    q, k = _check.array_of("q", q), _check.array_of("k", k)
    _check_inputs(q, k, mask, within)
    batch, nq, heads, head_dim = q.shape
    nk, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else _check.real("scale", scale)
    if not np.isfinite(scale):
        raise ValueError(f"scale={scale}: must be finite")
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    step = max(1, SCORES_PER_CHUNK // max(nk, 1))
    total = np.zeros((batch, heads))
    counted = np.zeros((batch, heads), np.int64)
    chosen = _check_queries(queries, nq)
    for start in range(0, chosen.size if nk else 0, step):
        rows = chosen[start : start + step]
        kept, allowed = _Strips(mask, rows), None if within is None else _Strips(within, rows)
        for b, h in np.ndindex(batch, heads):
            keys = k[b, :, h // (heads // heads_kv)].astype(dtype)
            scores = (q[b, rows, h].astype(dtype) * dtype(scale)) @ keys.T
            if allowed is not None:
                scores[~allowed[b, h]] = -np.inf
            share = _kept_share(scores, kept[b, h])
            total[b, h] += np.nansum(share)
            counted[b, h] += np.count_nonzero(~np.isnan(share))
    return np.divide(total, counted, out=np.full_like(total, np.nan), where=counted > 0)


class _Strips:
    """Rows of a mask as boolean arrays, each distinct plane expanded once."""

    def __init__(self, mask, rows):
        q, kv = rows[:, None], np.arange(mask.shape[1])[None, :]
        self.index = mask.plane_index
        self.strips = [np.broadcast_to(m._at(q, kv), (q.size, kv.size)) for m in mask.planes]

    def __getitem__(self, place):
        b, h = (at % extent for at, extent in zip(place, self.index.shape, strict=True))
        return self.strips[self.index[b, h]]


def _kept_share(scores, kept):
    """Kept probability of each row, float64; NaN for a row that may not attend to anything."""
    top = scores.max(1, keepdims=True)
    weight = np.exp(scores - np.where(np.isfinite(top), top, 0))
    whole = weight.sum(1, dtype=np.float64)
    part = np.where(kept, weight, 0).sum(1, dtype=np.float64)
    return np.divide(part, whole, out=np.full(len(scores), np.nan), where=whole > 0)


def _check_queries(queries, nq):
    if queries is None:
        return np.arange(nq)
    queries = _check.array_of("queries", queries)
    if queries.ndim != 1 or queries.dtype.kind not in "iu":
        raise TypeError(
            f"queries: must be a 1-D array of integers, got {queries.ndim}-D {queries.dtype}"
        )
    if queries.size and not 0 <= queries.min() <= queries.max() < nq:
        raise ValueError(
            f"queries reach from {queries.min()} to {queries.max()}: must be in [0, {nq})"
        )
    return queries.astype(np.int64)


def _check_inputs(q, k, mask, within):
    for name, array in (("q", q), ("k", k)):
        if array.ndim != 4:
            raise ValueError(f"{name}.shape={array.shape}: must be (batch, seqlen, heads, dim)")
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise TypeError(f"{name} has dtype {array.dtype}: must be floating point")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k.shape={k.shape}: batch and head_dim must match q.shape={q.shape}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k has {k.shape[2]} heads: the {q.shape[2]} heads of q must be a multiple"
        )
    _check.integer("head_dim", q.shape[3], 1)
    for name, m in (("mask", mask), ("within", within)):
        if m is None and name == "within":
            continue
        if not isinstance(m, Mask):
            raise TypeError(f"{name} is {type(m).__name__}: must be a Mask")
        if m.shape != (q.shape[1], k.shape[1]):
            raise ValueError(f"{name}.shape={m.shape}: must be ({q.shape[1]}, {k.shape[1]})")
        for axis, extent, size in (("batch", m.batch, q.shape[0]), ("heads", m.heads, q.shape[2])):
            if extent not in (None, size):
                raise ValueError(f"{name}.{axis}={extent}: must be {size} or broadcast")
