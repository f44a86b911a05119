"""8-bit quantised caches to packed float16, in registers: int8 and fp8 (e4m3)."""

import functools

import numpy as np

from nbflash.cuda.ptx._asm import types
from nbflash.cuda.ptx.traced import Scalar, emit
from nbflash.cuda.tile.float_bits import unsigned
from nbflash.cuda.tile.warp_math import permute, subtract_float16


def _widened(pair):
    """Two of fp8 (e4m3) as two packed float16: ``cvt.rn.f16x2.e4m3x2``."""
    if not isinstance(pair, Scalar):
        return _widened_bits(int(pair) & 0xFFFF)
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
    return emit(text, [pair], types.uint32)


@functools.cache
def _widened_bits(pair):
    codes = np.array([pair], np.uint16).view(np.uint8)
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), codes & 7
    size = np.ldexp(
        np.where(exponent == 0, fraction, 8 + fraction) / 8, np.maximum(exponent, 1) - 7
    )
    size[codes & 127 == 127] = np.nan
    return np.copysign(size, codes.view(np.int8)).astype(np.float16).view(np.uint32)[0]


def _int8(word):
    """b = x + 128 below an exponent is 1024 + b (0x64bb), from which 1152 is subtracted."""
    word = unsigned(word) ^ 0x80808080
    pairs = (permute(word, 0x64646464, selector) for selector in (0x4140, 0x4342))
    return tuple(subtract_float16(x, 0x64806480) for x in pairs)


def _float8_e4m3fn(word):
    return _widened(word), _widened(word >> 16)


#: ``FLOAT16[stored](word)``: the four of an int32 as two words of float16, which has all of them.
FLOAT16 = {"int8": _int8, "float8_e4m3fn": _float8_e4m3fn}
#: ``NAN_BYTES[stored](word)``: not 0 if one of an int32's four is NaN.
NAN_BYTES = {
    "int8": lambda word: word * 0,
    "float8_e4m3fn": lambda word: ((unsigned(word) & 0x7F7F7F7F) + 0x01010101) & 0x80808080,
}
