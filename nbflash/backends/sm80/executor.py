"""The portable tensor-core implementation: which kernels a problem needs, with arguments bound."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from nbflash.backends.simt.executor import device_of
from nbflash.backends.sm80.backward import bwd_sm80_spec
from nbflash.backends.sm80.config import backward_configs, forward_config
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.backends.sm80.row_kernels import (
    WARPS,
    RowConfig,
    convert_dq_sm80_spec,
    statistics_sm80_spec,
)
from nbflash.cuda import score_params
from nbflash.cuda.ptx._asm import SIM
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions import philox
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.inputs import arrays
from nbflash.schedule.tile_schedule import TileSchedule


class Sm80Executor:
    """Forward and backward of one problem and mask on one device (or in the simulator).

    Parameters
    ----------
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask
    config : Sm80Config, optional
        Instead of the forward table's row.
    backward : callable, optional
        Instead of the backward table: ``backward(deterministic) -> configs``.
    score : nbflash.scores.Score, optional
    dropout : float
    """

    two_passes = None

    def __init__(self, problem, mask, *, config=None, backward=None, score=None, dropout=0.0):
        self._problem, self._mask = problem, mask
        self._device = device_of(problem.device_id)
        self._score, params = score_params.prepare(score, problem, self._device.capability)
        self._params = self._device.params(params)
        self._dropout, self._dropping = dropout, dropping_of(dropout)
        self._backward_configs, self._bound = backward or self._table_backward, {}
        self._config = config or forward_config(
            problem.dtype, problem.head_dim, smem_limit=self._device.smem_limit
        )
        if self._config is None:
            raise self._does_not_fit("forward")
        self.schedule = TileSchedule.from_mask(mask, self._config.tile_m, self._config.tile_n)
        self._qkv_strides = tuple(three[:3] for three in problem.strides)

    def _table_backward(self, deterministic):
        return backward_configs(
            self._problem.dtype,
            self._problem.head_dim,
            smem_limit=self._device.smem_limit,
            deterministic=deterministic,
            vector_red=self._device.vector_red,
        )

    def _state(self, seed):
        """The kernels' argument of that name."""
        return self._device.state(seed) if self._dropping else ()

    @property
    def _factor(self):
        """What scores are multiplied with: they are in base 2, a score function's are natural."""
        return abs(self._problem.scale) * (1.0 if self._score else LOG2_E)

    def _bind(self, spec, schedule, work, sizes, dropping):
        p, s = self._problem, schedule
        planes = s.plane_of(p.batch, p.heads)
        tables = work, planes, s.row_ptr, s.col_idx, s.kind, s.lo, s.hi, s.bits
        constants = p.nq, p.nk, p.heads, p.group, s.n_row, *sizes
        return self._device.bind(spec, len(work), constants, tables, (self._params, dropping))

    def _complete(self, config, schedule):
        """A row of a table with what this problem asks for besides."""
        more = {"score": self._score, "dropout": bool(self._dropping)}
        negate, full_tiles = self._problem.scale < 0, schedule.full_tiles
        return replace(config, negate=negate, full_tiles=full_tiles, **more)

    @cached_property
    def _forward(self):
        p = self._problem
        work = self.schedule.work(p.batch, p.heads)
        config = self._complete(self._config, self.schedule)
        scale = max(self._factor, LEAST_SCALE)
        return self._bind(fwd_sm80_spec(config), self.schedule, work, (scale,), self._dropping)

    def forward(self, q, k, v, out, lse, seed=None):
        """Write ``out`` and ``lse``."""
        strides = *self._qkv_strides, arrays.strides(out)
        tensors = *map(_bits, (q, k, v)), _words(out), lse
        self._forward(tensors, strides, self._state(seed))

    def _passes(self, deterministic):
        """Of a backward: how many rows a head has in whole tiles, what makes the queries' numbers,
        the kernels that walk, with their configurations, and what converts dQ.
        """
        p, device = self._problem, self._device
        configs = self._backward_configs(deterministic)
        if not configs:
            raise self._does_not_fit("backward")
        padded = max(-(-p.nq // cfg.tile_m) * cfg.tile_m for cfg in configs)
        rows, walks, convert = p.batch * p.heads * padded, [], None
        row, dropping = RowConfig(p.dtype, p.head_dim), dropping_of(self._dropout, inverse=True)
        factor = philox.factor(self._dropout) if self._dropout else 1.0
        for cfg in configs:
            schedule, group = TileSchedule.from_mask(self._mask, cfg.tile_m, cfg.tile_n), 1
            if cfg.walk == "columns":
                schedule, group = schedule.T, p.group
            work = schedule.work(p.batch, p.heads, group)
            if cfg.atomic_dq:
                row = replace(row, width=cfg.tile.width, vector_red=cfg.vector_red)
                number = rows * cfg.tile.width // 16
                sizes = p.nq, p.heads, padded, number, float(p.scale * factor)
                convert = device.bind(convert_dq_sm80_spec(row), -(-number // 128), sizes, ())
            sizes = padded, float(p.scale), float(max(self._factor, LEAST_SCALE))
            spec = bwd_sm80_spec(self._complete(cfg, schedule))
            walks.append((cfg, self._bind(spec, schedule, work, sizes, dropping)))
        sizes = p.nq, p.heads, padded, rows, 1.0 / factor
        statistics = device.bind(statistics_sm80_spec(row), -(-rows // WARPS), sizes, ())
        return rows, row.width, statistics, walks, convert

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=None):
        """Write ``dq``, ``dk`` and ``dv``."""
        if deterministic not in self._bound:
            self._bound[deterministic] = self._passes(deterministic)
        rows, width, statistics, walks, convert = self._bound[deterministic]
        lse = lse if lse.flags.c_contiguous else lse.copy()
        shift, delta = (self._device.empty((rows,), np.dtype(np.float32)) for _ in range(2))
        total = self._device.empty((max(rows * width, 1),), np.dtype(np.float32))
        tensors = _words(dout), _words(out), lse, dlse, shift, delta, total
        statistics(tensors, map(arrays.strides, (dout, out, dlse)))
        strides = [arrays.strides(x) for x in (dout, dq, dk, dv)]
        for cfg, kernel in walks:
            target = total if cfg.atomic_dq else _words(dq)
            tensors = *map(_bits, (q, k, v, dout)), shift, delta, target, _words(dk), _words(dv)
            kernel(tensors, (*self._qkv_strides, *strides), self._state(seed))
        if convert is not None:
            convert((total, _words(dq)), (arrays.strides(dq),))

    def _does_not_fit(self, direction):
        return ValueError(
            f"impl='sm80' has no {direction} kernel for head_dim {self._problem.head_dim} within "
            f"the {self._device.smem_limit} bytes of shared memory of this device"
        )


def _bits(x):
    """An array as its kernel has it: 16 bits an element, of any type."""
    return x.view(np.uint16) if SIM else x


def _words(x):
    """And as words of two elements."""
    return x.view(np.uint32) if SIM else x
