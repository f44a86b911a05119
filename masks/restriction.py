"""Some queries and some keys of a mask, in their order: the mask of a part of a sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import coo_array

from masks import _check
from masks.base import Mask
from masks.block import whole_blocks
from masks.interval import Interval
from masks.tiles import OPEN, Grid

# A restriction to at most so many cells names all of its tiles as live: to look at its cells takes
# less than the live tiles of the whole mask.
_FEW_CELLS = 1 << 20


class Restricted(Mask):
    """``restricted(i, j) == inner(q[i], kv[j])`` of a leaf whose restriction has no closed form.

    A tile that is a whole tile of `inner` is taken from there; others are classified by cells.
    """

    __slots__ = ("inner", "kv", "q")
    _fields = ("inner", "q", "kv")

    def __init__(self, inner, q, kv):
        super().__init__(q.size, kv.size)
        self.inner, self.q, self.kv = inner, q, kv
        q.setflags(write=False)
        kv.setflags(write=False)

    def _parts(self):
        return self.inner, self.q, self.kv

    def _at(self, q, kv):
        return self.inner._at(self.q[q], self.kv[kv])

    def _restricted(self, q, kv):
        return self.inner._restricted(self.q[q], self.kv[kv])

    def _grid(self, grid):
        return Grid(*self.inner.shape, grid.tile_m, grid.tile_n)

    def _whole(self, grid, rows, cols):
        """Which tiles are whole ones of `inner`, and the tile rows and columns of these."""
        nq, nk = self.inner.shape
        make_m = lambda: whole_blocks(self.q, grid.tile_m, nq)
        make_n = lambda: whole_blocks(self.kv, grid.tile_n, nk)
        row = self._cached(("rows", grid.tile_m), make_m)[rows]
        col = self._cached(("columns", grid.tile_n), make_n)[cols]
        whole = (row >= 0) & (col >= 0)
        return whole, row[whole], col[whole]

    def _live(self, grid):
        """Tiles with a row and a column of one live tile of `inner`; all tiles if cells are few."""
        if self.shape[0] * self.shape[1] <= _FEW_CELLS:
            return np.arange(grid.n_row * grid.n_col)
        inner = self._grid(grid)
        row, col = np.divmod(self.inner._live(inner), max(inner.n_col, 1))
        ones = np.ones(row.size, bool)
        live = coo_array((ones, (row, col)), shape=(inner.n_row, inner.n_col)).tocsr()
        above = _incidence(self.q, grid.tile_m, (grid.n_row, inner.n_row))
        beside = _incidence(self.kv, grid.tile_n, (grid.n_col, inner.n_col))
        found = (above @ live @ beside.T).tocoo()
        row, col = found.coords
        return np.sort(row.astype(np.int64) * grid.n_col + col)

    def _state(self, grid, rows, cols):
        state = np.full(rows.size, OPEN, np.int8)
        whole, *at = self._whole(grid, rows, cols)
        state[whole] = self.inner._state(self._grid(grid), *at)
        return state

    def _counts(self, grid, rows, cols):
        counts = np.full(rows.size, -1, np.int64)
        whole, *at = self._whole(grid, rows, cols)
        counts[whole] = self.inner._counts(self._grid(grid), *at)
        return counts

    def _patterns(self, grid, rows, cols):
        patterns = np.full(rows.size, -1, np.int64)
        whole, *at = self._whole(grid, rows, cols)
        patterns[whole] = self.inner._patterns(self._grid(grid), *at)
        return patterns

    def _cells(self, grid, rows, cols):
        whole, *at = self._whole(grid, rows, cols)
        if whole.all():
            return self.inner._cells(self._grid(grid), *at)
        return super()._cells(grid, rows, cols)


def _incidence(index, tile, shape):
    """Sparse bool: which tiles of all tokens have tokens in each tile of `index`."""
    key = np.unique(np.arange(index.size) // tile * np.int64(shape[1]) + index // tile)
    coords = np.divmod(key, max(shape[1], 1))
    return coo_array((np.ones(key.size, bool), coords), shape=shape).tocsr()


def restrict(mask: Mask, q_idx: ArrayLike | None = None, kv_idx: ArrayLike | None = None) -> Mask:
    """The mask of some of its queries and some of its keys, in their order.

    Parameters
    ----------
    mask : Mask
        Plain or multi-plane.
    q_idx, kv_idx : sequence of int, optional
        Queries and keys that stay, strictly increasing; None is all.

    Returns
    -------
    Mask
        Shape ``(len(q_idx), len(kv_idx))`` with ``restricted(i, j) == mask(q_idx[i], kv_idx[j])``.

    Notes
    -----
    Row intervals stay row intervals, and blocks stay blocks where whole ones are taken. Other masks
    are tiled as fast as before where whole tiles are taken; else all of their cells are evaluated.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {type(mask).__name__}: must be a Mask")
    q = _increasing("q_idx", q_idx, mask.shape[0])
    kv = _increasing("kv_idx", kv_idx, mask.shape[1])
    return mask if (q.size, kv.size) == mask.shape else mask._restricted(q, kv)


def restrict_past_the_end(mask: Mask, q_idx: ArrayLike, kv_idx: ArrayLike) -> Mask:
    """`restrict`, with keys behind the last one of the mask, to which nobody attends."""
    n, kv = mask.shape[1], np.asarray(kv_idx)
    inside = np.searchsorted(kv, n)
    if inside == kv.size:
        return restrict(mask, q_idx, kv)
    q = _increasing("q_idx", q_idx, mask.shape[0])
    attended = Interval(kv.size, *np.full((2, q.size), [[0], [inside]]))
    return mask._restricted(q, np.minimum(kv, n - 1)) & attended


def _increasing(name, values, n):
    if values is None:
        return np.arange(n)
    index = _check.integers(name, values, 0, n - 1)
    if (np.diff(index) <= 0).any():
        at = int(np.flatnonzero(np.diff(index) <= 0)[0]) + 1
        raise ValueError(f"{name}[{at}]={index[at]}: must be greater than the entry before it")
    return index.copy()
