"""A stand-in for CuPy's arrays that have addresses and no memory; conftest.py has its fixtures."""

import contextlib
import itertools
import types

import numpy as np

SHAPE = (2, 6, 4, 8)
LSE_SHAPE = (2, 4, 6)


class DeviceArray:
    """What nbflash reads of a `cupy.ndarray`."""

    next_address = itertools.count(2**40, 2**20)

    def __init__(self, shape, dtype=np.float32, device_id=0, strides=None, address=None):
        like = np.broadcast_to(np.zeros((), dtype), shape)
        self.shape, self.dtype, self.ndim, self.size = shape, like.dtype, like.ndim, like.size
        packed = np.cumprod([like.dtype.itemsize, *shape[:0:-1]])[::-1]
        self.strides = tuple(int(s) for s in packed) if strides is None else strides
        address = next(self.next_address) if address is None else address
        self.data = types.SimpleNamespace(ptr=address, device_id=device_id)
        self.flags = types.SimpleNamespace(c_contiguous=strides is None)
        self.nbytes = self.size * self.dtype.itemsize
        self.filled = None

    def fill(self, value):
        self.filled = value


class Ampere(contextlib.nullcontext):
    """A device of compute capability 8.0."""

    compute_capability = "80"


class Foreign:
    """Another library's CUDA array: the array interface and nothing else."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.array.shape, "data": (self.array.data.ptr, False)}


class ForeignByDLPack(Foreign):
    def __dlpack__(self):
        return self.array

    def __dlpack_device__(self):
        return 2, 0


class Recorder:
    """An executor that keeps what it is given."""

    def bind_forward(self):
        return types.SimpleNamespace(is_cold=lambda: False)

    schedule = None

    def __init__(self):
        self.calls = []

    def forward(self, *operands):
        self.calls.append(operands)

    backward = forward


def device_arrays(n, **options):
    return [DeviceArray(SHAPE, **options) for _ in range(n)]
