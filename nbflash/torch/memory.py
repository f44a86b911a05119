"""Tensors as native arrays of the same memory, and CuPy's work on torch's stream.

What kernels allocate within `on_device_of` comes from torch's allocator: its memory belongs to the
current stream of torch, as that of every tensor, and to the graph that records the stream.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from nbflash.cuda.streams import external_stream
from nbflash.definitions.constants import VECTOR_BYTES
from nbflash.inputs.tensors import CudaTensor, numpy_dtype

# What NumPy does not have leaves torch as integers of its size.
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def check_tensor(name: str, x) -> None:
    """Raise TypeError for anything but a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of sums over ``dtype`` and of the lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def native_of(x: torch.Tensor):
    """A NumPy array that shares the memory of a tensor, or a `CudaTensor`."""
    if x.is_cuda:
        return CudaTensor(x)
    if x.dtype in _AS_INTEGERS:
        return x.detach().view(_AS_INTEGERS[x.dtype]).numpy().view(numpy_dtype(x.dtype))
    return x.detach().numpy()


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the kernels cannot read it: its last axis is not contiguous.

    Also in CUDA memory where rows are not aligned: the Hopper kernels would leave it to slower
    ones.
    """
    *steps, last = x.stride()
    if last != 1 and x.shape[-1] > 1:
        return x.contiguous()
    if not x.is_cuda or x.element_size() != 2:
        return x
    batch, row, head = steps
    if not (x.data_ptr() | 2 * (batch | row | head)) % VECTOR_BYTES or _aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> bool:
    """Whether rows are aligned, but for steps along axes of one, which are not made."""
    bits = x.data_ptr()
    for n, stride in zip(x.shape[:-1], x.stride(), strict=False):
        bits |= 2 * stride if n > 1 else 0
    return bits % VECTOR_BYTES == 0


def host_copy(name: str, x: torch.Tensor, remedy: str) -> torch.Tensor:
    """A tensor in host memory; RuntimeError with a remedy while a CUDA graph is recorded."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"nbflash reads {name} on the host, which is not possible while a CUDA graph is "
            f"recorded: {remedy}"
        )
    return x.detach().cpu()


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
    """The number of a stream is all that CuPy keeps of it."""
    return external_stream(_cupy(), device, stream)


def _memory_of_torch(nbytes: int):
    """What CuPy calls to allocate: free when its last array is gone, as a tensor's memory is."""
    cupy = _cupy()
    device = cupy.cuda.runtime.getDevice()
    held = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    memory = cupy.cuda.UnownedMemory(held.data_ptr(), nbytes, held, device)
    return cupy.cuda.MemoryPointer(memory, 0)


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
