"""merge and merge_sink on the device, with the gradients of the kernels that feed them."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, ON_HOPPER, bits, by_impl, gallery, host
from merged_parts import check_merge, check_sink

import nbflash
from nbflash.testing import make_qkv

pytestmark = pytest.mark.usefixtures("one_pass")
# Below one tile; a tile and a row; several tiles of either implementation.
SHAPES = ((1, 2, 1), (63, 65, 20), (129, 257, 128), (300, 190, 100))
MASKS = ("dense", "causal", "dead-scattered", "per-batch-per-head")
SINK = np.float32([-3, 0, 0.5, 4])


def vjp_of(inputs, impl, scale=None):
    q, k, v = map(cupy.asarray, inputs[:3])
    return lambda part: nbflash.plan(q, k, v, part, scale=scale, impl=impl).vjp(
        q, k, v, return_lse=True
    )


@by_impl
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("nq", "nk", "cut"), SHAPES)
def test_parts_and_sinks(nq, nk, cut, name, impl):
    """Rows that see one part alone, or nothing at all; grouped heads."""
    mask, inputs = gallery(nq, nk, heads=4)[name], make_qkv(2, nq, nk, 4, 2, 64, np.float16)
    check_merge(vjp_of(inputs, impl), mask, inputs, cut, array=cupy.asarray)
    check_sink(vjp_of(inputs, impl), mask, inputs, SINK, array=cupy.asarray)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_simt(dtype):
    inputs, mask = make_qkv(2, 150, 170, 4, 2, 40, DTYPES[dtype]), gallery(150, 170)["window"]
    sink = SINK.astype(np.float64 if dtype == "float64" else np.float32)
    given = {"scale": -0.3, "array": cupy.asarray}
    check_merge(vjp_of(inputs, "simt", -0.3), mask, inputs, 90, **given)
    check_sink(vjp_of(inputs, "simt", -0.3), mask, inputs, sink, **given)


@ON_HOPPER
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 72), ("bfloat16", 128)])
def test_dtypes_of_sm90(dtype, head_dim):
    inputs = make_qkv(2, 257, 300, 4, 2, head_dim, DTYPES[dtype])
    mask = gallery(257, 300)["butterfly"]
    check_merge(vjp_of(inputs, "sm90"), mask, inputs, 130, array=cupy.asarray)
    check_sink(vjp_of(inputs, "sm90"), mask, inputs, SINK, array=cupy.asarray)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_parts_and_order(dtype):
    """An empty part changes nothing, whatever it holds; the order of two does not, to the bit."""
    rng = cupy.random.default_rng(0)
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    a, b = (
        (
            cupy.asarray(host(rng.standard_normal((2, 65, 3, 40))).astype(DTYPES[dtype])),
            rng.standard_normal((2, 3, 65)).astype(lse_dtype),
        )
        for _ in "ab"
    )
    assert bits(nbflash.merge(*a, *b)) == bits(nbflash.merge(*b, *a))
    nothing = cupy.full_like(b[1], -np.inf)
    garbage = cupy.asarray(np.full(a[0].shape, np.nan, DTYPES[dtype]))
    for x, y in zip(nbflash.merge(*a, garbage, nothing), a, strict=True):
        np.testing.assert_array_equal(host(x), host(y))
    out, lse = map(host, nbflash.merge(garbage, nothing, garbage, nothing))
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = nbflash.merge_backward(a[0], *a, garbage, nothing, dlse=b[1])
    for x, y in zip(gradients[:2], (a[0], b[1]), strict=True):
        np.testing.assert_array_equal(host(x), host(y))
    assert not any(host(x).any() for x in gradients[2:])
