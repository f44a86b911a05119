"""Masks whose rows are intervals of keys: dense, causal, window, prefix, documents, chunked."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from masks import _check
from masks.base import Mask
from masks.tiles import ABSENT, FULL, INTERVAL, interval_cells, interval_state


class Interval(Mask):
    """Query ``q`` attends to ``lo[q] <= kv < hi[q]``.

    Parameters
    ----------
    nk : int
        Number of keys.
    lo, hi : ndarray of int
        ``(nq,)`` bounds; they are clipped to ``[0, nk]`` and an empty row becomes (0, 0).
    """

    __slots__ = ("hi", "lo")
    _fields = ("nk", "lo", "hi")

    def __init__(self, nk, lo, hi):
        super().__init__(lo.size, nk)
        lo, hi = (np.clip(bound, 0, nk).astype(np.int32, copy=False) for bound in (lo, hi))
        live = lo < hi
        if not live.all():
            lo, hi = lo * live, hi * live
        self.lo, self.hi = _compact(lo), _compact(hi)

    def _parts(self):
        return self.lo, self.hi

    def _at(self, q, kv):
        return (self.lo[q] <= kv) & (kv < self.hi[q])

    def _cells(self, grid, rows, cols):
        return interval_cells(grid, self.lo, self.hi, rows, cols)

    def _hint(self):
        return self.lo, self.hi

    def _extremes(self, grid):
        """Per tile row: least and greatest lo and hi, empty rows not lowering the least lo."""

        def make():
            start = np.arange(0, grid.nq, grid.tile_m)
            lo = np.where(self.lo < self.hi, self.lo, np.int32(grid.nk))
            return (
                np.minimum.reduceat(lo, start),
                np.maximum.reduceat(lo, start),
                np.minimum.reduceat(self.hi, start),
                np.maximum.reduceat(self.hi, start),
            )

        return self._cached(("extremes", grid.tile_m), make)

    def _spans(self, grid):
        """First and one-past-last tile column that each tile row may touch."""
        if not grid.n_row:
            return np.zeros((2, 0), np.int64)
        lo_min, _, _, hi_max = self._extremes(grid)
        first = lo_min.astype(np.int64) // grid.tile_n
        return first, np.maximum(-(-hi_max.astype(np.int64) // grid.tile_n), first)

    def _size(self, grid):
        first, last = self._spans(grid)
        return int((last - first).sum())

    def _live(self, grid):
        first, last = self._spans(grid)
        return ranges(first + np.arange(grid.n_row) * grid.n_col, last - first)

    def _state(self, grid, rows, cols):
        if not rows.size:
            return np.zeros(0, np.int8)
        lo_min, lo_max, hi_min, hi_max = (bound[rows] for bound in self._extremes(grid))
        start, stop = grid.columns(cols)
        state = np.full(rows.size, INTERVAL, np.int8)
        state[(hi_max <= start) | (lo_min >= stop)] = ABSENT
        state[(lo_max <= start) & (hi_min >= stop)] = FULL
        first, last = grid.rows(rows)
        unsure = np.flatnonzero(
            (state == INTERVAL)
            & ~self._touches(first, start, stop)
            & ~self._touches(last - 1, start, stop)
        )
        state[unsure] = interval_state(grid, self.lo, self.hi, rows[unsure], cols[unsure])
        return state

    def _touches(self, q, start, stop):
        """Whether the intervals of single rows have a key of ``start <= kv < stop``."""
        return np.maximum(self.lo[q], start) < np.minimum(self.hi[q], stop)

    def _join(self, other):
        """The union where every row of it is one interval, else None."""
        a, b = self.lo < self.hi, other.lo < other.hi
        touching = (self.lo <= other.hi) & (other.lo <= self.hi)
        if not (touching | ~a | ~b).all():
            return None
        lo = np.where(a & b, np.minimum(self.lo, other.lo), np.where(a, self.lo, other.lo))
        return Interval(self.shape[1], lo, np.maximum(self.hi, other.hi))

    def _meet(self, other):
        lo, hi = np.maximum(self.lo, other.lo), np.minimum(self.hi, other.hi)
        return Interval(self.shape[1], lo, hi)

    def _complement(self):
        nq, nk = self.shape
        before = Interval(nk, np.zeros(nq, np.int32), self.lo)
        return before | Interval(nk, self.hi, np.full(nq, nk, np.int32))

    def _restricted(self, q, kv):
        lo, hi = (np.searchsorted(kv, bound[q]) for bound in (self.lo, self.hi))
        return Interval(kv.size, lo, hi)

    def _transposed(self):
        nq, nk = self.shape
        live = np.flatnonzero(self.lo < self.hi)
        first, last = (live[0], live[-1] + 1) if live.size else (0, 0)
        lo, hi = self.lo[first:last], self.hi[first:last]
        if live.size < last - first or (np.diff(lo) < 0).any() or (np.diff(hi) < 0).any():
            return super()._transposed()
        key = np.arange(nk)
        return Interval(
            nq,
            first + np.searchsorted(hi, key, side="right"),
            first + np.searchsorted(lo, key, side="right"),
        )


def ranges(start, length):
    """Concatenation of ``arange(start[i], start[i] + length[i])``, int64."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(start - (ends - length), length)


def unique_sorted(keys):
    """The keys, not negative, each once, sorted: `numpy.unique` hashes, ten times as slow."""
    keys = np.sort(keys)
    return keys[np.flatnonzero(np.diff(keys, prepend=-1))]


def sums(keys, values):
    """The `unique_sorted` keys, and the sum of the values of each."""
    order = np.argsort(keys, kind="stable")  # fast where there are sorted runs
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[first], np.add.reduceat(values[order], first) if first.size else values


def _compact(bound):
    """Read-only copy; a constant bound keeps one element."""
    if bound.size and (bound == bound[0]).all():
        return np.broadcast_to(bound[0], bound.shape)
    bound = bound.copy() if bound.base is not None else bound
    bound.setflags(write=False)
    return bound


def _sizes(nq, nk, name="nq"):
    nq = _check.integer(name, nq)
    return nq, nq if nk is None else _check.integer("nk", nk)


def _positions(nq, nk):
    """Key position of each query, bottom-right aligned: ``(nq,)``, in 64 bits to be added to."""
    return np.arange(nk - nq, nk, dtype=np.int64)


def dense(nq: SupportsIndex, nk: SupportsIndex | None = None) -> Mask:
    """Every query attends to every key."""
    nq, nk = _sizes(nq, nk)
    return Interval(nk, np.zeros(nq, np.int32), np.full(nq, nk, np.int32))


def causal(nq: SupportsIndex, nk: SupportsIndex | None = None) -> Mask:
    """Query ``i`` attends to keys ``j <= i + nk - nq`` (bottom-right aligned).

    With ``nq > nk`` the first ``nq - nk`` queries attend to nothing.
    """
    return window(nq, nk, right=0)


def window(
    nq: SupportsIndex,
    nk: SupportsIndex | None = None,
    *,
    left: SupportsIndex | None = None,
    right: SupportsIndex | None = None,
) -> Mask:
    """Sliding window: keys ``p - left <= j <= p + right`` around ``p = i + nk - nq``.

    Parameters
    ----------
    nq, nk : int
        Numbers of queries and keys; `nk` defaults to `nq`.
    left, right : int, optional
        Keys seen before and after the query's own position, both inclusive; None is unbounded.
        "A window of W tokens" in causal models is ``left=W - 1, right=0``.
    """
    nq, nk = _sizes(nq, nk)
    p = _positions(nq, nk)
    left = nk if left is None else min(_check.integer("left", left), nk)
    right = nq if right is None else min(_check.integer("right", right), nq)
    return Interval(nk, p - left, p + (right + 1))


def prefix(n: SupportsIndex, prefix_len: SupportsIndex, *, nk: SupportsIndex | None = None) -> Mask:
    """Prefix-LM: causal, and every query sees the first `prefix_len` keys."""
    nq, nk = _sizes(n, nk, "n")
    prefix_len = _check.integer("prefix_len", prefix_len, 0, nk)
    hi = np.maximum(_positions(nq, nk) + 1, prefix_len)
    return Interval(nk, np.zeros(nq, np.int32), hi)


def documents(
    lengths: ArrayLike, lengths_k: ArrayLike | None = None, *, causal: bool = False
) -> Mask:
    """Packed documents: a query attends only to keys of its own document.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each document; zero is allowed. Their sum is ``nq``.
    lengths_k : sequence of int, optional
        Keys of each document, when they differ from the queries.
    causal : bool
        Also causal inside each document, bottom-right aligned.
    """
    causal = _check.flag("causal", causal)
    lengths = _check.integers("lengths", lengths)
    lengths_k = lengths if lengths_k is None else _check.integers("lengths_k", lengths_k)
    if lengths_k.size != lengths.size:
        raise ValueError(
            f"lengths_k has {lengths_k.size} documents: must have {lengths.size} like lengths"
        )
    stop_k = np.cumsum(lengths_k)
    lo = np.repeat(stop_k - lengths_k, lengths)
    hi = np.repeat(stop_k, lengths)
    if causal:
        hi = hi - np.repeat(np.cumsum(lengths), lengths) + np.arange(lo.size) + 1
    return Interval(_check.integer("sum(lengths_k)", lengths_k.sum()), lo, np.maximum(hi, lo))


def documents_from_cu_seqlens(
    cu_seqlens: ArrayLike, cu_seqlens_k: ArrayLike | None = None, *, causal: bool = False
) -> Mask:
    """`documents` from cumulative lengths ``[0, l0, l0 + l1, ...]`` as varlen kernels take them."""
    lengths = _lengths("cu_seqlens", cu_seqlens)
    lengths_k = None if cu_seqlens_k is None else _lengths("cu_seqlens_k", cu_seqlens_k)
    return documents(lengths, lengths_k, causal=causal)


def _lengths(name, cumulative):
    array = _check.integers(name, cumulative)
    if not array.size or array[0] != 0:
        raise ValueError(f"{name} starts with {array[:1].tolist()}: must start with 0")
    steps = np.diff(array)
    if (steps < 0).any():
        at = int(np.flatnonzero(steps < 0)[0]) + 1
        raise ValueError(f"{name}[{at}]={array[at]}: must not be less than the entry before it")
    return steps


def padding(
    lengths: ArrayLike, nq: SupportsIndex, nk: SupportsIndex | None = None, *, causal: bool = False
) -> Mask:
    """Key padding: in batch entry ``b`` every query sees keys ``j < lengths[b]``.

    Parameters
    ----------
    lengths : sequence of int
    nq, nk : int
    causal : bool
        Of these keys only those up to the query's own. Where ``nq == nk`` query ``i`` is at key
        ``i``: all sequences begin at 0 and are padded at the end. Otherwise the queries are the
        last ``nq`` tokens of each entry: query ``i`` is at key ``lengths[b] - nq + i``.

    Returns
    -------
    Mask
        With ``batch == len(lengths)`` (for more than one entry).

    Notes
    -----
    In ``padding(lengths, nq, nk) & causal(nq, nk)`` the last query is aligned with key ``nk - 1``,
    not with the last key of each entry: use ``causal=True``.
    """
    from masks.planes import per_batch

    nq, nk = _sizes(nq, nk)
    lengths = _check.integers("lengths", lengths, 0, nk)
    if not lengths.size:
        raise ValueError("lengths is empty: must have one entry per batch entry")
    zeros, i = np.zeros(nq, np.int32), np.arange(nq)
    causal = _check.flag("causal", causal)

    def ends(length):
        own = i if nq == nk else length - nq + i
        return np.clip(own + 1, 0, length) if causal else np.full(nq, length)

    return per_batch([Interval(nk, zeros, ends(length)) for length in lengths])


def chunked(
    n: SupportsIndex, chunk: SupportsIndex, *, causal: bool = True, nk: SupportsIndex | None = None
) -> Mask:
    """Chunked attention: keys in the query's own chunk of positions, causal by default."""
    nq, nk = _sizes(n, nk, "n")
    chunk = _check.integer("chunk", chunk, 1)
    p = _positions(nq, nk)
    start = p // chunk * chunk
    hi = p + 1 if _check.flag("causal", causal) else start + chunk
    return Interval(nk, start, np.maximum(hi, 0))


def block_diagonal(n: SupportsIndex, block: SupportsIndex) -> Mask:
    """Groups of ``block`` consecutive tokens attend to each other; ``n * block`` cells if even."""
    block = _check.integer("block", block, 1)
    return chunked(n, block, causal=False)
