"""Tensors of PyTorch in CUDA memory, by address and layout, without importing torch.

Who has a tensor has imported it. A `CudaTensor` takes the place of a CuPy array wherever kernels
are launched; what would compute with it is done by torch, on torch's current stream.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

from nbflash.definitions.constants import VECTOR_BYTES

_NUMPY = "float16", "float32", "float64", "int32", "int64", "int8", "uint8", "bool"
_ML_DTYPES = "bfloat16", "float8_e4m3fn"


class CudaTensor:
    """A tensor in CUDA memory as kernels take it.

    Attributes
    ----------
    tensor : torch.Tensor
    ptr, device_id : int
    steps : tuple
        Strides in elements.
    signature : tuple
        As `nbflash.inputs.arrays.signature`; no array of another library has an equal one.
    shape, strides, dtype
        As of a NumPy array.
    """

    __slots__ = "device_id", "ptr", "signature", "steps", "tensor"

    def __init__(self, tensor):
        self.tensor = tensor
        self.ptr = ptr = tensor.data_ptr()
        self.device_id = device_id = tensor.get_device()
        self.steps = steps = tensor.stride()
        self.signature = tensor.shape, steps, tensor.dtype, device_id, ptr % VECTOR_BYTES

    @property
    def shape(self):
        return tuple(self.tensor.shape)

    @property
    def strides(self):
        size = self.dtype.itemsize
        return tuple([size * step for step in self.steps])

    @property
    def dtype(self):
        return numpy_dtype(self.tensor.dtype)

    @property
    def data(self):
        """What has ``ptr`` and ``device_id`` of a CuPy array."""
        return self

    @property
    def flags(self):
        """What has ``c_contiguous`` of a CuPy array."""
        return self

    @property
    def c_contiguous(self):
        return self.tensor.is_contiguous()

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return self.tensor.numel()

    def copy(self, order="C"):
        """A contiguous copy."""
        torch = sys.modules["torch"]
        return CudaTensor(self.tensor.detach().clone(memory_format=torch.contiguous_format))

    def fill(self, value):
        self.tensor.fill_(value)

    def reshape(self, shape):
        return CudaTensor(self.tensor.reshape(shape))

    def __setitem__(self, index, value):
        self.tensor[index] = value.tensor


def is_tensor(x) -> bool:
    """Whether anything at all is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def operators_for(x):
    """`nbflash.torch` where ``torch.compile`` traces a call that has ``x``, a tensor; else None.

    A trace has no memory to read: the operators of `nbflash.torch`, once it has been imported,
    take the place of the call.
    """
    if not is_tensor(x) or not sys.modules["torch"].compiler.is_compiling():
        return None
    return sys.modules.get("nbflash.torch")


def check_untraced(named) -> None:
    """Raise TypeError for tensors that ``torch.compile`` traces, if nbflash.torch is imported."""
    for name, x in named.items():
        if operators_for(x):
            raise TypeError(
                f"{name} is traced by torch.compile, but this function is not an operator: use "
                "those of nbflash.torch, which autograd differentiates, or torch.compiler.disable"
            )


def is_plain(x) -> bool:
    """Whether a tensor is its memory: no subclass, not sparse, not negated when it is read."""
    kinds, strided = _plain_kinds()
    return type(x) in kinds and x.layout is strided and not x.is_neg()


@functools.cache
def _plain_kinds():
    torch = sys.modules["torch"]
    return (torch.Tensor, torch.nn.Parameter), torch.strided


def by_pointer(given):
    """`CudaTensor` of each; None where one is no plain tensor of CUDA memory, learned or traced."""
    if not is_tensor(given[0]) or sys.modules["torch"].compiler.is_compiling():
        return None
    found = []
    for x in given:
        if not (is_tensor(x) and x.is_cuda and is_plain(x)) or x.requires_grad:
            return None
        found.append(CudaTensor(x))
    return found


def allocator(device_id):
    """``empty(shape, dtype)`` of memory of torch's, on its current stream."""
    torch = sys.modules["torch"]
    empty, device = torch.empty, torch.device("cuda", device_id)

    def new(shape, dtype):
        return CudaTensor(empty(shape, dtype=_torch_dtype(dtype), device=device))

    return new


@functools.cache
def numpy_dtype(dtype) -> np.dtype:
    """That of NumPy, which may be one of ``ml_dtypes``, for one of torch."""
    name = str(dtype).removeprefix("torch.")
    if name in _NUMPY:
        return np.dtype(name)
    if name not in _ML_DTYPES:
        raise TypeError(f"tensors must have a dtype of {[*_NUMPY, *_ML_DTYPES]}, got {dtype}")
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"{dtype} needs ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


@functools.cache
def _torch_dtype(dtype):
    return getattr(sys.modules["torch"], np.dtype(dtype).name)
