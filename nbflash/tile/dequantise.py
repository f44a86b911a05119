"""Caches of one byte to packed 16-bit numbers, in registers: int8 and fp8 (e4m3)."""

import numpy as np

from nbflash.ptx._asm import inline_ptx, ir, types
from nbflash.tile.unroll import Scalar
from nbflash.tile.warp_math import pack_half, permute, subtract_halves, unpack_half

ONES = 0x3F800000  # the bits of the float32 1
EXPONENT = 0x7F800000  # of a float32; all ones where it is infinite or NaN


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


def _int8(dtype, word):
    """By bytes put below an exponent, and what that adds subtracted:

        float16     0x64bb, b = x + 128        1024 + b − 1152
        bfloat16    0x43bb, b = x modulo 256   128 + b % 128 − (128, or 256 if x < 0)
    """
    word = unsigned(word)
    if dtype == "float16":
        pairs = (permute(word ^ 0x80808080, 0x64646464, s) for s in (0x4140, 0x4342))
        return tuple(subtract_halves(dtype, x, 0x64806480) for x in pairs)
    pairs = (permute(word, 0x43434343, s) for s in (0x4140, 0x4342))
    return tuple(subtract_halves(dtype, x & 0xFF7FFF7F, x & 0xFF80FF80) for x in pairs)


def _float8_e4m3fn(dtype, word):
    """By way of float16: ``cvt.rn.f16x2.e4m3x2``."""
    pairs = _widened(word), _widened(word >> 16)
    if dtype == "float16":
        return pairs
    return tuple(pack_half(dtype, *unpack_half("float16", x)) for x in pairs)


#: ``HALVES[stored](dtype, word)``: the four of an int32 as two words of packed ``dtype``, exactly.
HALVES = {"int8": _int8, "float8_e4m3fn": _float8_e4m3fn}
#: ``NAN_BYTES[stored](word)``: not 0 if one of an int32's four is NaN.
NAN_BYTES = {
    "int8": lambda word: word * 0,
    "float8_e4m3fn": lambda word: ((unsigned(word) & 0x7F7F7F7F) + 0x01010101) & 0x80808080,
}
