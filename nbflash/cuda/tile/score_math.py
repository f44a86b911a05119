"""For ``@unrolled`` functions of scores: conversions, tanh, calls of what Numba has compiled."""

import numpy as np

from nbflash.cuda.ptx._asm import cgutils, cuda_target, inline_ptx, ir, types
from nbflash.cuda.tile.tracing import Memory, Scalar, exp2, fma
from nbflash.cuda.tile.warp_math import approximate_reciprocal


def _libdevice(x, name):
    """``__nv_<name>`` of a floating-point number."""
    signature = ir.FunctionType(x.value.type, [x.value.type])
    name = f"__nv_{name}" + ("f" if x.type.bitwidth == 32 else "")
    function = cgutils.get_or_insert_function(x.builder.module, signature, name)
    return x.new(x.type, x.builder.call(function, [x.value]))


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
        bits = np.tanh(np.float32(x)).view(np.uint32) + np.uint32(0x1000)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    value = inline_ptx(x.builder, "tanh.approx.f32 $0, $1;", "=f,f", x.value.type, [x.value])
    return x.new(x.type, value)


def to_int32(x):
    """An integer in 32 bits."""
    if not isinstance(x, Scalar):
        return x
    return x.new(types.int32, ir.Constant(ir.IntType(32), 0)).like(x)


def to_float(x, model):
    """A signed integer in the floating-point type of ``model``."""
    if not isinstance(x, Scalar):
        return type(model)(x)
    return x.new(model.type, x.builder.sitofp(x.value, model.value.type))


def call(function, model, *arguments):
    """``function(*arguments)``, device code that Numba compiles, in the type of ``model``.

    Arguments are scalars and whole arrays.
    """
    if not isinstance(model, Scalar):
        return type(model)(function(*arguments))
    pairs = [x.whole if isinstance(x, Memory) else (x.type, x.value) for x in arguments]
    kinds, values = zip(*pairs, strict=True)
    typing = cuda_target.typing_context
    callee = typing.resolve_value_type(function)
    signature = typing.resolve_function_type(callee, kinds, {})
    context = model.context
    if context.fndesc is None:  # only typed so far: there is nothing to call from
        return model
    value = context.get_function(callee, signature)(model.builder, values)
    value = context.cast(model.builder, value, signature.return_type, model.type)
    return model.new(model.type, value)
