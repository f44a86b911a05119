"""merge and merge_sink on the device, with the gradients of the kernels that feed them."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, bits, by_half_impl, by_impl, gallery, host
from merged_parts import check_merge, check_sink

import nbflash
from nbflash.merging import add_into, merge_into
from nbflash.testing import assert_within_reference, make_qkv

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


@by_half_impl
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 72), ("bfloat16", 128)])
def test_dtypes_of_tensor_cores(impl, dtype, head_dim):
    inputs = make_qkv(2, 257, 300, 4, 2, head_dim, DTYPES[dtype])
    mask = gallery(257, 300)["butterfly"]
    check_merge(vjp_of(inputs, impl), mask, inputs, 130, array=cupy.asarray)
    check_sink(vjp_of(inputs, impl), mask, inputs, SINK, array=cupy.asarray)


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


@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_some_rows_in_place(dtype, head_dim):
    """Merged and added as by NumPy: those of a list, and a run of them; others stay."""
    lse_dtype, rng = np.float64 if dtype == "float64" else np.float32, np.random.default_rng(0)
    whole, part = (
        (
            rng.standard_normal((2, n, 5, head_dim)).astype(DTYPES[dtype]),
            rng.standard_normal((2, 5, n)).astype(lse_dtype),
        )
        for n in (150, 70)
    )
    part[1][0, 2, 5], whole[1][:, 3] = -np.inf, -np.inf
    some, run = rng.permutation(150)[:70].astype(np.int32), slice(33, 103)
    for rows, on_device in ((some, cupy.asarray(some)), (run, run)):
        got = [cupy.asarray(x) for x in whole]
        merge_into(got, [cupy.asarray(x) for x in part], on_device)
        exact, low = (
            [x.astype(np.float64) if wide else x.copy() for x in whole] for wide in (True, False)
        )
        for expected in (exact, low):
            merge_into(expected, part, rows)
        for name, *values in zip(("out", "lse"), map(host, got), exact, low, strict=True):
            assert_within_reference(*values, name=name)
        sums, on = whole[0].copy(), cupy.asarray(whole[0])
        add_into(sums, part[0], rows)
        add_into(on, cupy.asarray(part[0]), on_device)
        np.testing.assert_array_equal(host(on), host(sums))
