"""The Hopper backward of one problem and mask: its tables, and its kernels with arguments bound."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from masks import FULL
from nbflash.backends.block_plan.host import schedule_of
from nbflash.backends.sm90.backward.choice import columns_config, for_tiles, one_pass_config
from nbflash.backends.sm90.backward.convert_dq import convert_dq_sm90_spec
from nbflash.backends.sm90.backward.dq_host import DqPass
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.backward.row_statistics import RowsConfig, statistics_sm90_spec
from nbflash.cuda import tensor_map
from nbflash.cuda.tile.dropout import dropout_of
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.cuda.tile.wgmma.gradient import PART
from nbflash.definitions.constants import score_factor
from nbflash.definitions.philox import factor
from nbflash.inputs import arrays
from nbflash.inputs.arrays import strides
from nbflash.schedule.work_list import heads_at_a_time, ordered


def tables(schedule, batch, heads, group, head_dim, blocks, with_dq=True):
    """What the kernel walks: work, planes, the transposed schedule, bounds by query tiles.

    Parameters
    ----------
    schedule : TileSchedule
        Transposed; or a `nbflash.backends.block_plan.host.BlockSchedule`.
    batch, heads, group, head_dim : int
    blocks : int
        How many will walk at the same time.
    with_dq : bool
        Whether they add to a sum of dQ.

    Returns
    -------
    walked : tuple, or callable
        int32, but the last, the bit tiles, uint32.
    live : int
        Items of the work list that have tiles.
    """
    s = schedule
    # Q, dO and the sum of dQ.
    head_bytes = s.nq * group * head_dim * (2 + 2 + 4 * with_dq)
    if s.at_run_time:
        return s.column_tables(batch, heads, group, head_bytes)
    plane_of, work = s.plane_of(batch, heads), s.work(batch, heads, group)
    lengths = np.diff(s.row_ptr)
    hidden = np.concatenate([[0], np.cumsum(s.kind != FULL)])[s.row_ptr]
    per_item = [
        count.reshape(s.planes, s.n_row)[plane_of].reshape(-1, group, s.n_row).sum(axis=1)
        for count in (lengths, np.diff(hidden))
    ]
    length, masked = (count[work[:, 1], work[:, 0]] for count in per_item)
    work = np.column_stack([work, masked])
    work = ordered(work, length, heads_at_a_time(head_bytes), blocks)
    n_block, head, masked = work.T
    work = np.stack([n_block, *np.divmod(head, heads // group), masked > 0], 1).astype(np.int32)
    bounds = np.zeros((s.planes, 2, s.n_col * s.tile_m), np.int32)
    bounds[:, 0, : s.nq] = s.lo.reshape(s.planes, s.nq)
    bounds[:, 1, : s.nq] = s.hi.reshape(s.planes, s.nq)
    bounds = bounds.reshape(s.planes, 2, s.n_col, s.tile_m).transpose(0, 2, 1, 3)
    walked = work, plane_of, s.row_ptr, s.col_idx, s.kind, bounds, s.bits
    return tuple(np.ascontiguousarray(x).ravel() for x in walked), int(np.count_nonzero(length))


def rows_config(cfg):
    """The configuration of the kernels around the main one."""
    return RowsConfig(cfg.dtype, cfg.head_dim, cfg.tile_m, cfg.panels)


class Sm90Backward:
    """The backward of one `AttentionSpec`.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
        Dropout takes two passes.
    device
        Of `nbflash.cuda.device.cuda_device`.
    scoring : (ScoreCode or None, tuple)
        Functions of the scores and their parameters on the device.
    two_passes : bool
        dK and dV by columns and dQ by rows, reproducibly; or all in one pass over columns.
    config : Sm90BackwardConfig, optional
        Of the pass over columns, instead of the table's row; `for_tiles` completes it.
    """

    def __init__(self, spec, device, scoring=(None, ()), *, two_passes=False, config=None):
        self._problem, self._device = spec.problem, device
        score, self._params = scoring
        config = config or (columns_config if two_passes else one_pass_config)(spec, score)
        self._dropout = spec.dropout
        self.schedule = schedule_of(device, spec, config.tile_m, config.tile_n).T
        config = replace(config, score=score, dropout=dropout_of(spec))
        self.config = for_tiles(config, self.schedule)
        self.rows = DqPass(spec, device, scoring, config.tile_m) if two_passes else None
        self._map = device.maps(spec.problem.dtype)

    @property
    def _slots(self):
        """Query tiles of all heads."""
        return self._problem.batch * self._problem.heads * self.schedule.n_col

    @cached_property
    def _main(self):
        """The pass over columns with sizes and tables bound."""
        p, cfg, s = self._problem, self.config, self.schedule
        items, heads_kv = s.n_row * p.batch * p.heads // p.group, p.heads // p.group
        blocks = min(self._device.multiprocessors * cfg.min_blocks, items)
        walked, live = tables(s, p.batch, p.heads, p.group, p.head_dim, blocks, cfg.with_dq)
        stride = p.nk * heads_kv * p.head_dim, heads_kv * p.head_dim, p.head_dim
        sizes = (p.nk, p.heads, heads_kv, p.group, s.n_row, s.n_col, items, live)
        scales = score_factor(p.scale, cfg.score is not None), p.scale * factor(self._dropout)
        constants = *stride, *sizes, *scales
        more = self._params, dropping_of(self._dropout, inverse=True)
        return self._device.bind(bwd_sm90_spec(cfg), blocks, constants, walked, more)

    @cached_property
    def _around(self):
        """The launches before and after one pass, bound: statistics and clearing; dQ converted."""
        p, cfg, n_col = self._problem, self.config, self.schedule.n_col
        rows, queries = rows_config(cfg), self._slots * cfg.tile_m
        before = self._device.bind(
            statistics_sm90_spec(rows),
            rows.statistics_blocks(queries),
            (p.nq, p.heads, n_col, queries),
        )
        sizes, blocks = (p.nq, p.heads, n_col, p.scale), self._slots * cfg.consumers
        return before, self._device.bind(convert_dq_sm90_spec(rows), blocks, sizes)

    def bind(self):
        """Bind its kernels."""
        self._main  # noqa: B018 - a cached property
        if self.rows:
            self.rows.bind()
        else:
            self._around  # noqa: B018

    @cached_property
    def _layouts(self):
        """Of the maps of q, k and v."""
        p, cfg = self._problem, self.config
        shapes, rows = (p.q_shape, *(p.kv_shape,) * 2), (cfg.tile_m, cfg.tile_n, cfg.tile_n)
        given = zip(shapes, p.strides, rows, strict=True)
        return [self._map.layout(shape, three[:3], n) for shape, three, n in given]

    @cached_property
    def _scratch(self):
        """What allocates the statistics, and the sum of dQ for one pass."""
        shapes = [(self._slots, 2, self.config.tile_m)]
        if not self.rows:
            shapes.append((self._slots, self.config.consumers, PART))
        return self._device.scratch(shapes, np.float32)

    def __call__(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, state=(), lists=()):
        """Write ``dq``, ``dk`` and ``dv``, which are contiguous; ``state`` is dropout's."""
        address = self._device.address
        (dout, of_dout), (out, of_out) = _readable(dout), _readable(out)
        lse = lse if lse.flags.c_contiguous else lse.copy()
        _memory, (stats, *total) = self._scratch()  # which is free when nobody holds it
        operands = [address(q), address(k), address(v), address(dout)]
        of_dout_map = self._map.layout(self._problem.q_shape, of_dout, self.config.tile_m)
        maps = [*zip(operands, (*self._layouts, of_dout_map), strict=True)]
        outputs, results = [address(out), address(lse), address(dlse)], [address(dk), address(dv)]
        stats = address(stats)
        if self.rows:
            others = of_out, strides(dlse)
            self.rows(operands, of_dout, *outputs, others, stats, address(dq), state, lists)
            self._main([0, stats, *results, *state], maps, lists)
            return
        (total,), (before, after) = map(address, total), self._around
        before([operands[3], *outputs, stats, total, *of_dout, *of_out, *strides(dlse)])
        self._main([total, stats, *results], maps, lists)
        after([total, address(dq), *strides(dq)])


def _readable(x):
    """``x``, or a copy that can be read 16 bytes at a time, and its strides."""
    found = first, second, third = strides(x)
    bits = arrays.pointer(x) | 2 * (first | second | third)  # below 0 if a stride is
    if bits >= 0 and bits % tensor_map.ALIGNMENT == 0:
        return x, found
    if arrays.alignment_in_memory(x) >= tensor_map.ALIGNMENT and min(x.strides) >= 0:
        return x, found  # an axis of one, whose stride does not matter
    x = x.copy()  # also of a contiguous array that starts off alignment
    return x, strides(x)
