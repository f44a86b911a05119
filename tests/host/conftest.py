"""A machine with a GPU, or with CuPy alone, as far as the host's code can tell."""

import contextlib
import sys
import types

import numpy as np
import pytest
from cuda_arrays import Ampere, DeviceArray, Recorder

from nbflash.cuda import availability
from nbflash.inputs import arrays
from nbflash.planning import cache
from nbflash.planning import plan as planning


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    module.ndarray = module.empty = DeviceArray
    module.asarray = lambda x: (
        DeviceArray(x.shape, x.dtype) if isinstance(x, np.ndarray) else x.array
    )
    module.from_dlpack = lambda x: x.__dlpack__()
    module.broadcast_to = lambda x, shape: DeviceArray(shape, x.dtype, strides=(0,) * len(shape))
    stream = types.SimpleNamespace(synchronize=lambda: None, ptr=0)
    module.cuda = types.SimpleNamespace(
        Device=Ampere,
        using_allocator=contextlib.nullcontext,
        get_current_stream=lambda: stream,
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(arrays, "_native_types", {np.ndarray, arrays.CudaTensor})
    monkeypatch.setattr(cache, "plans", cache.PlanCache(16))
    return module


@pytest.fixture
def executor(cupy, monkeypatch):
    """A machine with a GPU whose kernels record their operands."""
    recorder = Recorder()
    monkeypatch.setattr(availability, "why_not_cuda", lambda: [])
    monkeypatch.setattr(planning, "prepare", lambda *what: recorder)
    return recorder
