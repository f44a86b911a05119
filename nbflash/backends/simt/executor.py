"""The SIMT implementation: which kernels a spec needs, with their arguments bound.

Kernels are bound by a `nbflash.cuda.device`: a GPU, or the simulator.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from nbflash.backends.block_plan.host import schedule_of
from nbflash.backends.simt.backward import bwd_simt_spec
from nbflash.backends.simt.configs import backward_configs, forward_config
from nbflash.backends.simt.convert_dq import convert_dq_simt_spec
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.simt.row_statistics import RowConfig, blocks_for, delta_simt_spec
from nbflash.cuda import score_params
from nbflash.cuda.device import cuda_device
from nbflash.cuda.dropout_state import DropoutState
from nbflash.cuda.tile.dropout import dropout_of
from nbflash.definitions import philox
from nbflash.definitions.constants import ITEMSIZE, VECTOR_BYTES, score_factor
from nbflash.inputs import arrays


def vectors_allowed(dtype, head_dim, alignment):
    """Whether rows may be read four elements at a time."""
    itemsize = ITEMSIZE.get(dtype, 1)
    return head_dim % 4 == 0 and alignment >= min(VECTOR_BYTES, 4 * itemsize)


class SimtLaunches:
    """What the kernels of one `AttentionSpec` share: a device, parameters, and how they are bound.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    backward : callable, optional
        Instead of the backward table: ``backward(deterministic, vectors) -> configs``.
    device : optional
        Instead of the CUDA device of the spec.
    """

    def __init__(self, spec, backward=None, device=None):
        self.spec = spec
        self.problem = problem = spec.problem
        self.device = device or cuda_device(problem.device_id, problem.of_torch)
        self.score, given = score_params.prepare(spec.score, problem, self.device.capability)
        self._params, self._dropping = self.device.params(given), ()
        if spec.dropout:
            self._dropping = philox.threshold(spec.dropout), philox.factor(spec.dropout)
        self.state = DropoutState(self.device, spec)
        self.qkv_strides = tuple(three[:3] for three in problem.strides)
        self._backward = backward

    def _table_backward(self, deterministic, vectors):
        return backward_configs(
            self.problem.dtype,
            self.problem.head_dim,
            vectors=vectors,
            smem_limit=self.device.smem_limit,
            deterministic=deterministic,
            vector_red=self.device.vector_red,
        )

    def backward_configs(self, deterministic, vectors):
        """The configurations of a backward pass; ValueError if none fits the device."""
        configs = (self._backward or self._table_backward)(deterministic, vectors)
        if not configs:
            raise self.does_not_fit("backward")
        return configs

    def does_not_fit(self, direction):
        """The error of a device without room for a kernel."""
        return ValueError(
            f"impl='simt' has no {direction} kernel for {self.problem.dtype} and head_dim "
            f"{self.problem.head_dim} within the {self.device.smem_limit} bytes of shared "
            f"memory of this device"
        )

    def complete(self, config):
        """A row of a table with what the spec asks for besides."""
        return replace(config, score=self.score, dropout=dropout_of(self.spec))

    @property
    def q_factor(self):
        """What Q is multiplied with."""
        return score_factor(self.problem.scale, self.score is not None)

    def schedule_of(self, config):
        """Of the spec's mask, in the tiles of a configuration."""
        return schedule_of(self.device, self.spec, config.tile_m, config.tile_n)

    def bind(self, spec, schedule, scales, group=1):
        """Bind sizes and schedule; a call gives the words of tensors, strides, dropout's state."""
        p = self.problem
        tables, items = (
            schedule.tables(p.batch, p.heads, group),
            schedule.n_row * p.batch * p.heads // group,
        )
        constants = (p.nq, p.nk, p.heads, p.group, schedule.n_row, *scales)
        return self.device.bind(spec, items, constants, tables, (self._params, self._dropping))

    @cached_property
    def row_kernels(self):
        """Those that make δ and convert a sum of dQ, bound."""
        p = self.problem
        rows = p.batch * p.nq * p.heads
        config, sizes = RowConfig(p.dtype, p.head_dim), (p.nq, p.heads, rows)
        return [
            self.device.bind(make(config), blocks_for(rows), sizes)
            for make in (delta_simt_spec, convert_dq_simt_spec)
        ]

    def vectors_with(self, dout):
        """Whether rows of q, k, v and dout may be read four elements at a time."""
        p = self.problem
        alignment = min(p.alignment, arrays.alignment(dout))
        return vectors_allowed(p.dtype, p.head_dim, alignment)

    def statistics(self, dout, out, lse, dlse):
        """lse and δ − dLSE, contiguous."""
        delta_kernel, _ = self.row_kernels
        lse = lse if lse.flags.c_contiguous else lse.copy()
        delta = self.device.empty(lse.shape, np.dtype(self.problem.lse_dtype))
        strides = map(arrays.strides, (dout, out, dlse))
        delta_kernel(self.device.words((dout, out, dlse, delta), *strides))
        return lse, delta


class SimtExecutor:
    """Forward and backward of one `AttentionSpec` on one device, or in the simulator.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    config : SimtConfig, optional
        Instead of the forward table's row.
    backward : callable, optional
        As of `SimtLaunches`.
    device : optional
        Instead of the CUDA device of the spec.
    """

    two_passes = None

    def __init__(self, spec, *, config=None, backward=None, device=None):
        self._launches = launches = SimtLaunches(spec, backward, device)
        problem, device = spec.problem, launches.device
        vectors = vectors_allowed(problem.dtype, problem.head_dim, problem.alignment)
        self._config = config or forward_config(
            problem.dtype,
            problem.head_dim,
            vectors=vectors,
            smem_limit=device.smem_limit,
            cp_async=device.cp_async,
        )
        if self._config is None:
            raise launches.does_not_fit("forward")
        self.schedule = launches.schedule_of(self._config)
        self._backward_passes = {}

    @cached_property
    def _forward(self):
        shared = self._launches
        spec = fwd_simt_spec(shared.complete(self._config))
        return shared.bind(spec, self.schedule, (shared.q_factor,))

    def forward(self, q, k, v, out, lse, seed=None, lists=()):
        """Write ``out`` and ``lse``."""
        shared = self._launches
        strides = *shared.qkv_strides, arrays.strides(out)
        words = shared.device.words((q, k, v, out, lse), *strides, shared.state(seed))
        self._forward(words, (), lists)

    def bind_forward(self):
        """The kernel of `forward`, bound."""
        return self._forward

    def bind_backward(self, deterministic=False):
        """Bind the kernels of `backward`, for a gradient that is aligned as q, k and v."""
        shared, p = self._launches, self._launches.problem
        self._passes(deterministic, vectors_allowed(p.dtype, p.head_dim, p.alignment))
        shared.row_kernels  # noqa: B018 - a cached property

    def _passes(self, deterministic, vectors):
        """The bound backward kernels, with their configurations, made once."""
        key = deterministic, vectors
        if key not in self._backward_passes:
            shared, schedules, bound = self._launches, {}, []
            p = shared.problem
            for cfg in shared.backward_configs(deterministic, vectors):
                tiles = cfg.tile_m, cfg.tile_n
                if tiles not in schedules:
                    schedules[tiles] = shared.schedule_of(cfg)
                schedule, group = schedules[tiles], 1
                if cfg.walk == "columns":
                    schedule, group = schedule.T, p.group
                spec, scales = bwd_simt_spec(shared.complete(cfg)), (p.scale, shared.q_factor)
                bound.append((cfg, shared.bind(spec, schedule, scales, group)))
            self._backward_passes[key] = bound
        return self._backward_passes[key]

    def backward(
        self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=None, lists=()
    ):
        """Write ``dq``, ``dk`` and ``dv``."""
        shared = self._launches
        passes = self._passes(deterministic, shared.vectors_with(dout))
        (_, convert_dq), state = shared.row_kernels, shared.state(seed)
        lse, delta = shared.statistics(dout, out, lse, dlse)
        wide, words, empty = delta.dtype, shared.device.words, shared.device.empty
        for cfg, kernel in passes:
            target = dq
            if cfg.atomic_dq:
                target = dq if dq.dtype == wide else empty(dq.shape, wide)
                target.fill(0)
            tensors = (q, k, v, dout, lse, delta, target, dk, dv)
            changing = (arrays.strides(x) for x in (dout, target, dk, dv))
            kernel(words(tensors, *shared.qkv_strides, *changing, state), (), lists)
            if target is not dq:
                convert_dq(words((target, dq), *map(arrays.strides, (target, dq))))
