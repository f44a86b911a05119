"""Bits and roundings of scalars by way of an array are those of NumPy's own scalars."""

import struct

import numpy as np
import pytest
from numba.cuda import types

from nbflash.cuda.tile import cells
from nbflash.cuda.tile.dequantise import FLOAT16
from nbflash.cuda.tile.warp_math import permute

# Zeros, infinities, NaN that are quiet, that signal and of either sign, midpoints of float16, its
# largest number and what rounds beyond it, subnormal numbers.
SPECIAL = (
    *(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001),
    *(0x3F801000, 0x3F803000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 1),
)


@pytest.fixture
def words():
    drawn = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    return np.concatenate([np.array(SPECIAL, np.uint32), drawn])


def test_bits_are_kept(words):
    for kind in (np.uint32, np.int32, np.float32):
        for scalar in words.view(kind):
            for other in (np.uint32, np.int32, np.float32):
                found = cells.bits_as(scalar, other)
                assert type(found) is other
                assert found.tobytes() == scalar.tobytes()


def test_halves_are_rounded_as_by_numpy(words):
    values = words.view(np.float32)
    with np.errstate(all="ignore"):
        for low, high in zip(values, values[::-1], strict=True):
            expected = np.array((low, high), np.float16).view(np.uint32)[0]
            assert cells.pack_float16(low, high) == expected


def test_every_half_has_its_float32():
    words = range(1 << 16)
    for word, value in zip(words, cells.float32_of("float16"), strict=True):
        expected = np.float32(struct.unpack("=e", struct.pack("=H", word))[0])
        assert value.tobytes() == expected.tobytes()
    for word, value in zip(words, cells.float32_of("bfloat16"), strict=True):
        expected = np.float32(struct.unpack("=f", struct.pack("=I", word << 16))[0])
        assert value.tobytes() == expected.tobytes()


def test_permute_takes_the_bytes_that_the_nibbles_name():
    a, b = np.uint32(0x83828180), np.int32(0x07060504)
    assert permute(a, b, 0x7531) == 0x07058381
    assert permute(np.int32(-1), b, 0x4040) == 0x04FF04FF


def test_every_pair_of_fp8_is_two_float16():
    word = np.int32(0x7F7E0138)  # NaN, the largest, the least, 1
    low, high = (np.array([x]).view(np.float16) for x in FLOAT16["float8_e4m3fn"](word))
    assert (*low, high[0]) == (1, 2.0**-9, 448)
    assert np.isnan(high[1])


@pytest.mark.parametrize("kind", ["int8", "int32", "uint32", "int64", "float16", "float32"])
def test_conversions_are_those_of_numpy(kind):
    """Of NumPy's numbers beyond the type the low bits are taken, of Python's it is an error."""
    convert, expected = getattr(types, kind), getattr(np, kind)
    numbers = (
        np.int64(2**40 + 7),
        np.uint32(2**32 - 5),
        np.int32(-9),
        np.bool_(True),
        3,
        -2.5,
        7.9,
    )
    with np.errstate(all="ignore"):
        for x in (*numbers, np.float32(3.99), np.float64(1e39), 2**40, -1, 2**70, float("nan")):
            try:
                made = expected(x)
            except (OverflowError, ValueError) as error:
                with pytest.raises(type(error)):
                    convert(x)
                continue
            assert type(convert(x)) is expected
            assert convert(x).tobytes() == made.tobytes()


def test_no_number_is_a_signature():
    assert types.int32(types.float32).return_type == types.int32
    assert types.int32().args == ()
