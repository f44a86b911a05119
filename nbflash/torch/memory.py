"""Tensors as NumPy and CuPy arrays of the same memory, and CUDA work on torch's stream.

What kernels allocate within `on_device_of` comes from torch's allocator: its memory belongs to the
current stream of torch, as that of every tensor, and to the graph that records the stream.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import numpy as np
import torch

_NUMPY = {
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
# What NumPy does not have is of ml_dtypes, and leaves torch as integers of its size.
_ML_DTYPES = {
    torch.bfloat16: ("bfloat16", torch.int16),
    torch.float8_e4m3fn: ("float8_e4m3fn", torch.uint8),
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of sums over ``dtype`` and of the lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def array_of(x: torch.Tensor):
    """A NumPy array, or a CuPy array of CUDA memory, that shares the memory of a tensor."""
    if x.is_cuda:
        return _cupy_array(x)
    if x.dtype in _ML_DTYPES:
        return x.detach().view(_ML_DTYPES[x.dtype][1]).numpy().view(numpy_dtype(x.dtype))
    return x.detach().numpy()


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype of `array_of`, which may be one of ``ml_dtypes``."""
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype not in _ML_DTYPES:
        raise TypeError(f"tensors must have a dtype of {[*_NUMPY, *_ML_DTYPES]}, got {dtype}")
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"{dtype} needs ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype][0]))


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the kernels cannot read it: its last axis is not contiguous.

    Also in CUDA memory where rows are not aligned: the Hopper kernels would leave it to slower
    ones.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.contiguous()
    if x.is_cuda and x.element_size() == 2 and not _aligned(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _aligned(x: torch.Tensor) -> bool:
    bits = x.data_ptr()
    for n, stride in zip(x.shape[:-1], x.stride(), strict=False):
        bits |= 2 * stride if n > 1 else 0
    return bits % 16 == 0


def on_device_of(x: torch.Tensor):
    """A context in which CuPy works on the device and the current stream of torch."""
    if not x.is_cuda:
        return contextlib.nullcontext()
    return _on_cuda(x.device.index, torch.cuda.current_stream(x.device).cuda_stream)


@contextlib.contextmanager
def _on_cuda(device: int, stream: int):
    cupy = _cupy()
    with (
        cupy.cuda.Device(device),
        _stream(device, stream),
        cupy.cuda.using_allocator(_memory_of_torch),
    ):
        yield


@functools.cache
def _stream(device: int, stream: int):
    """The number of a stream is all that CuPy keeps of it; ``device`` is the current one."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14.2 deprecates the other
        return cuda.Stream.from_external(_Stream(stream))
    return cuda.ExternalStream(stream, device)


class _Stream(NamedTuple):
    """A stream by the protocol that libraries share."""

    number: int

    def __cuda_stream__(self):
        return 0, self.number


def _memory_of_torch(nbytes: int):
    """What CuPy calls to allocate: free when its last array is gone, as a tensor's memory is."""
    cupy = _cupy()
    device = cupy.cuda.runtime.getDevice()
    held = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    memory = cupy.cuda.UnownedMemory(held.data_ptr(), nbytes, held, device)
    return cupy.cuda.MemoryPointer(memory, 0)


def _cupy_array(x: torch.Tensor):
    cupy, size = _cupy(), x.element_size()
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.numel() * size, x, x.device.index)
    start = cupy.cuda.MemoryPointer(memory, 0)
    strides = [size * stride for stride in x.stride()]
    return cupy.ndarray(tuple(x.shape), numpy_dtype(x.dtype), start, strides)


@functools.cache
def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "CUDA tensors need CuPy: pip install 'nbflash[cuda12]' or 'nbflash[cuda13]'"
        ) from error
    from nbflash.inputs import arrays

    arrays.native(x=cupy.ndarray((0,)))  # from now on arrays of CuPy are recognised
    return cupy
