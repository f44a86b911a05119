"""Block-sparse masks: a SciPy CSR pattern of fixed-size blocks, re-tiled to any tile size."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from scipy.sparse import coo_array, csr_array, issparse

from masks import _check
from masks.base import Mask
from masks.interval import ranges, sums, unique_sorted
from masks.tiles import ABSENT, FULL, OPEN


class BlockSparse(Mask):
    """Query ``q`` attends to key ``kv`` iff block ``(q // block_m, kv // block_n)`` is stored.

    Parameters
    ----------
    nq, nk : int
        Tokens; the last blocks may be ragged.
    block : (int, int)
        Block size along queries and keys.
    rows, cols : ndarray of int
        Coordinates of the blocks, in any order; duplicates count once.
    """

    __slots__ = ("block", "cols", "rows")
    _fields = ("nq", "nk", "block", "rows", "cols")

    def __init__(self, nq, nk, block, rows, cols):
        super().__init__(nq, nk)
        self.block = block
        key = unique_sorted(np.asarray(rows, np.int64) * self.grid_shape[1] + cols)
        rows, cols = np.divmod(key, max(self.grid_shape[1], 1))
        self.rows, self.cols = rows.astype(np.int32), cols.astype(np.int32)
        self.rows.setflags(write=False)
        self.cols.setflags(write=False)

    @property
    def grid_shape(self):
        """Numbers of block rows and block columns."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    def _parts(self):
        return self.block, self.rows, self.cols

    def __repr__(self):
        size = "x".join(map(str, self.block))
        return f"{super().__repr__()[:-1]}, {self.rows.size} blocks of {size}>"

    def _has(self, rows, cols):
        """Whether blocks are stored, for broadcasting block coordinates."""
        n_col = self.grid_shape[1]
        keys = self._cached("keys", lambda: self.rows.astype(np.int64) * n_col + self.cols)
        return isin_sorted(keys, rows * n_col + cols)

    def _at(self, q, kv):
        return self._has(q // self.block[0], kv // self.block[1])

    def _cells(self, grid, rows, cols):
        """Look up each block that a tile overlaps once and spread it over its cells."""
        q = rows[:, None] * grid.tile_m + np.arange(grid.tile_m)
        kv = cols[:, None] * grid.tile_n + np.arange(grid.tile_n)
        block_q, block_k = q // self.block[0], kv // self.block[1]
        first_q, first_k = block_q[:, :1], block_k[:, :1]
        span_q = np.arange(int((block_q - first_q).max(initial=0)) + 1)
        span_k = np.arange(int((block_k - first_k).max(initial=0)) + 1)
        inside_q = np.minimum(first_q + span_q, self.grid_shape[0] - 1)
        inside_k = np.minimum(first_k + span_k, self.grid_shape[1] - 1)
        stored = self._has(inside_q[:, :, None], inside_k[:, None, :])
        t = np.arange(rows.size)[:, None, None]
        return stored[t, (block_q - first_q)[:, :, None], (block_k - first_k)[:, None, :]]

    def _retiled(self, grid):
        """Linear index and number of attended cells of every live tile."""

        def make():
            tile = grid.tile_m, grid.tile_n
            if all(t % b == 0 or b % t == 0 for t, b in zip(tile, self.block, strict=True)):
                return self._retiled_by_blocks(grid)
            above, row = _overlap(self.rows, self.block[0], grid.nq, grid.tile_m)
            beside, col = _overlap(self.cols, self.block[1], grid.nk, grid.tile_n)
            shape = above.shape[0], beside.shape[0]
            blocks = coo_array((np.ones(row.size, np.int64), (row, col)), shape=shape)
            counts = (above.T @ csr_array(blocks) @ beside).tocsr()
            counts.sort_indices()
            row = np.repeat(np.arange(grid.n_row), np.diff(counts.indptr))
            return row * grid.n_col + counts.indices, counts.data

        return self._cached(("retiled", grid.tile_m, grid.tile_n), make)

    def _retiled_by_blocks(self, grid):
        """`_retiled` where tiles are a whole number of blocks, or blocks of tiles, on both axes."""
        row, height = _parts_of_tiles(self.rows, self.block[0], grid.nq, grid.tile_m)
        col, width = _parts_of_tiles(self.cols, self.block[1], grid.nk, grid.tile_n)
        key = (row[:, :, None] * grid.n_col + col[:, None, :]).ravel()
        cells = (height[:, :, None] * width[:, None, :]).ravel()
        size = grid.n_row * grid.n_col
        if size > 8 * key.size + _SMALL_GRID:
            live, counts = sums(key[cells > 0], cells[cells > 0])
            return live, counts.astype(np.int64)
        # Parts behind the end have no cells, and keys that may be too large.
        counts = np.bincount(key, cells, size)[:size].astype(np.int64)
        live = np.flatnonzero(counts)
        return live, counts[live]

    def _live(self, grid):
        return self._retiled(grid)[0]

    def _size(self, grid):
        tiles_m = _most_overlapped(self.block[0], grid.tile_m)
        tiles_n = _most_overlapped(self.block[1], grid.tile_n)
        return min(self.rows.size * tiles_m * tiles_n, grid.n_row * grid.n_col)

    def _counts(self, grid, rows, cols):
        """Of few small tiles from the blocks that each overlaps, of others from all blocks."""
        count_q = _most_overlapped(grid.tile_m, self.block[0])
        count_k = _most_overlapped(grid.tile_n, self.block[1])
        known = ("retiled", grid.tile_m, grid.tile_n) in self._memo
        if not known and rows.size * count_q * count_k <= 4 * self.rows.size:
            block_q, shared_q = _blocks_within(grid.rows(rows), self.block[0], count_q)
            block_k, shared_k = _blocks_within(grid.columns(cols), self.block[1], count_k)
            stored = self._has(block_q[:, :, None], block_k[:, None, :])
            return np.einsum("tq,tqk,tk->t", shared_q, stored, shared_k)
        live, counts = self._retiled(grid)
        return values_of(rows * grid.n_col + cols, live, counts)

    def _state(self, grid, rows, cols):
        counts = self._counts(grid, rows, cols)
        full = counts == grid.area(rows, cols)
        return np.where(counts == 0, ABSENT, np.where(full, FULL, OPEN)).astype(np.int8)

    def _patterns(self, grid, rows, cols):
        """Where a tile begins in its first block, and which of the blocks that it overlaps are."""
        inside_q, inside_k, first_q, first_k = _blocks_under(self, grid, rows, cols)
        spans = inside_q.shape[1] * inside_k.shape[1]
        if spans > _MOST_BLOCKS:
            return super()._patterns(grid, rows, cols)
        stored = self._has(inside_q[:, :, None], inside_k[:, None, :]).reshape(rows.size, spans)
        number = stored @ (1 << np.arange(spans))
        of_tile = first_q % self.block[0] * self.block[1] + first_k % self.block[1]
        offsets, of_tile = np.unique(of_tile, return_inverse=True)
        return number * offsets.size + of_tile

    def _join(self, other):
        if self.block != other.block:
            return None
        rows = np.concatenate([self.rows, other.rows])
        cols = np.concatenate([self.cols, other.cols])
        return BlockSparse(*self.shape, self.block, rows, cols)

    def _meet(self, other):
        if self.block != other.block:
            return None
        both = other._has(self.rows.astype(np.int64), self.cols)
        return BlockSparse(*self.shape, self.block, self.rows[both], self.cols[both])

    def _transposed(self):
        return BlockSparse(*self.shape[::-1], self.block[::-1], self.cols, self.rows)

    def _restricted(self, q, kv):
        """Blocks again where whole ones are taken, each once."""
        taken = [
            whole_blocks(index, block, n)
            for index, block, n in zip((q, kv), self.block, self.shape, strict=True)
        ]
        if any((np.diff(of_axis, prepend=-1) <= 0).any() for of_axis in taken):
            return super()._restricted(q, kv)
        at = []
        for blocks, own, count in zip(taken, (self.rows, self.cols), self.grid_shape, strict=True):
            position = np.full(count, -1)
            position[blocks] = np.arange(blocks.size)
            at.append(position[own])
        kept = (at[0] >= 0) & (at[1] >= 0)
        return BlockSparse(q.size, kv.size, self.block, *(index[kept] for index in at))


def isin_sorted(sorted_keys, values):
    """Whether each value is among the keys, which are sorted."""
    return values_of(values, sorted_keys, np.broadcast_to(True, sorted_keys.shape))


def values_of(wanted, sorted_keys, values):
    """The value of each wanted key; 0 of one that is not among the keys."""
    if not sorted_keys.size:
        return np.zeros(np.shape(wanted), values.dtype)
    at = np.minimum(np.searchsorted(sorted_keys, wanted), sorted_keys.size - 1)
    return values[at] * (sorted_keys[at] == wanted)


def whole_blocks(index, block, n):
    """Of every run of `block` increasing indices below `n`: the block that it is, or -1."""
    if not index.size:
        return np.zeros(0, np.int64)
    first = index[::block]
    length = np.minimum(block, index.size - np.arange(0, index.size, block))
    last = index[np.arange(0, index.size, block) + length - 1]
    whole = (first % block == 0) & (last - first == np.minimum(block, n - first) - 1)
    return np.where(whole & (last - first == length - 1), first // block, -1)


def _most_overlapped(length, other):
    """Most runs of `other` tokens that one of `length` overlaps; both begin at their multiples."""
    if other % length == 0:
        return 1
    return length // other if length % other == 0 else (length + other - 2) // other + 1


def _blocks_within(bounds, block, count):
    """Per tile with these bounds `count` blocks from its first on, and the tokens they share."""
    start, stop = (bound[:, None] for bound in bounds)
    blocks = start // block + np.arange(count)
    shared = np.minimum(stop, (blocks + 1) * block) - np.maximum(start, blocks * block)
    return np.where(shared > 0, blocks, 0), np.maximum(shared, 0)


# Under a tile: so many bits are a pattern.
_MOST_BLOCKS = 24


def _blocks_under(mask, grid, rows, cols):
    """Block rows and columns that tiles overlap, as many for all, and first query and key of each.

    Blocks past those that a tile overlaps are what the next tokens would be in, or the last ones.
    """
    found = []
    for tile, size, block, last in (
        (rows, grid.tile_m, mask.block[0], mask.grid_shape[0] - 1),
        (cols, grid.tile_n, mask.block[1], mask.grid_shape[1] - 1),
    ):
        first = tile * size
        span = int(((first + size - 1) // block - first // block).max(initial=0)) + 1
        found.append((np.minimum(first[:, None] // block + np.arange(span), last), first))
    (inside_q, first_q), (inside_k, first_k) = found
    return inside_q, inside_k, first_q, first_k


# Tiles of a grid that is counted as a whole, however few blocks there are.
_SMALL_GRID = 1 << 14


def _parts_of_tiles(blocks, block, n, tile):
    """Tiles of an axis that each block overlaps, (blocks, k), and tokens of it in each, maybe 0."""
    count = -(-n // block)
    if blocks.size > count:
        parts, shared = _parts_of_tiles(np.arange(count), block, n, tile)
        return parts[blocks], shared[blocks]
    start = blocks.astype(np.int64) * block
    stop = np.minimum(start + block, n)
    parts = start[:, None] + tile * np.arange(max(1, block // tile))
    shared = np.maximum(np.minimum(parts + tile, stop[:, None]) - parts, 0)
    return parts // tile, shared.astype(float)  # which bincount takes as they are


def _overlap(blocks, block, n, tile):
    """CSR (blocks, tiles): tokens that each distinct block of an axis shares with each tile.

    And which of the distinct blocks each one is. What no block stands for takes no memory.
    """
    blocks, which = np.unique(blocks, return_inverse=True)
    start = blocks.astype(np.int64) * block
    stop = np.minimum(start + block, n)
    first = start // tile
    length = (stop - 1) // tile + 1 - first
    row, col = np.repeat(np.arange(blocks.size), length), ranges(first, length)
    shared = np.minimum(stop[row], (col + 1) * tile) - np.maximum(start[row], col * tile)
    return csr_array(coo_array((shared, (row, col)), shape=(blocks.size, -(-n // tile)))), which


def from_scipy(
    matrix: Any,
    block: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None = None,
    *,
    shape: tuple[SupportsIndex, SupportsIndex] | None = None,
) -> Mask:
    """Mask from a sparse matrix whose stored non-zero entries are attended blocks.

    Parameters
    ----------
    matrix : scipy.sparse array
        CSR, CSC, COO, DIA, ...: one entry per block. BSR: one stored block per mask block; its
        values must be all non-zero or all zero. Entries in any order, but no two of the same
        place: ``sum_duplicates()`` adds them up. Explicit zeros are absent.
    block : int or (int, int), optional
        Tokens per block along queries and keys. Default 1 (token-exact); for BSR its blocksize.
    shape : (int, int), optional
        ``(nq, nk)`` when the last blocks are ragged; default ``matrix.shape * block``.
    """
    if not issparse(matrix):
        raise TypeError(f"matrix is {type(matrix).__name__}: must be a scipy.sparse array")
    if matrix.dtype.kind not in "biuf":
        raise TypeError(f"matrix has dtype {matrix.dtype}: must be bool or a real number")
    if matrix.ndim != 2:
        raise ValueError(f"matrix has shape {matrix.shape}: must have 2 dimensions")
    if matrix.format == "bsr":
        block = _check.sizes("block", matrix.blocksize if block is None else block)
        if block != matrix.blocksize:
            raise ValueError(f"block={block}: must equal the BSR blocksize {matrix.blocksize}")
        matrix = _blocks_of_bsr(matrix)
    block = _check.sizes("block", 1 if block is None else block)
    _check_canonical(matrix)
    coo = coo_array(matrix)
    kept = coo.data != 0
    n_row, n_col = matrix.shape
    if shape is None:
        shape = n_row * block[0], n_col * block[1]
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise TypeError(f"shape={shape!r}: must be a pair (nq, nk)")
    nq, nk = shape
    nq, nk = _check.integer("shape[0]", nq), _check.integer("shape[1]", nk)
    if (-(-nq // block[0]), -(-nk // block[1])) != (n_row, n_col):
        raise ValueError(f"shape=({nq}, {nk}): does not match {n_row} x {n_col} blocks of {block}")
    return BlockSparse(nq, nk, block, coo.row[kept], coo.col[kept])


def _blocks_of_bsr(matrix):
    nonzero = matrix.data != 0
    stored = nonzero.all((1, 2))
    mixed = nonzero.any((1, 2)) & ~stored
    if mixed.any():
        raise ValueError(
            f"matrix block {int(np.flatnonzero(mixed)[0])} holds zeros and non-zeros: "
            "pass matrix.tocsr() with block=1 for a token-exact mask"
        )
    shape = tuple(n // b for n, b in zip(matrix.shape, matrix.blocksize, strict=True))
    blocks = csr_array(shape, dtype=bool)
    blocks.indptr, blocks.indices, blocks.data = matrix.indptr, matrix.indices, stored
    return blocks


def _check_canonical(matrix):
    """Raise ValueError unless index arrays are monotone, in range and distinct."""
    if matrix.format == "coo":
        key = matrix.row.astype(np.int64) * matrix.shape[1] + matrix.col
        for name, index, limit in zip(("row", "col"), matrix.coords, matrix.shape, strict=True):
            _check.integers(f"matrix.{name}", index, 0, max(limit - 1, 0))
        _check.distinct("matrix.row * n_col + matrix.col", key)
    if matrix.format not in ("csr", "csc"):
        return
    indptr, indices = np.asarray(matrix.indptr), np.asarray(matrix.indices)
    major, minor = matrix.shape if matrix.format == "csr" else matrix.shape[::-1]
    if indptr.size != major + 1 or indptr[0] != 0:
        raise ValueError(f"matrix.indptr: must start with 0 and have {major + 1} entries")
    if (np.diff(indptr) < 0).any():
        at = int(np.flatnonzero(np.diff(indptr) < 0)[0]) + 1
        raise ValueError(f"matrix.indptr[{at}]={indptr[at]}: must not decrease")
    if indptr[-1] != indices.size or indices.size != matrix.data.size:
        raise ValueError(f"matrix.indptr[-1]={indptr[-1]}: must equal len(indices)={indices.size}")
    _check.integers("matrix.indices", indices, 0, minor - 1)
    key = np.repeat(np.arange(major) * minor, np.diff(indptr)) + indices
    order = np.argsort(key, kind="stable")  # products of SciPy are not sorted
    twice = np.flatnonzero(np.diff(key[order]) == 0)
    if twice.size:
        at = order[twice[0] + 1]
        raise ValueError(
            f"matrix.indices[{at}]={indices[at]}: is duplicated within its row; "
            "matrix.sum_duplicates() adds such entries up"
        )


def to_scipy(mask, block, touched):
    """See `Mask.to_scipy`."""
    block = _check.integer("block", block, 1)
    tiles = mask.tiles(64 if block == 1 else block)
    rows, cols = tiles.coordinates()
    if block == 1:
        return _tokens(tiles, rows, cols)
    partial = tiles.tile_counts() != tiles.grid.area(rows, cols)
    if partial.any() and not _check.flag("touched", touched):
        at = int(np.flatnonzero(partial)[0])
        raise ValueError(
            f"block={block}: block ({rows[at]}, {cols[at]}) is attended only in part; "
            "pass touched=True to count it, or block=1 for exact tokens"
        )
    kinds = tiles.kinds
    return csr_array((np.ones(rows.size, bool), kinds.indices, kinds.indptr), shape=kinds.shape)


def _tokens(tiles, rows, cols):
    """Token-exact boolean CSR, expanded tile by tile."""
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for chunk in tiles.grid.chunks(rows.size, tiles.tile_m * tiles.tile_n):
        at = np.arange(rows.size)[chunk]
        t, r, c = np.nonzero(tiles.cells(at))
        parts.append((rows[at[t]] * tiles.tile_m + r, cols[at[t]] * tiles.tile_n + c))
    q, kv = (np.concatenate(axis) for axis in zip(*parts, strict=True))
    return csr_array(coo_array((np.ones(q.size, bool), (q, kv)), shape=tiles.shape))
