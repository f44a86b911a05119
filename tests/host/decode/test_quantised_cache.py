"""Quantised storage of `KVCache`: rounding, scales, special numbers."""

import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES
from kv_cases import HEADS, D, tokens

from nbflash.definitions.quantised import LIMITS, dequantise, quantise
from nbflash.kv_cache import KVCache
from nbflash.testing import make_qkv


def rounding(scale, stored):
    """Half of the distance of the stored numbers, and of the roundings of scale and quotient."""
    if stored.dtype == np.int8:
        half, magnitude = 0.5, np.abs(stored.astype(np.float64))
    else:
        magnitude = np.abs(stored.astype(np.float64))
        info = ml_dtypes.finfo(stored.dtype)
        half = np.maximum(magnitude, float(info.smallest_normal)) * float(info.eps) / 2
    slack = 3 * float(np.finfo(np.float32).eps) * (magnitude + 1)
    return (half + slack) * scale[..., None]


def test_float8_is_rounded_to_even():
    """As `ml_dtypes` does: all numbers there are, those half between two, and others."""
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    there = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    there = np.sort(there[np.isfinite(there)])
    rng = np.random.default_rng(0)
    others = rng.standard_normal(10_000) * 2.0 ** rng.integers(-12, 8, 10_000)
    x = np.concatenate([there, (there[1:] + there[:-1]) / 2, others]).astype(np.float32)
    x = np.append(x[np.abs(x) <= 448], np.float32(448))  # its scale is 1
    stored, scale = quantise(x, dtype)
    assert scale == 1
    assert stored.tobytes() == x.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "e4m3"])
@pytest.mark.parametrize("source", DTYPES)
def test_quantised_storage(source, dtype):
    """Every head of a token has its own scale; zeros stay zeros, a NaN stays in its head."""
    _, k, v, _ = make_qkv(2, 1, 7, HEADS, HEADS, 16, DTYPES[source])
    k = (k * np.logspace(-3, 2, 14).reshape(2, 7, 1, 1)).astype(k.dtype)
    k[0, 2], v[1, 3, 0, 5], v[1, 4, 1, 6] = 0, np.nan, np.inf
    cache = KVCache(8, 4, HEADS, 16, dtype)
    ids = cache.allocate(2)
    cache.append(ids, k, v)
    table = cache.block_table(ids)
    parts = (cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)
    for stored, scale, x in parts:
        assert (stored.dtype, scale.dtype) == (dtype, np.float32)
        assert [y.dtype for y in quantise(x, dtype)] == [dtype, np.float32]
        stored, scale = (y[table].reshape(2, 8, *y.shape[2:])[:, :7] for y in (stored, scale))
        got, x = dequantise(stored, scale, np.float64), x.astype(np.float64)
        finite = np.isfinite(x).all(axis=-1)
        assert np.array_equal(~finite, np.isnan(got).any(axis=-1))
        assert (np.abs(got - x) <= rounding(scale, stored))[finite].all()
        assert not got[x == 0].any()


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "e4m3"])
def test_rows_of_subnormal_numbers(dtype):
    """Their scale is a multiple of the least float32, and 0 below half of it; signs stay."""
    least = float(np.finfo(np.float32).smallest_subnormal)
    size = np.geomspace(least, 2.0**-126, 300)[:, None]
    x = (size * [1, -1, 0.5, 0]).astype(np.float32)
    stored, scale = quantise(x, dtype)
    got, x = dequantise(stored, scale, np.float64), x.astype(np.float64)
    of_scale = np.abs(stored.astype(np.float64)).max() * least / 2
    assert (np.abs(got - x) <= rounding(scale, stored) + of_scale).all()
    assert (got * x >= 0).all()


def test_a_dtype_without_a_rounding_of_its_own_is_refused(monkeypatch):
    """Not stored by that of another one."""
    monkeypatch.setitem(LIMITS, "float8_e5m2", 57344.0)
    with pytest.raises(KeyError, match="float8_e5m2"):
        quantise(np.ones((1, 8), np.float32), ml_dtypes.float8_e5m2)


def test_keys_of_float64_queries_are_not_rounded():
    """The product of 8 bits and a scale of float32 is exact in float64."""
    stored, scale = np.arange(-127, 128, dtype=np.int8)[:, None, None], np.float32([1 / 3])
    got = dequantise(stored, scale, np.dtype(np.float64))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, stored.astype(np.float64) * float(scale[0]))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "e4m3"])
def test_a_fork_of_a_quantised_cache_grows(dtype):
    """The page that it copies takes its numbers and their scales along."""
    cache = KVCache(8, 4, HEADS, D, dtype)
    (a,) = cache.allocate(1)
    cache.append([a], *(x[:1] for x in tokens(2, 6)))
    both = np.concatenate([np.stack(tokens(2, 6))[:, :1], np.stack(tokens(1, 1, first=50))], 2)
    c = cache.fork(a)
    cache.append([c], *tokens(1, 1, first=50))
    pages, slots = cache.block_table([c])[0].repeat(4)[:7], np.arange(7) % 4
    for x, stored, scale in zip(
        both, (cache.k, cache.v), (cache.k_scale, cache.v_scale), strict=True
    ):
        for got, wanted in zip((stored, scale), quantise(x[0], dtype), strict=True):
            np.testing.assert_array_equal(got[pages, slots], wanted)
