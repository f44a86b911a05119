"""For ``@unrolled`` functions: the bits of a float32, and of an integer with and without a sign."""

import numpy as np

from nbflash.cuda.ptx._asm import ir, types
from nbflash.cuda.tile.tracing import Scalar

ONES = 0x3F800000  # the bits of the float32 1
EXPONENT = 0x7F800000  # of a float32; all ones where it is infinite or NaN
INVERSE = 254 << 23  # less the bits of a power of two: those of its inverse


def bits_float(x):
    """The float32 whose bits are ``x``; no instruction."""
    if not isinstance(x, Scalar):
        return x.view(np.float32)
    return x.new(types.float32, x.builder.bitcast(x.value, ir.FloatType()))


def float_bits(x):
    """The bits of a float32 as an int32; no instruction."""
    if not isinstance(x, Scalar):
        return x.view(np.int32)
    return x.new(types.int32, x.builder.bitcast(x.value, ir.IntType(32)))


def unsigned(x):
    """The bits of an int32 as a uint32; no instruction."""
    return x.new(types.uint32, x.value) if isinstance(x, Scalar) else x.view(np.uint32)


def signed(x):
    """The bits of a uint32 as an int32; no instruction."""
    return x.new(types.int32, x.value) if isinstance(x, Scalar) else x.view(np.int32)
