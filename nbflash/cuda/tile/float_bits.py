"""For ``@unrolled`` functions: the bits of a float32, and of an integer with and without a sign."""

import numpy as np

from nbflash.cuda.ptx._asm import types
from nbflash.cuda.ptx.traced import Scalar
from nbflash.cuda.tile.cells import bits_as

ONES = 0x3F800000  # the bits of the float32 1
EXPONENT = 0x7F800000  # of a float32; all ones where it is infinite or NaN
INVERSE = 254 << 23  # less the bits of a power of two: those of its inverse


def bits_float(x):
    """The float32 whose bits are ``x``; no instruction."""
    return x.bits_as(types.float32) if isinstance(x, Scalar) else bits_as(x, np.float32)


def float_bits(x):
    """The bits of a float32 as an int32; no instruction."""
    return x.bits_as(types.int32) if isinstance(x, Scalar) else bits_as(x, np.int32)


def unsigned(x):
    """The bits of an int32 as a uint32; no instruction."""
    return x.bits_as(types.uint32) if isinstance(x, Scalar) else bits_as(x, np.uint32)


def signed(x):
    """The bits of a uint32 as an int32; no instruction."""
    return x.bits_as(types.int32) if isinstance(x, Scalar) else bits_as(x, np.int32)
