"""Tiles of a block map: what does not change with its contents, and the lists that follow from it.

A tile that lies in blocks of the map and in the intervals' inside is FULL, one that the intervals
cut is INTERVAL. Where a tile holds several blocks of which some are missing it has bits: those of
the *pattern* of its blocks, cut as the intervals cut it. Patterns and ways of being cut, the
*edges*, are few and known beforehand, so that no bits are made when a map is planned. Bit tile 0 is
empty: a row without tiles gets it, so that every row has a tile and work lists have no end that
depends on contents.

The lists here are the specification of `nbflash.backends.block_plan`, which makes the same on the
device, bit for bit.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from masks.interval import ranges
from masks.tiles import ABSENT, BITS, FULL, INTERVAL, Grid, interval_cells, interval_state

_INT32_MAX = 2**31 - 1
EMPTY = BITS  # the kind of bit tile 0


class BlockTiles:
    """Tiles of ``tile_m`` queries and ``tile_n`` keys of a `BlockLayout`.

    Attributes
    ----------
    layout : nbflash.inputs.block_layout.BlockLayout
    tile_m, tile_n : int
    n_row, n_col : int
        Tiles along queries and keys.
    blocks, splits : (int, int)
        Blocks of a tile along queries and keys, and tiles of a block.
    map_plane, within_plane : int32 (planes,)
        Of each plane of lists, that of the map and that of the intervals.
    plane_index : int32 (batch or 1, heads or 1)
        Plane of every batch element and query head.
    full_lo, full_hi : int32 (within planes * n_row,)
        Of each row of tiles the columns ``full_lo <= c < full_hi`` that the intervals cover whole.
    edge_ptr, edge_col, edge_id : int32
        CSR of the tiles that they cover in part, with the number of how, from 1.
    lo, hi : int32 (planes * nq,)
        As of `TileSchedule`.
    bits : uint32 (n, tile_m, ceil(tile_n / 32))
        Bit tile ``edge * patterns + pattern``; a single one where a tile holds one block.

    Raises
    ------
    ValueError
        If tiles and blocks do not fit each other, or there are too many tiles for 32 bits.
    """

    def __init__(self, layout, tile_m, tile_n):
        self.layout, self.tile_m, self.tile_n = layout, tile_m, tile_n
        if not layout.fits(tile_m, tile_n):
            raise ValueError(
                f"mask has blocks of {layout.block}, which are not planned on the device in tiles "
                f"of {tile_m} x {tile_n}: take blocks of 64 or 128, or pass mask.to_mask()"
            )
        (nq, nk), (batch, heads) = layout.shape, layout.plane_extent
        self.grid = Grid(nq, nk, tile_m, tile_n)
        self.n_row, self.n_col = self.grid.n_row, self.grid.n_col
        self.blocks, self.splits = layout.per_tile(tile_m, tile_n)
        self.patterns = 1 << (self.blocks[0] * self.blocks[1])
        of_map = np.arange(layout.extent[0] * layout.extent[1]).reshape(layout.extent)
        self.map_plane = _spread(of_map, batch, heads)
        self.within_plane = _spread(layout.within.plane_index, batch, heads)
        self.plane_index = np.repeat(
            np.arange(batch * heads, dtype=np.int32).reshape(batch, heads),
            layout.heads // heads if heads > 1 else 1,
            axis=1,
        )
        for transposed in (False, True):
            if self.capacity(transposed) > _INT32_MAX:
                raise ValueError(
                    f"mask may have {self.capacity(transposed)} tiles of {tile_m} x {tile_n}, more "
                    f"than 32-bit indices hold: bound its lists (k={layout.width})"
                )

    def capacity(self, transposed):
        """Tiles that the lists have room for: no contents need more."""
        layout = self.layout
        of_blocks = layout.grid_shape[0] * layout.width * self.splits[0] * self.splits[1]
        rows = self.n_col if transposed else self.n_row
        return self.map_plane.size * (min(self.n_row * self.n_col, of_blocks) + rows)

    def plane_of(self, batch, heads):
        """Plane of every batch element and query head: int32 (batch * heads,), C order."""
        return np.broadcast_to(self.plane_index, (batch, heads)).flatten()

    @cached_property
    def _bounds(self):
        """lo and hi of every plane of intervals."""
        return [(m.lo, m.hi) for m in self.layout.within.planes]

    @cached_property
    def lo(self):
        return np.concatenate([self._bounds[w][0] for w in self.within_plane]).astype(np.int32)

    @cached_property
    def hi(self):
        return np.concatenate([self._bounds[w][1] for w in self.within_plane]).astype(np.int32)

    @cached_property
    def _edges(self):
        """full_lo, full_hi, edge_ptr, edge_col, edge_id; and the distinct edges, as words."""
        found = [_edges_of(self.grid, lo, hi) for lo, hi in self._bounds]
        full_lo, full_hi, counts, rows, cols = map(np.concatenate, zip(*found, strict=True))
        numbers, distinct = np.ones(rows.size, np.int64), np.zeros((0, 1), np.uint32)
        if self.patterns > 2:
            cells = [
                _packed(self.grid, *bounds, *edges[3:])
                for bounds, edges in zip(self._bounds, found, strict=True)
            ]
            distinct, numbers = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
            numbers = numbers.ravel() + 1
        edge_ptr = np.concatenate([[0], np.cumsum(counts)])
        arrays = full_lo, full_hi, edge_ptr, cols, numbers
        return tuple(x.astype(np.int32) for x in arrays), distinct

    full_lo, full_hi, edge_ptr, edge_col, edge_id = (
        property(lambda self, i=i: self._edges[0][i]) for i in range(5)
    )

    @cached_property
    def bits(self):
        words = -(-self.tile_n // 32)
        if self.patterns == 2:
            return np.zeros((1, self.tile_m, words), np.uint32)
        blocks = (
            np.arange(self.patterns)[:, None] >> np.arange(self.blocks[0] * self.blocks[1])
        ) & 1
        size = self.tile_m // self.blocks[0], self.tile_n // self.blocks[1]
        cells = blocks.reshape(-1, *self.blocks).repeat(size[0], 1).repeat(size[1], 2)
        whole = np.full((1, self.tile_m, words), 0xFFFFFFFF, np.uint32)
        edges = np.concatenate([whole, self._edges[1].reshape(-1, self.tile_m, words)])
        patterns = _words(cells.astype(bool))
        return (edges[:, None] & patterns).reshape(-1, self.tile_m, words)

    def kinds(self, keep):
        """Kind of every tile of every plane, −1 of those that are absent: int32 (planes, n_row,
        n_col).

        Parameters
        ----------
        keep : bool (map planes, rows, columns)
            The map's blocks.
        """
        n_rows, n_cols = keep.shape[1:]
        row = _blocks_of(self.n_row, self.blocks[0], self.splits[0])
        col = _blocks_of(self.n_col, self.blocks[1], self.splits[1])
        there = (row < n_rows)[:, :, None, None] & (col < n_cols)
        at = np.minimum(row, n_rows - 1)[:, :, None, None], np.minimum(col, n_cols - 1)
        weight = 1 << np.arange(self.blocks[0] * self.blocks[1]).reshape(self.blocks)
        out = np.empty((self.map_plane.size, self.n_row, self.n_col), np.int32)
        for p, (m, w) in enumerate(zip(self.map_plane, self.within_plane, strict=True)):
            present = keep[m][at] & there
            pattern = ((present | ~there) * weight[:, None]).sum((1, 3))
            edge = self._edge_table(w)
            whole = pattern == self.patterns - 1
            kind = np.where(edge == 0, FULL, INTERVAL)
            kind = np.where(whole, kind, BITS + edge * self.patterns + pattern)
            out[p] = np.where(present.any((1, 3)) & (edge >= 0), kind, -1)
        return out

    def _edge_table(self, w):
        """0 of tiles that the intervals cover whole, −1 of those that they do not meet."""
        rows = slice(w * self.n_row, (w + 1) * self.n_row)
        column = np.arange(self.n_col)
        inside = (self.full_lo[rows, None] <= column) & (column < self.full_hi[rows, None])
        table = np.where(inside, 0, -1)
        ends = self.edge_ptr[w * self.n_row : (w + 1) * self.n_row + 1]
        own = slice(ends[0], ends[-1])
        table[np.repeat(np.arange(self.n_row), np.diff(ends)), self.edge_col[own]] = self.edge_id[
            own
        ]
        return table

    def lists(self, keep, transposed=False):
        """``row_ptr, col_idx, kind`` of a `TileSchedule`, whose rows without tiles have bit tile 0.

        ``keep`` as of `kinds`.
        """
        kinds = self.kinds(keep)
        kinds = kinds.swapaxes(1, 2) if transposed else kinds
        kinds = kinds.reshape(-1, kinds.shape[2]).copy()
        kinds[(kinds < 0).all(1), 0] = EMPTY
        row, col = np.nonzero(kinds >= 0)
        row_ptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(kinds)))])
        return row_ptr.astype(np.int32), col.astype(np.int32), kinds[row, col]


def item_lengths(lengths, plane_of, n_row, group):
    """Tiles of every item, head by head: those of ``group`` heads that follow each other together.

    Parameters
    ----------
    lengths : int (planes * n_row,)
    plane_of : int (batch * heads,)
    """
    of_head = lengths.reshape(-1, n_row)[plane_of]
    return of_head.reshape(-1, group, n_row).sum(axis=1).ravel()


def work_order(lengths, n_row, units, groups):
    """The items in the order in which they are worked on: group by group, longest first, stable.

    Parameters
    ----------
    lengths : int (units * rows of a unit,)
        Of items, from `item_lengths`.
    n_row : int
        Items of a head.
    units, groups : int
        The heads are as many units of equal size; unit ``u`` is of group ``u * groups // units``.

    Returns
    -------
    int32 like lengths
        Item at each place: head ``item // n_row``, row ``item % n_row``.
    """
    unit = np.arange(lengths.size) // (lengths.size // units)
    return np.lexsort((-lengths, unit * groups // units)).astype(np.int32)


def _spread(planes, batch, heads):
    """Planes (batch or 1, fewer heads) of all (batch, heads): int32, C order."""
    rows = np.repeat(planes, batch // planes.shape[0], axis=0)
    return np.repeat(rows, heads // planes.shape[1], axis=1).astype(np.int32).ravel()


def _blocks_of(tiles, blocks, splits):
    """Blocks that each tile of an axis holds or lies in: (tiles, blocks)."""
    return np.arange(tiles)[:, None] // splits * blocks + np.arange(blocks)


def _edges_of(grid, lo, hi):
    """Of intervals: full_lo, full_hi, edges of each row; rows and columns of all edges."""
    start = np.arange(0, grid.nq, grid.tile_m)
    least = np.minimum.reduceat(np.where(lo < hi, lo, grid.nk), start).astype(np.int64)
    most = np.maximum.reduceat(hi, start).astype(np.int64)
    full_lo = -(-np.maximum.reduceat(lo, start).astype(np.int64) // grid.tile_n)
    full_hi = np.maximum(np.minimum.reduceat(hi, start) // grid.tile_n, full_lo)
    first, last = least // grid.tile_n, -(-most // grid.tile_n)
    length = np.maximum(last - first, 0)
    rows, cols = np.repeat(np.arange(start.size), length), ranges(first, length)
    cut = (cols < full_lo[rows]) | (cols >= full_hi[rows])
    rows, cols = rows[cut], cols[cut]
    met = interval_state(grid, lo, hi, rows, cols) != ABSENT
    rows, cols = rows[met], cols[met]
    return full_lo, full_hi, np.bincount(rows, minlength=start.size), rows, cols


def _packed(grid, lo, hi, rows, cols):
    """Cells of tiles that intervals cut, as words: uint32 (tiles, tile_m * words)."""
    parts = [np.zeros((0, grid.tile_m * -(-grid.tile_n // 32)), np.uint32)]
    for chunk in grid.chunks(rows.size, grid.tile_m * grid.tile_n):
        at = rows[chunk], cols[chunk]
        cells = interval_cells(grid, lo, hi, *at) & grid.existing(*at)
        parts.append(_words(cells).reshape(len(cells), -1))
    return np.concatenate(parts)


def _words(cells):
    """Booleans (t, tile_m, tile_n) as uint32 (t, tile_m, ceil(tile_n / 32))."""
    padded = np.zeros((*cells.shape[:2], -(-cells.shape[2] // 32) * 32), bool)
    padded[..., : cells.shape[2]] = cells
    packed = np.packbits(padded, axis=2, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32)
