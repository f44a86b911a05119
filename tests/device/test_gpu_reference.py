"""The device's reference and yardstick are those of nbflash.reference and nbflash.testing."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, RESULTS, gallery, host
from reference import attention_and_gradients, plain_computation

from nbflash import reference, testing


def test_every_dtype_is_tested():
    assert sorted(DTYPES) == ["bfloat16", "float16", "float32", "float64"], "is ml_dtypes missing?"


@pytest.mark.parametrize("name", ["dense", "dead-scattered", "per-batch-per-head", "empty"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_the_specification(name, dtype):
    mask, scale = gallery(21, 17, heads=4)[name], -0.4
    inputs = testing.make_qkv(2, 21, 17, 4, 2, 9, DTYPES[dtype])
    q, k, v, dout = map(cupy.asarray, inputs)
    got = attention_and_gradients(dout, q, k, v, cupy.asarray(mask.dense()), scale)
    q, k, v, dout = (x.astype(np.float64) for x in inputs)
    exact = reference.attention(q, k, v, mask, scale)
    exact += reference.attention_backward(dout, q, k, v, mask, scale)
    low = testing.low_precision(q, k, v, mask, scale)
    low += testing.low_precision_backward(dout, q, k, v, mask, scale)
    for result, x, ref, plain in zip(RESULTS, got, exact, low, strict=True):
        testing.assert_within_reference(host(x), ref, plain, name=result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_yardstick_is_that_of_the_host(dtype):
    """Their errors are of one size: neither is more than four times the other."""
    mask, inputs = gallery(64, 96)["causal"], testing.make_qkv(2, 64, 96, 2, 1, 32, DTYPES[dtype])
    q, k, v, dout = inputs
    exact = reference.attention(q, k, v, mask) + reference.attention_backward(dout, q, k, v, mask)
    plain = testing.low_precision(q, k, v, mask)
    plain += testing.low_precision_backward(dout, q, k, v, mask)
    q, k, v, dout = map(cupy.asarray, inputs)
    keep = cupy.asarray(mask.dense())
    low = plain_computation(dout, q, k, v, keep, 32**-0.5, order=0)
    for result, x, ref, other in zip(RESULTS, low, exact, plain, strict=True):
        x, other = (np.asarray(host(y), np.float64) for y in (x, other))
        alive = np.isfinite(ref)
        ours, theirs = (np.abs(y[alive] - ref[alive]).max() for y in (x, other))
        assert theirs / 4 < ours < 4 * theirs, result
