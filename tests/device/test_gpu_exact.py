"""Results that are known bit for bit, on the device."""

import math

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, by_mode, gallery, host, run

import masks
from nbflash.testing import code_word_oracle, small_integers

SMALL = [d for d in DTYPES if d != "float64"]


@by_mode
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize(
    ("name", "nq", "nk"),
    [
        ("dense", 1, 1),
        ("dense", 130, 250),
        ("causal", 257, 255),
        ("butterfly", 200, 200),
        ("checkerboard", 33, 129),
        ("dead-scattered", 255, 127),
        ("random", 300, 64),
    ],
)
def test_saturated_softmax_gathers(name, nq, nk, dtype, deterministic):
    mask = gallery(nq, nk)[name]
    words = code_word_oracle(nq, 64, nk, mask, DTYPES[dtype])
    inputs = [cupy.asarray(x) for x in (words.q, words.k, words.v, words.dout)]
    out, lse, dq, dk, dv = map(
        host, run(inputs, mask, scale=words.scale, deterministic=deterministic)
    )
    np.testing.assert_array_equal(out, words.out)
    np.testing.assert_array_equal(lse, words.lse.astype(np.float32))
    np.testing.assert_array_equal(dv, words.dv)
    assert not dq.any()
    assert not dk.any()


@by_mode
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_zero_queries_take_the_mean(count, dtype, deterministic):
    """Q = 0: the mean over ``count`` attended keys, and dQ over small integers without rounding."""
    rng, nq, nk = np.random.default_rng(count), 137, 150
    keep = rng.permuted(np.tile(np.arange(nk) < count, (nq, 1)), axis=1)
    _, k, v, dout = small_integers(1, nq, nk, 2, 2, 64, DTYPES[dtype], seed=count)
    inputs = [cupy.asarray(x) for x in (np.zeros_like(dout), k, v, dout)]
    mask = masks.from_dense(keep)
    out, lse, dq, dk, dv = map(host, run(inputs, mask, scale=0.5, deterministic=deterministic))
    k64, v64, d64 = (x.astype(np.float64)[0].transpose(1, 0, 2) for x in (k, v, dout))
    p = keep / count
    exact = p @ v64
    ds = p * (d64 @ v64.swapaxes(1, 2) - (d64 * exact).sum(axis=-1, keepdims=True))
    np.testing.assert_array_equal(out[0].transpose(1, 0, 2), exact.astype(out.dtype))
    np.testing.assert_array_equal(dq[0].transpose(1, 0, 2), (0.5 * (ds @ k64)).astype(dq.dtype))
    np.testing.assert_array_equal(dv[0].transpose(1, 0, 2), (p.T @ d64).astype(dv.dtype))
    np.testing.assert_array_equal(lse, np.full_like(lse, np.log2(count) * np.float32(math.log(2))))
    assert not dk.any()
