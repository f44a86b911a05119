"""Everything nbflash knows of NumPy, CuPy and foreign arrays.

Foreign arrays (DLPack, ``__cuda_array_interface__``) become NumPy or CuPy arrays without a copy.
Tensors of PyTorch in CUDA memory are read by pointer: `nbflash.inputs.tensors`. CuPy is imported
when the first CUDA array arrives, not before.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np

from nbflash.definitions.constants import VECTOR_BYTES
from nbflash.inputs import tensors
from nbflash.inputs.tensors import CudaTensor, is_tensor

CPU, CUDA = "cpu", "cuda"
_HOST_DLPACK = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DLPACK = (2, 13)  # kDLCUDA, kDLCUDAManaged
_OVERLAP_WORK = 1_000_000  # bound on an exact answer; layouts that need more count as overlapping
_native_types = {np.ndarray, CudaTensor}


def native(**named):
    """The arrays, in the order given, as NumPy arrays or all as CuPy arrays.

    Raises
    ------
    TypeError
        If an argument is not an array, cannot be shared without a copy, or lives in host memory
        while the first lives in device memory (or the reverse).
    ImportError
        If CUDA arrays arrive and CuPy is not installed.
    """
    tensors.check_untraced(named)
    kinds = {name: _kind(name, x) for name, x in named.items()}
    first, expected = next(iter(kinds.items()))
    for name, kind in kinds.items():
        if kind != expected:
            where = {CPU: "host memory", CUDA: "CUDA memory"}
            raise TypeError(
                f"{name} is a {_type_name(named[name])} in {where[kind]} but {first} is a "
                f"{_type_name(named[first])} in {where[expected]}; move them to one device"
            )
    convert = _to_numpy if expected == CPU else _to_cupy
    return [convert(name, x) for name, x in named.items()]


def are_native(first, *others) -> bool:
    """Whether all are NumPy arrays, or all CuPy arrays, or all tensors by pointer.

    CuPy arrays are recognised from the first `native` on, which imports CuPy.
    """
    kind = type(first)
    if kind not in _native_types:
        return False
    for x in others:  # noqa: SIM110 - all() and a generator cost a microsecond
        if type(x) is not kind:
            return False
    return True


def as_given(x, results):
    """Native arrays, one or a tuple, as arrays of the library of ``x``.

    A result that is not native is the caller's own ``out``, and is returned as it is.
    """
    take = None if type(x) in _native_types else _from_native(x)
    if take is None:
        return results
    if not isinstance(results, tuple):
        return take(results) if type(results) in _native_types else results
    return tuple([take(each) if type(each) in _native_types else each for each in results])


def _from_native(x):
    """The function that makes a native array one of the library of ``x``; None if native ones stay.

    ``from_dlpack`` of the array API's namespace of ``x``, or of the package of its type.
    """
    if is_tensor(x):
        return as_tensor
    if isinstance(x, np.ndarray) or on_cuda(x):
        return None
    if hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
    else:
        namespace = sys.modules.get(type(x).__module__.partition(".")[0])
    return getattr(namespace, "from_dlpack", None)


def as_tensor(x):
    """A tensor of a native array's memory; those that are tensors already stay it."""
    if type(x) is CudaTensor:
        return x.tensor
    torch = sys.modules["torch"]
    if is_tensor(x):
        return x
    if x.dtype.name == "bfloat16":  # which NumPy and CuPy do not export
        return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(x)


def on_cuda(x) -> bool:
    """Whether anything at all is an array of CUDA memory, without importing an array library."""
    cupy = sys.modules.get("cupy")
    if isinstance(x, CudaTensor) or (cupy is not None and isinstance(x, cupy.ndarray)):
        return True
    if _offers_dlpack(x):
        return int(x.__dlpack_device__()[0]) in _CUDA_DLPACK
    return hasattr(x, "__cuda_array_interface__")


def signature(x) -> tuple:
    """What a cached plan fixes of an array: equal signatures need no second validation."""
    kind = type(x)
    if kind is CudaTensor:
        return x.signature
    if kind is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.aligned
    data = x.data
    return x.shape, x.strides, x.dtype, data.device_id, data.ptr % VECTOR_BYTES


def in_rows(x):
    """A native array, or a copy where its last axis is not contiguous: a broadcast one, say."""
    strided = x.ndim and x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize
    return x.copy(order="C") if strided else x


def device_of(x) -> tuple[str, int]:
    """``("cpu", 0)`` or ``("cuda", device id)`` of a native array."""
    return (CPU, 0) if isinstance(x, np.ndarray) else (CUDA, x.data.device_id)


def check_beside_q(what, x, problem) -> None:
    """Raise ValueError unless an array of CUDA memory is on the device of a problem."""
    if device_of(x) != (problem.device, problem.device_id):
        raise ValueError(
            f"{what} on CUDA device {device_of(x)[1]} but q is in {problem.device} memory, "
            f"device {problem.device_id}"
        )


def pointer(x) -> int:
    """Address of the first element of a native array."""
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr


def alignment(*arrays) -> int:
    """Largest power of two up to 16 that divides every base address and stride, in bytes.

    NumPy arrays report their item size: no kernel loads vectors from host memory.
    """
    if isinstance(arrays[0], np.ndarray):
        return arrays[0].dtype.itemsize
    return alignment_in_memory(*arrays)


def alignment_in_memory(*arrays) -> int:
    """:func:`alignment`, of NumPy arrays too."""
    bits = VECTOR_BYTES
    for x in arrays:
        bits |= pointer(x)
        for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True):
            bits |= stride if n > 1 else 0
    return bits & -bits


def allocator(device: str, device_id: int, of_torch: bool = False):
    """``empty(shape, dtype)`` of the device's library and a context that makes it current."""
    if device == CPU:
        return np.empty, contextlib.nullcontext()
    cupy = _cupy()
    empty = tensors.allocator(device_id) if of_torch else cupy.ndarray
    return empty, cupy.cuda.Device(device_id)  # cupy.empty takes twice as long


def library(x):
    """NumPy or CuPy, whose array ``x`` is, and a context that makes its device current."""
    if isinstance(x, np.ndarray):
        return np, contextlib.nullcontext()
    cupy = _cupy()
    return cupy, cupy.cuda.Device(x.data.device_id)


def strides(x) -> tuple[int, int, int]:
    """The first three strides in elements: batch, sequence, head, or those of an LSE."""
    if type(x) is CudaTensor:
        return x.steps[:3]
    first, second, third = x.strides[:3]
    size = x.itemsize
    return first // size, second // size, third // size


def resident(tables):
    """NumPy arrays on the current CUDA device, to be read on any stream."""
    cupy = _cupy()
    # Outside the memory pool: freeing waits for the kernels of every stream.
    with cupy.cuda.using_allocator(None):
        held = [cupy.asarray(np.ascontiguousarray(t)) for t in tables]
    cupy.cuda.get_current_stream().synchronize()
    return held


def resident_params(params):
    """Tuples of numbers and arrays, those of NumPy as `resident` has them."""
    return tuple(
        tuple(resident([x])[0] if isinstance(x, np.ndarray) else x for x in part) for part in params
    )


def unpooled(device: str, device_id: int, shape, dtype):
    """An array that nobody has written, to be written on any stream: as `resident`, of no pool.

    Nor of an allocator that is current for a call alone.
    """
    empty, current = allocator(device, device_id)
    if device == CPU:
        return empty(shape, dtype)
    with current, _cupy().cuda.using_allocator(None):
        return empty(shape, dtype)


def zeros(device: str, device_id: int, shape, dtype):
    """Zeros in the memory of one, under strides of 0, to be read on any stream."""
    if device == CPU:
        return np.broadcast_to(np.zeros((), dtype), shape)
    cupy = _cupy()
    with cupy.cuda.Device(device_id):
        (zero,) = resident([np.zeros((), dtype)])
    return cupy.broadcast_to(zero, shape)


def overlaps(a, b) -> bool:
    """Whether two native arrays share an element; CUDA memory is compared by address alone."""
    if not isinstance(a, np.ndarray):
        (a_low, a_high), (b_low, b_high) = span(a), span(b)
        if a_high <= b_low or b_high <= a_low:
            return False
        a, b = np.asarray(_Address(a)), np.asarray(_Address(b))
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def span(x) -> tuple[int, int]:
    """Addresses of the first byte of an array and of one past its last; equal when it is empty."""
    at, (low, high) = pointer(x), reach(x)
    return at + low, at + high


def meet(reaches, arrays) -> bool:
    """Whether addresses of the first array are among another's; of each array its `reach`."""
    spans = []
    for x, (low, high) in zip(arrays, reaches, strict=True):
        at = pointer(x)
        spans.append((at + low, at + high))
    (low, high), *others = spans
    return any(low < end and begin < high for begin, end in others)


def reach(x) -> tuple[int, int]:
    """As `span`, from the first element on, which follows from the layout alone."""
    low, high = 0, x.dtype.itemsize
    for n, stride in zip(x.shape, x.strides, strict=True):
        if n == 0:
            return low, low
        if stride > 0:
            high += (n - 1) * stride
        else:
            low += (n - 1) * stride
    return low, high


class _Address:
    """Array interface of memory that is compared and never read."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.dtype.itemsize}",
            "data": (pointer(x), True),
        }


def _kind(name, x) -> str:
    """CPU or CUDA for anything array-like, without importing an array library."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; pass the mask as mask=, got {type(x)}")
    if isinstance(x, np.ndarray):
        return CPU
    if on_cuda(x):
        return CUDA
    if _offers_dlpack(x):
        device_type = int(x.__dlpack_device__()[0])
        if device_type in _HOST_DLPACK:
            return CPU
        raise TypeError(
            f"{name} must live in host or CUDA memory, got DLPack device type {device_type}"
        )
    raise TypeError(
        f"{name} must be a NumPy or CuPy array, or offer DLPack or __cuda_array_interface__, "
        f"got {_type_name(x)}"
    )


def _offers_dlpack(x) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")


def _to_numpy(name, x) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    return _share(name, x, _tensor_as_numpy if is_tensor(x) else np.from_dlpack)


def _tensor_as_numpy(x):
    torch = sys.modules["torch"]
    if x.dtype != torch.bfloat16:
        return np.from_dlpack(x)
    import ml_dtypes

    return np.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)


def _to_cupy(name, x):
    cupy = _cupy()
    if isinstance(x, (cupy.ndarray, CudaTensor)):
        return x
    return _share(name, x, cupy.from_dlpack if hasattr(x, "__dlpack__") else cupy.asarray)


def _share(name, x, convert):
    try:
        return convert(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        hint = ""
        if is_tensor(x) and x.requires_grad:
            hint = "; nbflash.torch takes tensors with gradients"
        elif convert is np.from_dlpack and str(getattr(x, "dtype", "")).endswith("bfloat16"):
            hint = f"; NumPy reads no bfloat16 through DLPack: pass numpy.asarray({name})"
        raise TypeError(f"{name} ({_type_name(x)}) cannot be shared: {error}{hint}") from error


def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "CUDA arrays need CuPy: pip install 'nbflash[cuda12]' or 'nbflash[cuda13]'"
        ) from error
    _native_types.add(cupy.ndarray)
    return cupy


def _type_name(x) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
