"""The SIMT implementation: which kernels a problem needs, with their arguments bound.

Kernels are bound by a `nbflash.cuda.device`: a GPU, or the simulator.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from nbflash.backends.simt.backward import bwd_simt_spec
from nbflash.backends.simt.configs import backward_configs, forward_config
from nbflash.backends.simt.convert_dq import round_simt_spec
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.simt.row_statistics import RowConfig, blocks_for, delta_simt_spec
from nbflash.cuda import score_params
from nbflash.cuda.device import cuda_device
from nbflash.definitions import philox
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs import arrays
from nbflash.schedule.tile_schedule import TileSchedule


def vectors_allowed(dtype, head_dim, alignment):
    """Whether rows may be read four elements at a time."""
    itemsize = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}.get(dtype, 1)
    return head_dim % 4 == 0 and alignment >= min(16, 4 * itemsize)


class SimtExecutor:
    """Forward and backward of one problem and mask on one device (or in the simulator).

    Parameters
    ----------
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask
    config : SimtConfig, optional
        Instead of the forward table's row.
    backward : callable, optional
        Instead of the backward table: ``backward(deterministic, vectors) -> configs``.
    score : nbflash.scores.Score, optional
    dropout : float
    """

    two_passes = None

    def __init__(self, problem, mask, *, config=None, backward=None, score=None, dropout=0.0):
        self._problem, self._mask = problem, mask
        self._device = cuda_device(problem.device_id)
        made = score_params.prepare(score, problem, self._device.capability)
        self._score, self._params = made[0], self._device.params(made[1])
        vectors = vectors_allowed(problem.dtype, problem.head_dim, problem.alignment)
        self._config = config or forward_config(
            problem.dtype,
            problem.head_dim,
            vectors=vectors,
            smem_limit=self._device.smem_limit,
            cp_async=self._device.cp_async,
        )
        if self._config is None:
            raise self._does_not_fit("forward")
        self._backward_configs = backward or self._table_backward
        self.schedule = TileSchedule.from_mask(mask, self._config.tile_m, self._config.tile_n)
        self._dropping = ()
        if dropout:
            factor = np.dtype(problem.lse_dtype).type(philox.factor(dropout))
            self._dropping = philox.threshold(dropout), factor
        self._qkv_strides = tuple(three[:3] for three in problem.strides)
        self._backward_passes = {}

    def _table_backward(self, deterministic, vectors):
        return backward_configs(
            self._problem.dtype,
            self._problem.head_dim,
            vectors=vectors,
            smem_limit=self._device.smem_limit,
            deterministic=deterministic,
            vector_red=self._device.vector_red,
        )

    def _does_not_fit(self, direction):
        return ValueError(
            f"impl='simt' has no {direction} kernel for {self._problem.dtype} and head_dim "
            f"{self._problem.head_dim} within the {self._device.smem_limit} bytes of shared "
            f"memory of this device"
        )

    @property
    def _sizes(self):
        p = self._problem
        return p.nq, p.nk, p.heads, p.group

    def _bind(self, spec, schedule, work, scales):
        """Bind sizes and schedule; a call gives the words of tensors, strides, dropout's state."""
        p = self._problem
        tables = (
            work,
            schedule.plane_of(p.batch, p.heads),
            schedule.row_ptr,
            schedule.col_idx,
            schedule.kind,
            schedule.lo,
            schedule.hi,
            schedule.bits,
        )
        constants = (*self._sizes, schedule.n_row, *scales)
        more = self._params, self._dropping
        return self._device.bind(spec, len(work), constants, tables, more)

    def _complete(self, config):
        """A row of a table with what this problem asks for besides."""
        return replace(config, score=self._score, dropout=bool(self._dropping))

    def _state(self, seed):
        """The kernels' argument of that name."""
        return self._device.state(seed) if self._dropping else ()

    @property
    def _q_factor(self):
        """What Q is multiplied with: scores are in base 2, but a score function's are natural."""
        return self._problem.scale * (1.0 if self._score else LOG2_E)

    @cached_property
    def _forward(self):
        p = self._problem
        work = self.schedule.work(p.batch, p.heads)
        spec = fwd_simt_spec(self._complete(self._config))
        return self._bind(spec, self.schedule, work, (self._q_factor,))

    def forward(self, q, k, v, out, lse, seed=None):
        """Write ``out`` and ``lse``."""
        strides = *self._qkv_strides, arrays.strides(out)
        self._forward(self._device.words((q, k, v, out, lse), *strides, self._state(seed)))

    def _passes(self, deterministic, vectors):
        """The bound backward kernels, with their configurations, made once."""
        key = deterministic, vectors
        if key not in self._backward_passes:
            p, schedules, bound = self._problem, {}, []
            configs = self._backward_configs(deterministic, vectors)
            if not configs:
                raise self._does_not_fit("backward")
            for cfg in configs:
                tiles = cfg.tile_m, cfg.tile_n
                if tiles not in schedules:
                    schedules[tiles] = TileSchedule.from_mask(self._mask, *tiles)
                schedule, group = schedules[tiles], 1
                if cfg.walk == "columns":
                    schedule, group = schedule.T, p.group
                work = schedule.work(p.batch, p.heads, group)
                spec = bwd_simt_spec(self._complete(cfg))
                scales = (p.scale, self._q_factor)
                bound.append((cfg, self._bind(spec, schedule, work, scales)))
            self._backward_passes[key] = bound
        return self._backward_passes[key]

    @cached_property
    def _row_kernels(self):
        """Those that make δ and round a sum of dQ, bound."""
        p = self._problem
        rows = p.batch * p.nq * p.heads
        config, sizes = RowConfig(p.dtype, p.head_dim), (p.nq, p.heads, rows)
        return [
            self._device.bind(make(config), blocks_for(rows), sizes)
            for make in (delta_simt_spec, round_simt_spec)
        ]

    def _vectors_with(self, dout):
        """Whether rows of q, k, v and dout may be read four elements at a time."""
        p = self._problem
        alignment = min(p.alignment, arrays.alignment(dout))
        return vectors_allowed(p.dtype, p.head_dim, alignment)

    def _statistics(self, dout, out, lse, dlse):
        """lse and δ − dLSE, contiguous."""
        delta_kernel, _ = self._row_kernels
        lse = lse if lse.flags.c_contiguous else lse.copy()
        delta = self._device.empty(lse.shape, np.dtype(self._problem.lse_dtype))
        strides = map(arrays.strides, (dout, out, dlse))
        delta_kernel(self._device.words((dout, out, dlse, delta), *strides))
        return lse, delta

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=None):
        """Write ``dq``, ``dk`` and ``dv``."""
        passes = self._passes(deterministic, self._vectors_with(dout))
        (_, round_kernel), state = self._row_kernels, self._state(seed)
        lse, delta = self._statistics(dout, out, lse, dlse)
        wide, words = delta.dtype, self._device.words
        for cfg, kernel in passes:
            target = dq
            if cfg.atomic_dq:
                target = dq if dq.dtype == wide else self._device.empty(dq.shape, wide)
                target.fill(0)
            tensors = (q, k, v, dout, lse, delta, target, dk, dv)
            changing = (arrays.strides(x) for x in (dout, target, dk, dv))
            kernel(words(tensors, *self._qkv_strides, *changing, state))
            if target is not dq:
                round_kernel(words((target, dq), *map(arrays.strides, (target, dq))))
