"""Tiles of a mask: which exist, of which kind, and the bit tiles of the arbitrary ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

ABSENT, INTERVAL, FULL, BITS = 0, 1, 2, 3

#: Internal state of a tile before it is classified: its cells have to be looked at.
OPEN = 3

CELLS_PER_CHUNK = 1 << 18


@dataclass(frozen=True)
class Grid:
    """A ``(nq, nk)`` score matrix cut into ``tile_m x tile_n`` tiles, the last ones ragged."""

    nq: int
    nk: int
    tile_m: int
    tile_n: int

    @property
    def n_row(self):
        return -(-self.nq // self.tile_m)

    @property
    def n_col(self):
        return -(-self.nk // self.tile_n)

    @property
    def T(self):
        return Grid(self.nk, self.nq, self.tile_n, self.tile_m)

    @property
    def height(self):
        """Rows of a tile that can exist: a tile may be taller than the mask."""
        return min(self.tile_m, max(self.nq, 1))

    def columns(self, cols):
        """First and one-past-last existing column of each tile column."""
        start = cols * self.tile_n
        return start, np.minimum(start + self.tile_n, self.nk)

    def rows(self, rows):
        """First and one-past-last existing row of each tile row."""
        start = rows * self.tile_m
        return start, np.minimum(start + self.tile_m, self.nq)

    def area(self, rows, cols):
        """Existing cells of each tile, int64."""
        q0, q1 = self.rows(rows)
        k0, k1 = self.columns(cols)
        return (q1 - q0) * (k1 - k0)

    def indices(self, rows, cols):
        """Query and key indices of every cell, ``(t, tile_m, 1)`` and ``(t, 1, tile_n)``.

        Cells past the edge repeat the last existing row or column.
        """
        q = rows[:, None, None] * self.tile_m + np.arange(self.tile_m)[:, None]
        kv = cols[:, None, None] * self.tile_n + np.arange(self.tile_n)
        return np.minimum(q, self.nq - 1), np.minimum(kv, self.nk - 1)

    def existing(self, rows, cols):
        """Boolean ``(t, tile_m, tile_n)``: the cells that lie inside the mask."""
        q = rows[:, None, None] * self.tile_m + np.arange(self.tile_m)[:, None]
        kv = cols[:, None, None] * self.tile_n + np.arange(self.tile_n)
        return (q < self.nq) & (kv < self.nk)

    def row_bounds(self, lo, hi, rows, cols):
        """Interval of each row clipped to its tile, ``(t, height)`` each; empty ones are (0, 0).

        Rows past the edge repeat the last existing row.
        """
        q = np.minimum(rows[:, None] * self.tile_m + np.arange(self.height), self.nq - 1)
        # As lo and hi: mixed integers are computed in 64 bits.
        start, stop = (bound[:, None].astype(np.int32) for bound in self.columns(cols))
        lo, hi = np.maximum(lo[q], start), np.minimum(hi[q], stop)
        live = lo < hi
        return lo * live, hi * live

    def chunks(self, count, cells):
        """Slices of ``range(count)`` that keep `cells` per tile within a fixed budget."""
        step = max(1, CELLS_PER_CHUNK // cells)
        return (slice(start, start + step) for start in range(0, count, step))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Classified tiles of one plain mask.

    Attributes
    ----------
    shape : (int, int)
        ``(nq, nk)``.
    tile_m, tile_n : int
        Tile size along queries and keys.
    kinds : scipy.sparse.csr_array
        int32 ``(ceil(nq / tile_m), ceil(nk / tile_n))``, canonical. Stored values are INTERVAL,
        FULL or ``BITS + t``; an absent tile is not stored.
    lo, hi : ndarray
        int32 ``(nq,)``: in an INTERVAL tile row ``q`` sees ``lo[q] <= kv < hi[q]``.
    bits : ndarray
        uint32 ``(n_bits, tile_m, ceil(tile_n / 32))``: distinct bit tiles; column ``c`` of row
        ``r`` is bit ``c % 32`` of word ``c // 32``. Cells outside the mask are 0.
    """

    shape: tuple[int, int]
    tile_m: int
    tile_n: int
    kinds: csr_array
    lo: np.ndarray
    hi: np.ndarray
    bits: np.ndarray

    @property
    def grid(self) -> Grid:
        return Grid(*self.shape, self.tile_m, self.tile_n)

    def coordinates(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tile row and tile column of every stored tile, int64, row by row."""
        rows = np.repeat(np.arange(self.kinds.shape[0]), np.diff(self.kinds.indptr))
        return rows, self.kinds.indices.astype(np.int64)

    def counts(self) -> dict[str, int]:
        """Number of stored tiles by kind: ``{"interval": ..., "full": ..., "bits": ...}``."""
        kind = self.kinds.data
        return {
            "interval": int(np.count_nonzero(kind == INTERVAL)),
            "full": int(np.count_nonzero(kind == FULL)),
            "bits": int(np.count_nonzero(kind >= BITS)),
        }

    def cells(self, at: Any) -> NDArray[np.bool_]:
        """Boolean ``(len(at), tile_m, tile_n)`` cells of the stored tiles numbered `at`."""
        rows, cols = (axis[at] for axis in self.coordinates())
        kind, grid = self.kinds.data[at], self.grid
        cells = grid.existing(rows, cols)
        inside = kind == INTERVAL
        cells[inside] &= interval_cells(grid, self.lo, self.hi, rows[inside], cols[inside])
        bit = kind >= BITS
        cells[bit] = self.bit_cells()[kind[bit] - BITS]
        return cells

    def bit_cells(self) -> NDArray[np.bool_]:
        """The distinct bit tiles unpacked to boolean ``(n_bits, tile_m, tile_n)``."""
        raw = np.ascontiguousarray(self.bits).astype("<u4").view(np.uint8)
        if not len(self.bits):
            return np.zeros((0, self.tile_m, self.tile_n), bool)
        bits = np.unpackbits(raw, axis=-1, bitorder="little")
        return bits[..., : self.tile_n].astype(bool)

    def dense(self) -> NDArray[np.bool_]:
        """Rebuild the boolean ``(nq, nk)`` mask from the tiles alone."""
        grid = self.grid
        tiled = np.zeros((grid.n_row, grid.n_col, self.tile_m, self.tile_n), bool)
        rows, cols = self.coordinates()
        tiled[rows, cols] = self.cells(np.arange(rows.size))
        dense = tiled.swapaxes(1, 2).reshape(grid.n_row * self.tile_m, grid.n_col * self.tile_n)
        return dense[: self.shape[0], : self.shape[1]]

    def tile_counts(self) -> NDArray[np.int64]:
        """Attended cells of every stored tile, int64 ``(nnz,)``, without visiting its cells."""
        rows, cols = self.coordinates()
        kind, grid = self.kinds.data, self.grid
        counts = grid.area(rows, cols)
        inside = kind == INTERVAL
        counts[inside] = interval_counts(grid, self.lo, self.hi, rows[inside], cols[inside])
        bit = kind >= BITS
        counts[bit] = self.bit_cells().sum((1, 2))[kind[bit] - BITS]
        return counts

    def count_nonzero(self) -> int:
        """Number of attended cells."""
        return int(self.tile_counts().sum())


def interval_cells(grid, lo, hi, rows, cols):
    """Boolean ``(t, tile_m, tile_n)``: cells inside the row intervals."""
    q, kv = grid.indices(rows, cols)
    kv = kv.astype(np.int32)  # as lo and hi: comparing mixed integers is three times slower
    return (lo[q] <= kv) & (kv < hi[q])


def interval_counts(grid, lo, hi, rows, cols):
    """Existing cells inside the row intervals of each tile, int64."""
    counts = np.empty(rows.size, np.int64)
    for chunk in grid.chunks(rows.size, grid.height):
        first, last = grid.row_bounds(lo, hi, rows[chunk], cols[chunk])
        q = rows[chunk, None] * grid.tile_m + np.arange(grid.height)
        counts[chunk] = ((last - first) * (q < grid.nq)).sum(1)
    return counts


def interval_state(grid, lo, hi, rows, cols):
    """ABSENT, INTERVAL or FULL (every existing cell) of row intervals in each tile, int8."""
    state = np.empty(rows.size, np.int8)
    for chunk in grid.chunks(rows.size, grid.height):
        first, last = grid.row_bounds(lo, hi, rows[chunk], cols[chunk])
        start, stop = grid.columns(cols[chunk])
        width = last - first
        full = (width == (stop - start)[:, None]).all(1)
        state[chunk] = np.where(full, FULL, np.where(width.any(1), INTERVAL, ABSENT))
    return state


#: One of so many tiles, at most, may be known by its cells alone where tiles are estimated.
_UNKNOWN = 8


def live_and_full(mask, tile_m, tile_n):
    """See `Mask.live_tiles`."""
    grid = Grid(*mask.shape, tile_m, tile_n)
    live = mask._live(grid)
    rows, cols = np.divmod(live, max(grid.n_col, 1))
    counts = mask._counts(grid, rows, cols)
    if np.count_nonzero(counts < 0) * _UNKNOWN > counts.size:
        kinds = mask.tiles(tile_m, tile_n).kinds.data
        return kinds.size, int(np.count_nonzero(kinds == FULL))
    whole = cols * tile_n + tile_n <= grid.nk
    full = (counts == grid.area(rows, cols)) & whole
    return int(np.count_nonzero(counts)), int(np.count_nonzero(full))


def build(mask, tile_m, tile_n):
    """Classify the tiles of a plain mask exactly; cost O(live tiles)."""
    grid = Grid(*mask.shape, tile_m, tile_n)
    live = mask._live(grid)
    rows, cols = np.divmod(live, max(grid.n_col, 1))
    state = mask._state(grid, rows, cols)
    kept = state != ABSENT
    rows, cols, kinds = rows[kept], cols[kept], state[kept].astype(np.int32)

    hint = mask._hint()
    lo, hi = hint if hint is not None else trivial_hint(*mask.shape)
    ragged = (kinds == FULL) & (cols * tile_n + tile_n > grid.nk)
    kinds[ragged] = OPEN
    pool = _BitPool(grid)
    undecided = np.flatnonzero(kinds == OPEN)
    looked_at, alike = _representatives(mask, grid, lo, hi, rows[undecided], cols[undecided])
    looked_at = undecided[looked_at]
    for chunk in grid.chunks(looked_at.size, tile_m * tile_n):
        at = looked_at[chunk]
        kinds[at] = pool.classify(mask, lo, hi, rows[at], cols[at])
    kinds[undecided] = kinds[undecided[alike]]

    kept = kinds != ABSENT
    rows, cols, kinds = rows[kept], cols[kept], kinds[kept]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=grid.n_row))])
    index = np.int32 if max(rows.size, grid.n_col) <= np.iinfo(np.int32).max else np.int64
    csr = csr_array(
        (kinds, cols.astype(index), indptr.astype(index)), shape=(grid.n_row, grid.n_col)
    )
    csr.has_canonical_format = True
    lo, hi = (np.ascontiguousarray(bound, np.int32) for bound in (lo, hi))
    arrays = (csr.data, csr.indices, csr.indptr, lo, hi, bits := pool.packed())
    for array in arrays:
        array.setflags(write=False)
    return Tiles(mask.shape, tile_m, tile_n, csr, lo, hi, bits)


def _representatives(mask, grid, lo, hi, rows, cols):
    """Tiles of which no earlier one is known to have the same cells, and for each tile that one."""
    alike = np.arange(rows.size)
    patterns = mask._patterns(grid, rows, cols)
    known = np.flatnonzero(patterns >= 0)
    if mask._hint() is not None:
        known = known[interval_state(grid, lo, hi, rows[known], cols[known]) == FULL]
    if not known.size:
        return alike, alike
    ragged_row = rows[known] * grid.tile_m + grid.tile_m > grid.nq
    ragged_col = cols[known] * grid.tile_n + grid.tile_n > grid.nk
    edges = 2 * ragged_row + ragged_col
    _, first, number = np.unique(
        4 * patterns[known] + edges, return_index=True, return_inverse=True
    )
    alike[known] = known[first[number]]
    return np.unique(alike), alike


def trivial_hint(nq, nk):
    """The interval of every existing column, as read-only int32 views of one element."""
    return np.broadcast_to(np.int32(0), nq), np.broadcast_to(np.int32(nk), nq)


class _BitPool:
    """Distinct bit tiles in order of first appearance."""

    def __init__(self, grid):
        self.grid = grid
        self.words = -(-grid.tile_n // 32)
        self.number = {}

    def classify(self, mask, lo, hi, rows, cols):
        """Kind of each tile from its cells: ABSENT, INTERVAL, FULL or BITS + t."""
        grid = self.grid
        existing = grid.existing(rows, cols)
        cells = mask._cells(grid, rows, cols) & existing
        as_interval = interval_cells(grid, lo, hi, rows, cols) & existing
        kinds = np.full(rows.size, BITS, np.int32)
        kinds[(cells == as_interval).all((1, 2))] = INTERVAL
        whole = cols * grid.tile_n + grid.tile_n <= grid.nk
        kinds[whole & (cells == existing).all((1, 2))] = FULL
        kinds[~cells.any((1, 2))] = ABSENT
        for t in np.flatnonzero(kinds == BITS):
            kinds[t] += self._add(cells[t])
        return kinds

    def _add(self, cells):
        padded = np.zeros((self.grid.tile_m, self.words * 32), bool)
        padded[:, : self.grid.tile_n] = cells
        packed = np.packbits(padded, axis=1, bitorder="little").tobytes()
        return self.number.setdefault(packed, len(self.number))

    def packed(self):
        shape = (len(self.number), self.grid.tile_m, self.words)
        return np.frombuffer(b"".join(self.number), "<u4").reshape(shape).astype(np.uint32)
