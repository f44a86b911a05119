"""mma in the simulator, and one-byte caches as its operands."""

import ml_dtypes
import numpy as np
import pytest
from hopper_runs import launched, rejected
from numba import cuda

from nbflash.cuda.simulator.hopper import mma
from nbflash.cuda.tile.dequantise import FLOAT16, NAN_BYTES

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STORED = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def word(low, high):
    return np.array([low, high]).view(np.uint32)[0]


def fragments(a, b, c, lane):
    """What a lane holds, by the formulas of the manual."""
    r, q = lane // 4, lane % 4
    rows = [(r + 8 * i, 8 * j + 2 * q) for j in (0, 1) for i in (0, 1)]
    own_a = [word(a[i, k], a[i, k + 1]) for i, k in rows]
    own_b = [word(b[k, r], b[k + 1, r]) for k in (2 * q, 8 + 2 * q)]
    return [c[r + 8 * i, 2 * q + e] for i in (0, 1) for e in (0, 1)], own_a, own_b


@pytest.mark.parametrize("dtype", TYPES)
def test_mma(dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(TYPES[dtype]) for shape in ((16, 16), (16, 8)))
    c, got = rng.integers(-99, 99, (16, 8)).astype(np.float32), np.zeros((32, 4), np.float32)

    def kernel():
        lane = cuda.threadIdx.x
        got[lane] = mma(dtype, *fragments(a, b, c, lane))

    launched(kernel, threads=32)
    d = a.astype(np.float32) @ b.astype(np.float32) + c
    np.testing.assert_array_equal(got, [fragments(a, b, d, lane)[0] for lane in range(32)])


def test_all_lanes_take_part():
    def kernel():
        if cuda.threadIdx.x != 7:
            mma("float16", (0.0,) * 4, (0,) * 4, (0,) * 2)

    rejected(kernel, "needs all 32 lanes")


@pytest.mark.parametrize("name", STORED)
def test_every_byte_becomes_its_float16(name):
    codes = np.arange(256, dtype=np.uint8)
    words = [x for w in codes.view(np.int32) for x in FLOAT16[name](w)]
    got = np.array(words, np.uint32).view(np.float16)
    np.testing.assert_array_equal(got, codes.view(STORED[name]).astype(np.float16))


def test_bytes_that_are_nan():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    for n, x in enumerate(codes):
        four = np.full(4, 0x3C, np.uint8)
        four[n % 4] = n
        found = NAN_BYTES["float8_e4m3fn"](four.view(np.int32)[0])
        assert (found != 0) == np.isnan(x), n
        assert NAN_BYTES["int8"](four.view(np.int32)[0]) == 0
