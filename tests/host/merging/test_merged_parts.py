"""dlse on host arrays: merged partial attentions, garbage, a loss on the LSE alone."""

import ml_dtypes
import numpy as np
import pytest
from api_calls import by_impl
from merged_parts import FACTOR, check

import masks
import nbflash
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    low_precision_backward,
    make_qkv,
    mask_gallery,
)

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
# Below one tile, a tile and a row, several tiles; keys cut within a tile.
SHAPES = [(1, 2, 1), (5, 9, 4), (33, 65, 17), (150, 133, 70)]


def vjp_of(impl, inputs, scale=None):
    q, k, v, _ = inputs
    return lambda part: nbflash.plan(q, k, v, part, scale=scale, impl=impl).vjp(
        q, k, v, return_lse=True
    )


@by_impl
@pytest.mark.parametrize("name", ["dense", "causal", "dead-scattered", "per-batch-per-head"])
@pytest.mark.parametrize(("nq", "nk", "cut"), SHAPES)
def test_merged_parts(nq, nk, cut, name, impl):
    """With causal masks and dead rows, rows that see one part alone, or nothing at all."""
    mask, inputs = mask_gallery(nq, nk, batch=2, heads=4)[name], make_qkv(2, nq, nk, 4, 2, 8)
    check(vjp_of(impl, inputs), mask, inputs, cut)


@by_impl
@pytest.mark.parametrize("scale", [None, -0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_scales(dtype, scale, impl):
    mask, inputs = mask_gallery(40, 50)["window"], make_qkv(2, 40, 50, 3, 1, 16, DTYPES[dtype])
    check(vjp_of(impl, inputs, scale), mask, inputs, 31, scale=scale)


@by_impl
@pytest.mark.parametrize("name", ["dense", "dead-scattered", "checkerboard"])
def test_a_loss_on_the_lse_alone(name, impl):
    """dV is zero, to the bit."""
    mask, (q, k, v, _) = mask_gallery(37, 29)[name], make_qkv(2, 37, 29, 2, 1, 8)
    dout, dlse = np.zeros_like(q), np.random.default_rng(1).standard_normal((2, 2, 37))
    dlse = dlse.astype(np.float32)
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, impl=impl)
    got = nbflash.attention_backward(dout, q, k, v, out, lse, mask, dlse=dlse, impl=impl)
    exact = reference.attention_backward(dout, q, k, v, mask, dlse=dlse)
    low = low_precision_backward(dout, q, k, v, mask, dlse=dlse)
    for name, *values in zip(("dq", "dk"), got, exact, low, strict=False):
        assert_within_reference(*values, name=name, factor=FACTOR)
    assert not got[2].any()


@by_impl
@pytest.mark.parametrize("name", ["window", "dead-scattered", "checkerboard"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_poisoned_row(poison, name, impl):
    """It reaches dq of its row and dk of what the row attends, and no dv."""
    n, bad = 45, 17
    mask, (q, k, v, dout) = mask_gallery(n)[name], make_qkv(1, n, n, 2, 2, 8)
    dlse = np.random.default_rng(0).standard_normal((1, 2, n)).astype(np.float32)
    exact = reference.attention_backward(dout, q, k, v, mask, dlse=dlse)
    low = low_precision_backward(dout, q, k, v, mask, dlse=dlse)
    dlse[..., bad] = poison
    _, pullback = nbflash.plan(q, k, v, mask, impl=impl).vjp(q, k, v)
    keys = mask.dense()[bad]
    hits = (np.arange(n) == bad) & keys.any(), keys, np.zeros(n, bool)
    for got, hit, *values in zip(pullback(dout, dlse), hits, exact, low, strict=True):
        assert_within_reference(*(x[:, ~hit] for x in (got, *values)), factor=FACTOR)
        assert not np.isfinite(got[:, hit]).any()


@by_impl
@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_no_dlse_is_zero(dtype, impl):
    """Bit for bit; in a strided layout, too."""
    q, k, v, dout = make_qkv(2, 20, 30, 2, 1, 8, DTYPES[dtype])
    _, pullback = nbflash.plan(q, k, v, causal=True, impl=impl).vjp(q, k, v)
    wide = np.zeros((2, 3, 2, 25), np.float64 if dtype == "f64" else np.float32)
    wide[...] = np.nan
    zeros = wide[:, 1, :, 3:23]
    zeros[...] = 0
    for a, b in zip(pullback(dout), pullback(dout, zeros), strict=True):
        assert a.tobytes() == b.tobytes()


@by_impl
def test_strides_of_dlse(impl):
    q, k, v, dout = make_qkv(3, 20, 30, 4, 2, 8)
    plan = nbflash.plan(q, k, v, masks.causal(20, 30), impl=impl)
    out, lse = plan(q, k, v)
    dlse = np.random.default_rng(0).standard_normal(lse.shape).astype(np.float32)
    moved = np.ascontiguousarray(dlse.transpose(1, 0, 2)).transpose(1, 0, 2)
    backwards = np.ascontiguousarray(dlse[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    queries_first = np.ascontiguousarray(dlse.transpose(2, 0, 1)).transpose(1, 2, 0)
    of_a_sum = np.broadcast_to(np.float32(0.5), lse.shape)
    for x in (moved, backwards, queries_first, of_a_sum):
        expected = plan.backward(dout, q, k, v, out, lse, dlse=x.copy())
        for a, b in zip(plan.backward(dout, q, k, v, out, lse, dlse=x), expected, strict=True):
            assert a.tobytes() == b.tobytes()
