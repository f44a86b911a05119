"""Token-exact leaves: diagonals, columns, a Python predicate, packed bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from masks import _check
from masks.base import Mask
from masks.functions import snapshot
from masks.interval import ranges, unique_sorted
from masks.tiles import ABSENT, FULL, OPEN


class Diagonals(Mask):
    """Query ``q`` attends to ``kv`` iff ``q + nk - nq - kv`` is one of the sorted `offsets`."""

    __slots__ = ("offsets",)
    _fields = ("nq", "nk", "offsets")

    def __init__(self, nq, nk, offsets):
        super().__init__(nq, nk)
        self.offsets = np.array(offsets, np.int64)
        self.offsets.setflags(write=False)

    def _parts(self):
        return (self.offsets,)

    def _table(self):
        """Boolean ``(nq + nk,)``: whether ``index - nq`` is an attended offset."""
        nq, nk = self.shape
        table = np.zeros(nq + nk, bool)
        index = self.offsets + nq
        table[index[(index >= 0) & (index < table.size)]] = True
        return table

    def _at(self, q, kv):
        return self._cached("table", self._table)[q - kv + self.shape[1]]

    def _cells(self, grid, rows, cols):
        """A tile is a Toeplitz matrix: a window of the table read with strides (1, -1)."""
        margin = grid.tile_n, grid.tile_m
        table = self._cached(("table", *margin), lambda: np.pad(self._table(), margin))
        corner = rows * grid.tile_m - cols * grid.tile_n + self.shape[1] + grid.tile_n
        shape = (table.size, grid.tile_m, grid.tile_n)
        return np.lib.stride_tricks.as_strided(table, shape, (1, 1, -1), writeable=False)[corner]

    def _runs(self, tile_n):
        """First and last of every run of offsets at most a tile apart."""
        cut = np.flatnonzero(np.diff(self.offsets) > tile_n) + 1
        last = np.append(cut - 1, self.offsets.size - 1)
        return self.offsets[np.insert(cut, 0, 0)], self.offsets[last]

    def _size(self, grid):
        if not self.offsets.size:
            return 0
        smallest, largest = self._runs(grid.tile_n)
        in_row = int(((largest - smallest + grid.tile_m) // grid.tile_n + 2).sum())
        return grid.n_row * min(in_row, grid.n_col)

    def _live(self, grid):
        """Runs of offsets, shifted along the tile rows."""
        if not self.offsets.size:
            return np.zeros(0, np.int64)
        smallest, largest = self._runs(grid.tile_n)
        rows = np.arange(grid.n_row)[:, None]
        q0, q1 = grid.rows(rows)
        shift = grid.nk - grid.nq
        first = np.clip(q0 + shift - largest, 0, grid.nk) // grid.tile_n
        last = np.clip(q1 + shift - smallest, 0, grid.nk)
        length = np.maximum(-(-last // grid.tile_n) - first, 0)
        return unique_sorted(ranges((rows * grid.n_col + first).ravel(), length.ravel()))

    def _state(self, grid, rows, cols):
        q0, q1 = grid.rows(rows)
        k0, k1 = grid.columns(cols)
        shift = grid.nk - grid.nq
        low, high = q0 + shift - k1 + 1, q1 + shift - k0
        count = np.searchsorted(self.offsets, high) - np.searchsorted(self.offsets, low)
        return _by_count(count, high - low)

    def _counts(self, grid, rows, cols):
        """Second differences of S(x) = Σ max(x + 1 - offset, 0): a row has as many cells as there
        are offsets in its range of the tile, and the ranges of its rows follow each other.
        """
        before = np.concatenate([[0], np.cumsum(self.offsets)])

        def upto(x):
            count = np.searchsorted(self.offsets, x, side="right")
            return count * (x + 1) - before[count]

        q0, q1 = grid.rows(rows)
        k0, k1 = grid.columns(cols)
        last, first = q1 - 1 + grid.nk - grid.nq, q0 - 1 + grid.nk - grid.nq
        return upto(last - k0) - upto(first - k0) - upto(last - k1) + upto(first - k1)

    def _transposed(self):
        nq, nk = self.shape
        return Diagonals(nk, nq, -self.offsets[::-1])

    def _join(self, other):
        return Diagonals(*self.shape, np.union1d(self.offsets, other.offsets))

    def _meet(self, other):
        return Diagonals(*self.shape, np.intersect1d(self.offsets, other.offsets))


class Columns(Mask):
    """Every query attends to the keys where the boolean `chosen` ``(nk,)`` is True."""

    __slots__ = ("chosen",)
    _fields = ("nq", "chosen")

    def __init__(self, nq, chosen):
        super().__init__(nq, chosen.size)
        self.chosen = np.array(chosen, bool)
        self.chosen.setflags(write=False)

    def _parts(self):
        return (self.chosen,)

    def _at(self, q, kv):
        return np.broadcast_to(self.chosen[kv], np.broadcast_shapes(q.shape, kv.shape))

    def _in_columns(self, grid):
        """Attended keys of each tile column."""
        start = np.arange(0, grid.nk, grid.tile_n)
        count = lambda: np.add.reduceat(self.chosen, start, dtype=np.int64)
        return self._cached(("columns", grid.tile_n), count)

    def _live(self, grid):
        if not (grid.n_row and grid.n_col):
            return np.zeros(0, np.int64)
        cols = np.flatnonzero(self._in_columns(grid))
        return (np.arange(grid.n_row)[:, None] * grid.n_col + cols).ravel()

    def _size(self, grid):
        return grid.n_row * np.count_nonzero(self._in_columns(grid)) if grid.n_col else 0

    def _state(self, grid, rows, cols):
        if not rows.size:
            return np.zeros(0, np.int8)
        start, stop = grid.columns(cols)
        return _by_count(self._in_columns(grid)[cols], stop - start)

    def _counts(self, grid, rows, cols):
        if not rows.size:
            return np.zeros(0, np.int64)
        start, stop = grid.rows(rows)
        return self._in_columns(grid)[cols] * (stop - start)

    def _complement(self):
        return Columns(self.shape[0], ~self.chosen)

    def _restricted(self, q, kv):
        return Columns(q.size, self.chosen[kv])


def _by_count(count, total):
    return np.where(count == 0, ABSENT, np.where(count == total, FULL, OPEN)).astype(np.int8)


class _Opaque(Mask):
    """A leaf without closed form: every tile has to be looked at."""

    __slots__ = ()

    def _live(self, grid):
        return np.arange(grid.n_row * grid.n_col)

    def _size(self, grid):
        return grid.n_row * grid.n_col

    def _state(self, grid, rows, cols):
        return np.full(rows.size, OPEN, np.int8)


class Predicate(_Opaque):
    """A Python function of ``(q, kv)`` as it was when the mask was made."""

    __slots__ = ("_call", "_key_of_fn", "fn")
    _fields = ("fn", "nq", "nk")

    def __init__(self, fn, nq, nk):
        super().__init__(nq, nk)
        self.fn = fn  # for pickles, which hold its name
        self._call, self._key_of_fn = snapshot(fn)

    def _parts(self):
        return (self._key_of_fn,)

    def _at(self, q, kv):
        result = np.asarray(self._call(q, kv))
        if result.dtype != bool:
            raise TypeError(f"fn returned dtype {result.dtype}: must be bool")
        try:
            return np.broadcast_to(result, np.broadcast_shapes(q.shape, kv.shape))
        except ValueError:
            expected = np.broadcast_shapes(q.shape, kv.shape)
            raise ValueError(f"fn returned shape {result.shape}: must be {expected}") from None


class Bitmap(_Opaque):
    """A stored boolean matrix, one bit per cell (``np.packbits`` along keys)."""

    __slots__ = ("packed",)
    _fields = ("nq", "nk", "packed")

    def __init__(self, nq, nk, packed):
        super().__init__(nq, nk)
        self.packed = packed
        self.packed.setflags(write=False)

    def _parts(self):
        return (self.packed,)

    def _at(self, q, kv):
        return (self.packed[q, kv >> 3] >> (7 - (kv & 7)).astype(np.uint8) & 1).astype(bool)


def from_function(
    fn: Callable[[Any, Any], Any], nq: SupportsIndex, nk: SupportsIndex | None = None
) -> Mask:
    """Mask from a vectorised predicate.

    Parameters
    ----------
    fn : callable
        ``fn(q_idx, kv_idx)`` on broadcasting int64 arrays returns a bool array. It must be pure.
    nq, nk : int
        Numbers of queries and keys; `nk` defaults to `nq`.

    Notes
    -----
    The function is taken as it is now: with copies of its defaults and attributes, of the variables
    of enclosing functions and of the globals that it reads. What these become later does not change
    the mask; make another one. Two masks are equal, and share a plan, where code and copies are,
    also of lambdas made anew in every step.

    Copied are numbers, strings, plain arrays, functions and collections of them, and numbers and
    strings that are read of a module by their names, ``config.width``. Masks are constants, and
    what is read of NumPy, SciPy and Python's ``math``, ``operator``, ``functools``, ``itertools``
    and ``bisect`` (``scipy.special.erf``; by its name alone it is not known as SciPy's).
    A mask whose function reads anything else is equal to itself only, and what becomes of that may
    change it: an attribute of an object or a class (``self.width``, ``Config.width``), an array, a
    function or a submodule of a module (``config.table[q]``), an import inside the function,
    ``eval`` and ``globals``. Keep the mask, or let the function read a local variable.

    Tiling evaluates every cell, O(nq * nk) time in bounded memory, unless the mask is intersected
    with a sparse one: then only that one's tiles are evaluated.
    """
    if not callable(fn):
        raise TypeError(f"fn is {type(fn).__name__}: must be callable")
    _check_arguments(fn)
    nq = _check.integer("nq", nq)
    mask = Predicate(fn, nq, nq if nk is None else _check.integer("nk", nk))
    if all(mask.shape):
        mask._at(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64))
    return mask


def _check_arguments(fn):
    try:
        inspect.signature(fn).bind(None, None)
    except ValueError:  # some functions in C have no signature
        pass
    except TypeError as error:
        raise TypeError(
            f"fn must take (q_idx, kv_idx), {error}; masks that differ between heads or batch "
            f"entries are joined by masks.per_head and masks.per_batch"
        ) from error


def from_dense(array: ArrayLike) -> Mask:
    """Mask from a boolean array ``(nq, nk)`` or ``(batch, heads, nq, nk)`` (1 broadcasts)."""
    array = _check.array_of("array", array)
    if array.dtype != bool:
        raise TypeError(f"array has dtype {array.dtype}: must be bool")
    if array.ndim not in (2, 4):
        raise ValueError(f"array has {array.ndim} dimensions: must have 2 or 4")
    if array.ndim == 2:
        return Bitmap(*array.shape, np.packbits(array, axis=1))
    from masks.planes import per_batch, per_head

    if 0 in array.shape[:2]:
        raise ValueError(f"array.shape={array.shape}: batch and heads must be at least 1")
    return per_batch([per_head([from_dense(m) for m in entry]) for entry in array])
