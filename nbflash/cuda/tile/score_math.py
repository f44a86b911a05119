"""For ``@unrolled`` functions of scores: conversions, tanh, calls of what Numba has compiled."""

import numpy as np

from nbflash.cuda.ptx._asm import types
from nbflash.cuda.ptx.traced import Scalar, call_device, emit
from nbflash.cuda.tile.cells import as_float32, as_uint32, bits_as
from nbflash.cuda.tile.tracing import exp2, fma
from nbflash.cuda.tile.warp_math import approximate_reciprocal


def _libdevice(x, name):
    """``__nv_<name>`` of a floating-point number."""
    return x.call(f"__nv_{name}" + ("f" if x.type.bitwidth == 32 else ""))


def absolute(x):
    """``|x|`` of a floating-point number."""
    return _libdevice(x, "fabs") if isinstance(x, Scalar) else abs(x)


def tanh(x):
    """``tanh(x)``: libdevice."""
    return _libdevice(x, "tanh") if isinstance(x, Scalar) else np.tanh(x)


def tanh_of_exponent(x):
    """``tanh(x / (2 log2 e))``, within 2^-22: 1 − 2 / (1 + 2^x)."""
    return fma(approximate_reciprocal(exp2(x) + 1.0), -2.0, 1.0)


def approximate_tanh(x):
    """``tanh(x)`` within 2^-11 of it: ``tanh.approx.f32``."""
    if not isinstance(x, Scalar):  # as far off as the instruction may be
        bits = int(bits_as(np.tanh(as_float32(x)), np.uint32)) + 0x1000
        return bits_as(as_uint32(bits & 0xFFFFE000), np.float32)
    return emit("tanh.approx.f32 $0, $1;", [x], x.type)


def to_int32(x):
    """An integer in 32 bits."""
    return x.converted(types.int32) if isinstance(x, Scalar) else x


def to_float(x, model):
    """A signed integer in the floating-point type of ``model``."""
    return x.converted(model.type) if isinstance(x, Scalar) else type(model)(x)


def call(function, model, *arguments):
    """``function(*arguments)``, device code that Numba compiles, in the type of ``model``.

    Arguments are scalars and whole arrays.
    """
    if not isinstance(model, Scalar):
        return type(model)(function(*arguments))
    return call_device(function, model, arguments)
