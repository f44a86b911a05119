"""Parameters of score functions: what is taken, what stands for it in the key of a plan.

What lies in host memory is copied and does not change. An array in CUDA memory is read where it is
by every kernel: a step of training changes it in place and needs no other plan. In a key it is its
address, which is no other array's as long as a score holds it.
"""

import hashlib

import numpy as np

from nbflash.definitions.constants import HALF_PRECISION
from nbflash.inputs.arrays import check_beside_q, device_of, native, on_cuda, pointer


def parameter(name, x, axes="", ndim=None):
    """A read-only copy, of float64 if Python's numbers are given; a CuPy array of CUDA memory.

    Raises
    ------
    TypeError
        If it is no array or number, or not of floating point, integers or bool.
    ValueError
        If its shape is not that of ``axes``, or kernels cannot read it where it is.
    """
    x = _in_place(name, x) if on_cuda(x) else _copied(name, x)
    x = x.reshape(1) if x.ndim == 0 and ndim == 1 else x
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} must have shape {axes}, got {x.shape}")
    if x.dtype.kind not in "iub" and x.dtype.name not in ("float32", "float64"):
        raise TypeError(f"{name} must be of float32, float64, integers or bool, got {x.dtype}")
    return x


def key_of(x):
    """What stands for a parameter in a key: host arrays may be as large as all scores."""
    if on_cuda(x):
        content = *device_of(x), pointer(x)
    else:
        content = hashlib.blake2b(np.ascontiguousarray(x), digest_size=16).digest()
    return x.shape, x.dtype.str, content


def check_place(name, x, problem):
    """Raise unless the kernels of a problem can read an array of CUDA memory as it is."""
    if not on_cuda(x):
        return
    check_beside_q(f"score: {name} has an array", x, problem)
    if x.dtype.kind == "f" and x.dtype != problem.lse_dtype:
        raise TypeError(
            f"score: {name} has an array of {x.dtype} in CUDA memory, where it is not copied; for "
            f"q of {problem.dtype} convert it to {problem.lse_dtype}"
        )


def _copied(name, given):
    keeps_type = isinstance(given, (np.ndarray, np.generic))
    try:
        x = np.array(given, dtype=None if keeps_type else np.float64)
        if given is None:
            raise TypeError("None is no number")  # NumPy would make it NaN
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a NumPy or CuPy array, a list or a number: {error}"
        ) from error
    if x.dtype.name in HALF_PRECISION:
        x = x.astype(np.float32)
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    x.flags.writeable = False
    return x


def _in_place(name, x):
    (x,) = native(**{name: x})
    if x.ndim == 0:
        raise ValueError(f"{name} must have an axis in CUDA memory, got shape (); pass a number")
    if not x.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous in CUDA memory, where it is not copied, got strides "
            f"{x.strides}; copy it first"
        )
    return x
