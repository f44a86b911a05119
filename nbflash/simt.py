"""The SIMT implementation: which kernels a problem needs, with their arguments bound.

On a GPU a bound kernel is a :class:`nbflash.launch.Launch`; under the simulator the same
argument list goes to the same kernel as NumPy arrays.
"""

from functools import cached_property

import numpy as np

from nbflash import arrays, launch
from nbflash.constants import LOG2_E
from nbflash.kernels.bwd_simt import bwd_simt_spec
from nbflash.kernels.delta_simt import RowConfig, blocks_for, delta_simt_spec
from nbflash.kernels.fwd_simt import fwd_simt_spec
from nbflash.kernels.round_simt import round_simt_spec
from nbflash.kernels.simt_config import backward_configs, forward_config
from nbflash.ptx._asm import SIM
from nbflash.schedule import TileSchedule


def vectors_allowed(dtype, head_dim, alignment):
    """Whether rows may be read four elements at a time."""
    itemsize = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    return head_dim % 4 == 0 and alignment >= min(16, 4 * itemsize)


class SimtExecutor:
    """Forward and backward of one problem and mask on one device (or in the simulator).

    Parameters
    ----------
    problem : nbflash.problem.Problem
    mask : masks.Mask
    config : SimtConfig, optional
        Instead of the forward table's row.
    backward : callable, optional
        Instead of the backward table: ``backward(deterministic, vectors) -> configs``.
    """

    def __init__(self, problem, mask, *, config=None, backward=None):
        self._problem, self._mask = problem, mask
        self._device = _Simulator() if SIM else _Gpu(problem.device_id)
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
        """Bind sizes and schedule; a call gives the tensors and their strides."""
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
        return self._device.bind(spec, len(work), constants, tables)

    @cached_property
    def _forward(self):
        p = self._problem
        work = self.schedule.work(p.batch, p.heads)
        scales = (p.scale * LOG2_E,)
        return self._bind(fwd_simt_spec(self._config), self.schedule, work, scales)

    def forward(self, q, k, v, out, lse):
        """Write ``out`` and ``lse``."""
        self._forward((q, k, v, out, lse), (*self._qkv_strides, arrays.strides(out)))

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
                scales = (p.scale, p.scale * LOG2_E)
                bound.append((cfg, self._bind(bwd_simt_spec(cfg), schedule, work, scales)))
            rows = p.batch * p.nq * p.heads
            row_config, sizes = RowConfig(p.dtype, p.head_dim), (p.nq, p.heads, rows)
            delta, convert = (
                self._device.bind(make(row_config), blocks_for(rows), sizes, ())
                for make in (delta_simt_spec, round_simt_spec)
            )
            self._backward_passes[key] = delta, convert, bound
        return self._backward_passes[key]

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic):
        """Write ``dq``, ``dk`` and ``dv``."""
        p = self._problem
        alignment = min(p.alignment, arrays.alignment(dout))
        vectors = vectors_allowed(p.dtype, p.head_dim, alignment)
        delta_kernel, round_kernel, passes = self._passes(deterministic, vectors)
        wide = np.dtype("float64" if p.dtype == "float64" else "float32")
        lse = lse if lse.flags.c_contiguous else lse.copy()
        delta = self._device.empty(lse.shape, wide)
        delta_kernel((dout, out, dlse, delta), map(arrays.strides, (dout, out, dlse)))
        for cfg, kernel in passes:
            target = dq
            if cfg.atomic_dq:
                target = dq if dq.dtype == wide else self._device.empty(dq.shape, wide)
                target.fill(0)
            tensors = (q, k, v, dout, lse, delta, target, dk, dv)
            changing = (arrays.strides(x) for x in (dout, target, dk, dv))
            kernel(tensors, (*self._qkv_strides, *changing))
            if target is not dq:
                round_kernel((target, dq), map(arrays.strides, (target, dq)))


class _Gpu:
    """Binds and allocates on one CUDA device."""

    def __init__(self, device_id):
        import cupy

        device = cupy.cuda.Device(device_id)
        self._cupy, self._id = cupy, device_id
        self.smem_limit = device.attributes["MaxSharedMemoryPerBlockOptin"]
        self.vector_red = int(device.compute_capability) >= 90
        self.cp_async = int(device.compute_capability) >= 80

    def empty(self, shape, dtype):
        return self._cupy.empty(shape, dtype)

    def bind(self, spec, blocks, constants, tables):
        """A callable ``bound(tensors, strides)``."""
        stream_of = self._cupy.cuda.get_current_stream
        held = arrays.resident(tables)
        addresses = (t.data.ptr for t in held)
        bound = launch.Launch(spec, blocks, (*constants, *addresses), self._id)

        def run(tensors, strides):
            changing = [x.data.ptr for x in tensors]
            for three in strides:
                changing += three
            bound(stream_of().ptr, changing)

        run.tables = held  # alive as long as the kernel that reads them
        return run


class _Simulator:
    """Runs kernels on NumPy arrays; every tensor is flat, as a pointer would be."""

    smem_limit = 227 * 1024
    vector_red = cp_async = True

    def empty(self, shape, dtype):
        return np.full(shape, np.nan, dtype)

    def bind(self, spec, blocks, constants, tables):
        """A callable ``bound(tensors, strides)``."""
        flat_tables = [np.ascontiguousarray(t).reshape(-1) for t in tables]
        wide = np.float64 if spec.config.dtype == "float64" else np.float32
        constants = [wide(c) if isinstance(c, float) else c for c in constants]

        def run(tensors, strides):
            flat = [_flat(x) for x in tensors]
            launch.simulate(spec, blocks, (*flat, *strides, *constants, *flat_tables))

        return run


def _flat(x):
    """All memory that ``x`` reaches, from its first element on, as one axis."""
    if min(x.strides) < 0:
        raise ValueError(f"the simulator takes no negative strides, got {x.strides}; copy it first")
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) // x.itemsize
    if x.dtype.name == "bfloat16":
        x = x.view(np.uint16)
    return np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,))
