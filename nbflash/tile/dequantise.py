"""Caches of one byte to float32, in registers: int8 and fp8 (e4m3)."""

import numpy as np

from nbflash.ptx._asm import inline_ptx, ir, types
from nbflash.tile.unroll import Scalar
from nbflash.tile.warp_math import unpack_half


def bits_float(x):
    """The float32 whose bits are ``x``; no instruction."""
    if not isinstance(x, Scalar):
        return x.view(np.float32)
    return x.new(types.float32, x.builder.bitcast(x.value, ir.FloatType()))


def unsigned(x):
    """The bits of an int32 as a uint32; no instruction."""
    return x.new(types.uint32, x.value) if isinstance(x, Scalar) else x.view(np.uint32)


def signed(x):
    """The bits of a uint32 as an int32; no instruction."""
    return x.new(types.int32, x.value) if isinstance(x, Scalar) else x.view(np.int32)


def _int8(word):
    """Each byte, its sign flipped, as the last bits of 2^23; that and 128 are subtracted."""
    flipped = unsigned(word) ^ 0x80808080
    return tuple(
        bits_float(((flipped >> 8 * i) & 0xFF) | 0x4B000000) - (2.0**23 + 128) for i in range(4)
    )


def _widened(pair):
    """Two of fp8 (e4m3) as two packed float16, which has all their values."""
    if not isinstance(pair, Scalar):
        codes = np.array([pair]).view(np.uint8)[:2]
        exponent, fraction = (codes >> 3 & 15).astype(np.int32), codes & 7
        size = np.ldexp(
            np.where(exponent == 0, fraction, 8 + fraction) / 8, np.maximum(exponent, 1) - 7
        )
        size[codes & 127 == 127] = np.nan
        return np.copysign(size, codes.view(np.int8)).astype(np.float16).view(np.uint32)[0]
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
    value = inline_ptx(pair.builder, text, "=r,r", ir.IntType(32), [pair.value])
    return pair.new(types.uint32, value)


def _float8_e4m3fn(word):
    """By way of float16: ``cvt.rn.f16x2.e4m3x2``."""
    return (*unpack_half("float16", _widened(word)), *unpack_half("float16", _widened(word >> 16)))


#: ``UNPACK[dtype](word)``: the four float32 of an int32, lowest byte first.
UNPACK = {"int8": _int8, "float8_e4m3fn": _float8_e4m3fn}
