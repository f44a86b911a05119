"""Device arithmetic of the simulator: fused multiply-add, integer intrinsics, atomics."""

import math
from fractions import Fraction

import numpy as np
import pytest
from numba import cuda


def run_fma(a, b, c):
    out = np.zeros(len(c), c.dtype)

    def kernel(a, b, c, out):
        i = cuda.grid(1)
        out[i] = cuda.fma(a[i], b[i], c[i])

    cuda.jit(kernel)[1, len(c)](a, b, c, out)
    return out


def exact_fma(a, b, c):
    operands = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in operands]


def rounded(exact, dtype):
    """An exact fraction in the nearest ``dtype``, ties to even."""
    near = dtype(float(exact))
    candidates = [np.nextafter(near, dtype(-np.inf)), near, np.nextafter(near, dtype(np.inf))]
    return min(
        candidates,
        key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(f"u{x.itemsize}")) & 1),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_rounds_once(dtype):
    """Random operands, and products that nearly cancel or sit next to a midpoint."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(256).astype(dtype) for _ in range(2))
    c = -(a * b)
    c[::2] = rng.standard_normal(128)
    ulp = dtype(np.finfo(dtype).eps)
    a[:4], b[:4] = 1 + ulp, 1 + np.array([ulp, -ulp, 2 * ulp, ulp], dtype)
    c[:4] = np.array([0, 0, ulp**2, ulp / 2], dtype)
    exact = exact_fma(a, b, c)
    expected = np.array([rounded(value, dtype) for value in exact], dtype)
    np.testing.assert_array_equal(run_fma(a, b, c), expected)
    assert (a * b + c != expected).any()


def test_fma_at_a_float32_midpoint_is_not_rounded_twice():
    """1 + 2^-24 is a midpoint; 2^-70 decides, and float64 cannot hold it beside the 1."""
    a = np.array([2.0**-24, 2.0**-24 * (1 + 2.0**-23)], np.float32)
    b = np.array([1.0, 1.0 - 2.0**-23], np.float32)
    c = np.array([1.0, 1.0 + 2.0**-23], np.float32)
    exact = exact_fma(a, b, c)
    assert [float(v) for v in run_fma(a, b, c)] == [float(rounded(v, np.float32)) for v in exact]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_of_non_finite_numbers(dtype):
    a = np.array([np.inf, np.inf, 0, np.nan, 1], dtype)
    b = np.array([1, 1, np.inf, 1, 1], dtype)
    c = np.array([1, -np.inf, 1, 1, np.inf], dtype)
    np.testing.assert_array_equal(run_fma(a, b, c), np.array([np.inf, *[np.nan] * 3, np.inf]))


def test_integer_intrinsics():
    cases = {
        "popc": (cuda.popc, 0b1011, 3),
        "popc of all": (cuda.popc, np.int32(-1), 32),
        "clz": (cuda.clz, 1, 31),
        "clz of zero": (cuda.clz, 0, 32),
        "ffs": (cuda.ffs, 8, 4),
        "ffs of zero": (cuda.ffs, 0, 0),
        "brev": (cuda.brev, 1, 1 << 31),
    }
    for name, (intrinsic, operand, expected) in cases.items():
        assert intrinsic(operand) == expected, name
    assert cuda.selp(True, 1, 2) == 1
    assert math.isclose(cuda.cbrt(27.0), 3.0)


ATOMICS = {
    "add": (3, 8),
    "sub": (3, 2),
    "max": (9, 9),
    "min": (3, 3),
    "and_": (3, 1),
    "or_": (3, 7),
    "xor": (3, 6),
    "exch": (3, 3),
    "inc": (5, 0),
    "dec": (3, 3),
}


@pytest.mark.parametrize(("name", "case"), ATOMICS.items(), ids=ATOMICS)
def test_atomic(name, case):
    operand, expected = case
    x = np.array([0, 5])

    def kernel(x):
        assert getattr(cuda.atomic, name)(x, 1, operand) == 5

    cuda.jit(kernel)[1, 1](x)
    assert x.tolist() == [0, expected]


def test_atomic_compare_and_swap():
    def kernel(x):
        assert cuda.atomic.cas(x, 0, 5, 8) == 5
        assert cuda.atomic.cas(x, 0, 5, 9) == 8

    x = np.array([5])
    cuda.jit(kernel)[1, 1](x)
    assert x[0] == 8
