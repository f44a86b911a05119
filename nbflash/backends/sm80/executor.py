"""The portable tensor-core implementation: which kernels a spec needs, with arguments bound."""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nbflash.backends.block_plan.host import fitting, schedule_of
from nbflash.backends.sm80.backward import bwd_sm80_spec
from nbflash.backends.sm80.config import backward_configs, forward_configs
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.backends.sm80.row_kernels import (
    RowConfig,
    blocks_for_pieces,
    blocks_for_rows,
    convert_dq_sm80_spec,
    statistics_sm80_spec,
)
from nbflash.cuda import score_params
from nbflash.cuda.device import cuda_device
from nbflash.cuda.dropout_state import DropoutState
from nbflash.cuda.tile.dropout import dropout_of
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions import philox
from nbflash.definitions.constants import VECTOR_BYTES, tensor_core_factor
from nbflash.inputs import arrays
from nbflash.schedule.tile_choice import fastest

# Of `fastest`, from causal masks and windows of 512 to 4096 tokens on an H200: notes/sm80.md.
MASKED, ROW_COST = 1.4, 8000


def choose(direction, configs, mask):
    """Of the configurations of a direction the one that computes a mask fastest."""
    by_columns = direction == "backward"
    return fastest(fitting(configs, mask), mask, MASKED, ROW_COST, by_columns)


class _Backward(NamedTuple):
    """A backward with its kernels bound."""

    scratch: object  # what allocates the queries' numbers, and dQ's accumulator
    statistics: object
    walks: list  # of (whether it adds to the accumulator, kernel)
    convert: object


class Sm80Executor:
    """Forward and backward of one `AttentionSpec` on one device, or in the simulator.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    config : Sm80Config, optional
        Instead of the forward table's row.
    backward : callable, optional
        Instead of the backward table: ``backward(deterministic) -> configs``.
    device : optional
        Instead of the CUDA device of the spec.
    """

    two_passes = None

    def __init__(self, spec, *, config=None, backward=None, device=None):
        self._spec, self._problem = spec, spec.problem
        self._device = device or cuda_device(spec.problem.device_id, spec.problem.of_torch)
        capability, problem = self._device.capability, spec.problem
        self._score, params = score_params.prepare(spec.score, problem, capability)
        self._params, self._state = self._device.params(params), DropoutState(self._device, spec)
        self._backward_configs, self._backwards = backward, {}
        self._config = config or self._table_forward()
        self.schedule = self._schedule_of(self._config)
        self._qkv_strides = tuple(three[:3] for three in problem.strides)

    def _schedule_of(self, config):
        return schedule_of(self._device, self._spec, config.tile_m, config.tile_n)

    def _table_forward(self):
        configs = forward_configs(
            self._problem.dtype, self._problem.head_dim, smem_limit=self._device.smem_limit
        )
        return self._fastest("forward", configs)

    def _table_backward(self, deterministic):
        found = backward_configs(
            self._problem.dtype,
            self._problem.head_dim,
            smem_limit=self._device.smem_limit,
            deterministic=deterministic,
            vector_red=self._device.vector_red,
            dropout=bool(self._spec.dropout),
        )
        passes = {by_columns: (*others, by_columns) for *others, by_columns in found}
        return passes[self._fastest("backward", list(passes))]

    def _fastest(self, direction, configs):
        if not configs:
            raise ValueError(
                f"impl='sm80' has no {direction} kernel for head_dim {self._problem.head_dim} "
                f"within the {self._device.smem_limit} bytes of shared memory of this device"
            )
        return choose(direction, configs, self._spec.mask)

    def _complete(self, config, schedule):
        """A row of a table with what the spec asks for besides."""
        return replace(
            config,
            negate=self._problem.scale < 0,
            full_tiles=schedule.full_tiles,
            score=self._score,
            dropout=dropout_of(self._spec),
        )

    @property
    def _factor(self):
        return tensor_core_factor(self._problem.scale, self._score is not None)

    def _bind(self, spec, schedule, sizes, dropping, group=1):
        p, s = self._problem, schedule
        tables, items = s.tables(p.batch, p.heads, group), s.n_row * p.batch * p.heads // group
        constants = p.nq, p.nk, p.heads, p.group, s.n_row, *sizes
        return self._device.bind(spec, items, constants, tables, (self._params, dropping))

    @cached_property
    def _forward(self):
        spec = fwd_sm80_spec(self._complete(self._config, self.schedule))
        dropping = dropping_of(self._spec.dropout)
        return self._bind(spec, self.schedule, (self._factor,), dropping)

    def forward(self, q, k, v, out, lse, seed=None, lists=()):
        """Write ``out`` and ``lse``."""
        if not _in_chunks(out):
            target = self._device.empty(out.shape, out.dtype)
            self.forward(q, k, v, target, lse, seed, lists)
            out[...] = target
            return
        strides = *self._qkv_strides, arrays.strides(out)
        words = self._device.words((q, k, v, out, lse), *strides, self._state(seed))
        self._forward(words, (), lists)

    def bind_forward(self):
        """The kernel of `forward`, bound."""
        return self._forward

    def bind_backward(self, deterministic=False):
        """Bind the kernels of `backward`."""
        self._bound(deterministic)

    def _bound(self, deterministic):
        """The kernels of a backward, bound once."""
        found = self._backwards.get(deterministic)
        if found is None:
            found = self._backwards[deterministic] = self._bind_backward(deterministic)
        return found

    def _bind_backward(self, deterministic):
        p, device, dropout = self._problem, self._device, self._spec.dropout
        configs = (self._backward_configs or self._table_backward)(deterministic)
        padded = max(-(-p.nq // cfg.tile_m) * cfg.tile_m for cfg in configs)
        rows, walks, convert = p.batch * p.heads * padded, [], None
        factor = philox.factor(dropout) if dropout else 1.0
        row, dropping = RowConfig(p.dtype, p.head_dim), dropping_of(dropout, inverse=True)
        for cfg in configs:
            schedule, group = self._schedule_of(cfg), 1
            if cfg.walk == "columns":
                schedule, group = schedule.T, p.group
            if cfg.atomic_dq:
                row = replace(row, width=cfg.tile.width, vector_red=cfg.vector_red)
                sizes = p.nq, p.heads, padded, rows // 16, float(p.scale * factor)
                convert = device.bind(
                    convert_dq_sm80_spec(row), blocks_for_pieces(row, rows), sizes
                )
            sizes = padded, p.scale, self._factor
            spec = bwd_sm80_spec(self._complete(cfg, schedule))
            walks.append((cfg.atomic_dq, self._bind(spec, schedule, sizes, dropping, group)))
        sizes = p.nq, p.heads, padded, rows, 1.0 / factor
        statistics = device.bind(statistics_sm80_spec(row), blocks_for_rows(rows), sizes)
        shapes = (rows,), (rows,), (max(rows * row.width, 1),)  # without an accumulator one number
        scratch = device.scratch(shapes, np.dtype(np.float32))
        return _Backward(scratch, statistics, walks, convert)

    def backward(
        self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=None, lists=()
    ):
        """Write ``dq``, ``dk`` and ``dv``."""
        bound, words = self._bound(deterministic), self._device.words
        dout, out = map(_aligned, (dout, out))
        lse = lse if lse.flags.c_contiguous else lse.copy()
        _memory, (shift, delta, total) = bound.scratch()  # which is free when nobody holds it
        strides = map(arrays.strides, (dout, out, dlse))
        bound.statistics(words((dout, out, lse, dlse, shift, delta, total), *strides))
        strides = [arrays.strides(x) for x in (dout, dq, dk, dv)]
        for adds, kernel in bound.walks:
            tensors = q, k, v, dout, shift, delta, total if adds else dq, dk, dv
            kernel(words(tensors, *self._qkv_strides, *strides, self._state(seed)), (), lists)
        if bound.convert is not None:
            bound.convert(words((total, dq), arrays.strides(dq)))


def _in_chunks(x):
    """Whether the rows of an array lie in whole chunks of 16 bytes."""
    strides = arrays.strides(x)
    bits = arrays.pointer(x) | x.itemsize * (strides[0] | strides[1] | strides[2])
    return bits % VECTOR_BYTES == 0


def _aligned(x):
    """An array whose rows are whole chunks: itself, or a copy."""
    return x if _in_chunks(x) else x.copy()
