"""Bits and roundings of NumPy scalars, for the bodies of device functions in the simulator.

A number is put in an array and read again, also as another type: the same values as of ``view``
and ``astype`` of a scalar, in a quarter of their time. No thread waits in between.
"""

import functools

import numpy as np

_word = np.zeros(1, np.uint32)
_word_as = {np.dtype(kind).type: _word.view(kind) for kind in (np.uint32, np.int32, np.float32)}
_halves = np.zeros(2, np.float16)
_packed = _halves.view(np.uint32)


def bits_as(x, kind):
    """The bits of a scalar of four bytes as another type of NumPy."""
    try:
        _word_as[type(x)][0] = x
    except KeyError:
        return x.view(kind)
    return _word_as[kind][0]


def as_uint32(x):
    """``np.uint32(x)`` of an integer from 0 to 2³² − 1."""
    _word[0] = x
    return _word[0]


def as_float32(x):
    """``np.float32(x)``."""
    _word_as[np.float32][0] = x
    return _word_as[np.float32][0]


def pack_float16(low, high):
    """Two numbers rounded to float16, packed."""
    _halves[0], _halves[1] = low, high
    return _packed[0]


@functools.cache
def float32_of(dtype):
    """The float32 of all 2¹⁶ values of float16 or bfloat16, by their bits."""
    words = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float16":
        values = words.view(np.float16).astype(np.float32)
        values[np.isnan(values)] = np.nan  # one NaN of either sign
        values = np.copysign(values, words.view(np.int16))
    else:
        values = (words.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):
            values = values.astype(np.float64).astype(np.float32)  # no NaN that signals
    return list(values)


@functools.cache
def bytes_by(selector):
    """Which four of eight bytes the nibbles of a selector take."""
    return tuple(int(selector) >> 4 * i & 7 for i in range(4))
