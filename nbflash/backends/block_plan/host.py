"""Block maps planned on the device: buffers, the kernels that fill them, and what executors bind.

A `BlockSchedule` stands where a `TileSchedule` does. It has no lists; its *walks* make them, on the
current stream, from the lists of a block map that come with every call: the tables of a kernel in
the order of its arguments. Nothing waits for the device, and sizes depend on shapes alone, so that
a CUDA graph may be replayed with other contents.
"""

from functools import cached_property

import numpy as np

from nbflash.backends.block_plan.list_tiles import WARPS, list_tiles_config, list_tiles_spec
from nbflash.backends.block_plan.overflow import OverflowConfig, overflow_spec
from nbflash.backends.block_plan.running_sum import running_sum_config, running_sum_spec
from nbflash.backends.block_plan.transpose import THREADS, TransposeConfig, transpose_spec
from nbflash.backends.block_plan.work_order import (
    COLUMNS,
    PAIRS,
    WorkOrderConfig,
    work_order_spec,
)
from nbflash.backends.block_plan.work_order import THREADS as RANKED
from nbflash.cuda.device import cuda_device
from nbflash.definitions.constants import ITEMSIZE
from nbflash.inputs import arrays
from nbflash.inputs.block_layout import BlockLayout
from nbflash.schedule.block_tiles import BlockTiles
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.schedule.work_list import heads_at_a_time, kv_bytes


def schedule_of(device, spec, tile_m, tile_n):
    """The schedule of a spec's mask: a `TileSchedule`, or a `BlockSchedule` of a `BlockLayout`."""
    if isinstance(spec.mask, BlockLayout):
        return BlockSchedule(device, spec.mask, BlockTiles(spec.mask, tile_m, tile_n))
    return TileSchedule.from_mask(spec.mask, tile_m, tile_n)


def fitting(configs, mask):
    """Those whose tiles fit the blocks of a mask that is a `BlockLayout`; all for other masks."""
    if not isinstance(mask, BlockLayout):
        return configs
    return [c for c in configs if mask.fits(c.tile_m, c.tile_n)] or configs


class Guarded:
    """An executor of a `BlockLayout` whose results are NaN where the lists of a map have no room.

    See :mod:`.overflow`.
    """

    def __init__(self, executor, spec, device=None):
        p, layout = spec.problem, spec.mask
        self._executor, self.backward = executor, executor.backward
        self.bind_forward, self.bind_backward = executor.bind_forward, executor.bind_backward
        self._device = device or cuda_device(p.device_id, p.of_torch)
        # In pieces of two bytes.
        self._factors = tuple(ITEMSIZE[dtype] // 2 for dtype in (p.dtype, p.lse_dtype))
        config = OverflowConfig(p.head_dim * self._factors[0], self._factors[1])
        n_rows = layout.grid_shape[0]
        rows = p.batch * p.heads * n_rows
        sizes = layout.width, rows, n_rows, layout.block[0], p.nq, p.heads, *layout.extent
        self._mark = self._device.bind(overflow_spec(config), -(-rows // WARPS), sizes)

    @property
    def schedule(self):
        """The `BlockSchedule` of the forward pass."""
        return self._executor.schedule

    @property
    def two_passes(self):
        """Of `AttentionPlan`."""
        return self._executor.two_passes

    def forward(self, q, k, v, out, lse, seed=None, lists=()):
        """Write ``out`` and ``lse``."""
        self._executor.forward(q, k, v, out, lse, seed, lists)
        strides = [
            n * factor
            for x, factor in zip((out, lse), self._factors, strict=True)
            for n in arrays.strides(x)
        ]
        self._mark(self._device.words((lists[1], out, lse), strides))


class BlockSchedule:
    """What executors ask of a `TileSchedule`, of blocks that are known when a call runs.

    Parameters
    ----------
    device
        Of `nbflash.cuda.device.cuda_device`.
    layout : nbflash.inputs.block_layout.BlockLayout
    tiles : nbflash.schedule.block_tiles.BlockTiles
    transposed : bool
    """

    at_run_time, full_tiles, full_but_edge = True, False, False

    def __init__(self, device, layout, tiles, transposed=False):
        self._device, self.layout, self.block_tiles = device, layout, tiles
        self.tile_m, self.tile_n, self.transposed = tiles.tile_m, tiles.tile_n, transposed
        self.nq, self.nk = layout.shape
        self.planes = len(layout.planes)

    @property
    def n_row(self):
        """Tiles along the walked axis of one plane."""
        return self.block_tiles.n_col if self.transposed else self.block_tiles.n_row

    @property
    def n_col(self):
        """Tiles along the other axis of one plane."""
        return self.block_tiles.n_row if self.transposed else self.block_tiles.n_col

    @cached_property
    def T(self):
        """The same tiles walked along the other axis."""
        return BlockSchedule(self._device, self.layout, self.block_tiles, not self.transposed)

    @property
    def outwards(self):
        """Itself: tiles stay in the order of their places."""
        return self

    def tables(self, batch, heads, group=1):
        """As of `TileSchedule.tables`."""
        return Walk(self, batch, heads, group, 1)

    def row_tables(self, problem):
        """As `nbflash.schedule.work_list.row_tables`; all items have tiles."""
        together = heads_at_a_time(kv_bytes(problem))
        groups = -(-problem.batch * problem.heads_kv // together)
        walk = Walk(self, problem.batch, problem.heads, 1, groups, of_unit=problem.group)
        return walk, walk.items

    def column_tables(self, batch, heads, group, head_bytes):
        """As `nbflash.backends.sm90.backward.host.tables`; all items have tiles."""
        groups = -(-batch * heads // group // heads_at_a_time(head_bytes))
        walk = Walk(self, batch, heads, group, groups, columns=True)
        return walk, walk.items

    def __repr__(self):
        axis = "columns" if self.transposed else "rows"
        return (
            f"BlockSchedule({self.nq}x{self.nk}, tiles {self.tile_m}x{self.tile_n} by {axis}, "
            f"{self.planes} plane(s), blocks of {self.layout.block}, k={self.layout.width})"
        )


class Walk:
    """The tables of a kernel that walks a `BlockSchedule`, made by every call.

    Parameters
    ----------
    schedule : BlockSchedule
    batch, heads : int
        Query heads.
    group : int
        Query heads of an item.
    groups : int
        Of heads that are worked on at a time.
    of_unit : int
        Heads that are not parted.
    columns : bool
        Items and bounds as the Hopper pass over columns has them.
    """

    def __init__(self, schedule, batch, heads, group, groups, *, of_unit=1, columns=False):
        self._schedule, self._device, self._group = schedule, schedule._device, group
        tiles, self._words = schedule.block_tiles, COLUMNS if columns else PAIRS
        self.items = schedule.n_row * batch * heads // group
        self._rows = schedule.planes * schedule.n_row
        plane_of = tiles.plane_of(batch, heads)
        bounds = [_bounds(schedule)] if columns else [tiles.lo, tiles.hi]
        static = [x.ravel() for x in (plane_of, *bounds, tiles.bits)]
        self._static = self._device.resident(static)
        self.count = len(static) + 4
        self._lists = _Transposed(schedule) if schedule.transposed else _Given()
        self._count, self._write = (self._bind_list(write) for write in (False, True))
        spec = running_sum_spec(running_sum_config(self._rows))
        self._sum = self._device.bind(spec, 1, (self._rows,))
        units = batch * heads // group // of_unit
        longest = -(-units // groups) * of_unit * schedule.n_row
        chunks = -(-longest // RANKED)
        sizes = schedule.n_row, units, groups, chunks, of_unit, group, heads // group
        spec = work_order_spec(WorkOrderConfig(self._words))
        self._order = self._device.bind(spec, groups * chunks, sizes, (plane_of,))

    def __len__(self):
        return self.items

    def _bind_list(self, write):
        """One of the two passes that make lists of tiles."""
        s, tiles = self._schedule, self._schedule.block_tiles
        (rows, cols), blocks, splits = s.layout.grid_shape, tiles.blocks, tiles.splits
        if s.transposed:
            rows, cols, blocks, splits = cols, rows, blocks[::-1], splits[::-1]
        config = list_tiles_config(blocks, splits, cols, s.transposed, write)
        sizes = s.layout.width, self._rows, s.n_row, s.n_col, rows, cols, tiles.n_row
        static = tiles.map_plane, tiles.within_plane, tiles.full_lo, tiles.full_hi
        static += tiles.edge_ptr, tiles.edge_col, tiles.edge_id
        return self._device.bind(list_tiles_spec(config), -(-self._rows // WARPS), sizes, static)

    def __call__(self, lists):
        """The words of the tables of a map with these ``(indices, counts)``, and their memory."""
        device, rows, s = self._device, self._rows, self._schedule
        capacity = s.block_tiles.capacity(s.transposed)
        sizes = rows, rows, rows + 1, capacity, capacity, self._words * self.items
        counts, masked, row_ptr, col_idx, kind, work = made = device.integers(sizes)
        begins, entries, held = self._lists(*lists)
        given = device.words((begins, entries, counts, masked, row_ptr, col_idx, kind))
        self._count(given)
        self._sum(device.words((counts, row_ptr, counts)))
        self._write(given)
        self._order(device.words((counts, masked, work)))
        plane_of, *last = self._static
        words = device.words((work, plane_of, row_ptr, col_idx, kind, *last))
        return words, (made, held)


class _Given:
    """The lists of the map as they are."""

    def __call__(self, indices, counts):
        return counts, indices, ()


class _Transposed:
    """The lists of the map by columns."""

    def __init__(self, schedule):
        self._device, layout = schedule._device, schedule.layout
        rows, columns = layout.grid_shape
        planes = layout.extent[0] * layout.extent[1]
        self._columns, self._entries = planes * columns, planes * rows * layout.width
        blocks = max(1, -(-self._entries // THREADS))
        sizes = max(layout.width, 1), self._entries, rows, columns
        self._count, self._write = (
            self._device.bind(transpose_spec(TransposeConfig(write)), blocks, sizes)
            for write in (False, True)
        )
        spec = running_sum_spec(running_sum_config(self._columns, cursor=True))
        self._sum = self._device.bind(spec, 1, (self._columns,))

    def __call__(self, indices, counts):
        device, n = self._device, self._columns
        lengths, begins, cursor, rows = held = device.integers((n, n + 1, n, self._entries + 1))
        stream, _ = device.stream()
        device.clear(device.address(lengths), 4 * n, stream)
        self._count(device.words((counts, indices, lengths, rows)))
        self._sum(device.words((lengths, begins, cursor)))
        self._write(device.words((counts, indices, cursor, rows)))
        return begins, rows, held


def _bounds(schedule):
    """lo and hi by query tiles: int32 (planes, query tiles, 2, tile_m)."""
    tiles, (nq, _) = schedule.block_tiles, schedule.layout.shape
    bounds = np.zeros((schedule.planes, 2, tiles.n_row * tiles.tile_m), np.int32)
    bounds[:, 0, :nq] = tiles.lo.reshape(-1, nq)
    bounds[:, 1, :nq] = tiles.hi.reshape(-1, nq)
    return bounds.reshape(-1, 2, tiles.n_row, tiles.tile_m).transpose(0, 2, 1, 3)
