"""The forward kernels of tensor cores: parity, exact results, garbage, strides."""

import cupy
import numpy as np
import pytest
from device_runs import (
    DTYPES,
    assert_close,
    by_half_impl,
    expected,
    full_tiles,
    gallery,
    half_cases,
    host,
    make_qkv,
)

import masks
import nbflash
from nbflash.testing import assert_within_reference, code_word_oracle

pytestmark = by_half_impl

HEAD_DIMS = tuple(
    (dtype, head_dim)
    for dtype, head_dims in {
        "float16": (8, 64, 72, 128, 256),
        "bfloat16": (64, 96, 128, 192),
    }.items()
    for head_dim in head_dims
    if dtype in DTYPES
)
CASES = tuple(half_cases(HEAD_DIMS))


def forward(impl, inputs, mask=None, **options):
    return nbflash.attention(*inputs[:3], mask, return_lse=True, impl=impl, **options)


def check(impl, inputs, mask, **options):
    got = forward(impl, inputs, mask, **options)
    ref, low = expected(inputs, mask, options.get("scale"))
    assert_close(got, ref[:2], low[:2], strict=False)
    return got


@pytest.mark.parametrize(("name", "dtype", "head_dim", "nq", "nk", "heads", "scale"), CASES)
def test_forward(impl, name, dtype, head_dim, nq, nk, heads, scale):
    mask = gallery(nq, nk, heads=heads[0] if name.startswith("per-") else 2)[name]
    inputs = make_qkv(mask.batch or 1, nq, nk, *heads, head_dim, dtype, seed=nq + nk)
    check(impl, inputs, mask, scale=scale)


@pytest.mark.parametrize("name", ["dense", "causal", "butterfly", "local", "bigbird", "random"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128)])
def test_longer_sequences(impl, name, dtype, head_dim):
    """Several rows for every block: the persistent loop and its row boundaries."""
    check(impl, make_qkv(3, 1031, 1500, 16, 4, head_dim, dtype), gallery(1031, 1500)[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_schedules_without_masked_tiles(impl, dtype):
    """By halves they have a kernel of their own."""
    mask = full_tiles()
    inputs = make_qkv(3, *mask.shape, 16, 4, 64, dtype)
    assert nbflash.plan(*inputs[:3], mask, impl=impl).schedule.full_tiles
    check(impl, inputs, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_of_64(impl, head_dim):
    mask = masks.random(1024, 64, 0.1)
    inputs = make_qkv(2, 1024, 1024, 8, 8, head_dim, "float16")
    plan = nbflash.plan(*inputs[:3], mask, impl=impl)
    assert (plan.schedule.tile_m, plan.schedule.tile_n) == (64, 64)
    check(impl, inputs, mask)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "causal", "checkerboard", "dead-scattered", "random"])
def test_saturated_softmax_gathers(impl, name, dtype):
    nq, nk = 257, 300
    mask = gallery(nq, nk)[name]
    words = code_word_oracle(nq, 64, nk, mask, DTYPES[dtype])
    inputs = [cupy.asarray(x) for x in (words.q, words.k, words.v)]
    out, lse = map(host, forward(impl, inputs, mask, scale=words.scale))
    np.testing.assert_array_equal(out, words.out)
    np.testing.assert_array_equal(lse, words.lse.astype(np.float32))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["padding", "dead-keys", "dead-scattered", "documents"])
def test_garbage_where_nothing_attends(impl, name, dtype, poison):
    mask, clean = gallery(190, 330)[name], make_qkv(2, 190, 330, 2, 1, 64, dtype)
    keep = np.broadcast_to(mask.dense(), (2, 2, 190, 330))
    rows = cupy.asarray(~keep.any(axis=3).transpose(0, 2, 1))
    keys = cupy.asarray(~keep.any(axis=(1, 2))[..., None])
    dirty = [x.copy() for x in clean]
    for x, where in zip(dirty, (rows, keys, keys), strict=False):
        x[where] = poison
    ref, low = expected(clean, mask)
    assert_close(forward(impl, dirty, mask), ref[:2], low[:2], strict=False)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["window", "butterfly", "dead-scattered", "checkerboard"])
def test_one_poisoned_key(impl, name, poison):
    """Rows that do not attend it keep their results; others may not hide it."""
    n, bad = 300, 170
    mask, (q, k, v, dout) = gallery(n, n)[name], make_qkv(1, n, n, 2, 2, 64, "float16")
    hit = mask.dense()[:, bad]
    ref, low = expected((q, k, v, dout), mask)
    v[:, bad] = poison
    out, _ = forward(impl, (q, k, v), mask)
    out = host(out)
    alone, exact, plain = (x[:, ~hit] for x in (out, ref[0], low[0]))
    assert_within_reference(alone, exact, plain, factor=3)
    assert not np.isfinite(out[:, hit]).any()


@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0])
@pytest.mark.parametrize("name", ["dense", "dead-scattered", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_growing_maximum(impl, shift, name, dtype):
    """Scores that grow by far more than P can hold from one tile to the next."""
    n = 520
    q, k, v, dout = make_qkv(1, n, n, 2, 1, 64, dtype, seed=3)
    q[..., -1] = 8
    k[..., -1] = cupy.linspace(0, shift / 8, n).reshape(1, n, 1)
    check(impl, (q, k, v, dout), gallery(n, n)[name])


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(impl, scale):
    inputs, mask = make_qkv(1, 190, 190, 2, 2, 64, "float16"), gallery(190, 190)["causal"]
    check(impl, inputs, mask, scale=scale)


def test_strided_inputs_and_output(impl):
    whole = make_qkv(2, 300, 300, 6, 6, 64, "float16")
    mask = gallery(300, 300)["causal"]
    views = [x[:, :, ::3] for x in whole]
    buffer = cupy.full((2, 300, 4, 66), np.nan, np.float16)
    out = buffer[:, :, 1:3, 1:65]
    got = forward(impl, views, mask, out=out)
    ref, low = expected([cupy.ascontiguousarray(x) for x in views], mask)
    assert_close(got, ref[:2], low[:2], strict=False)
    buffer[:, :, 1:3, 1:65] = np.nan
    assert bool(cupy.isnan(buffer).all())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_output_that_runs_backwards(impl, axis):
    inputs = make_qkv(2, 150, 170, 4, 2, 64, "float16")
    check(
        impl, inputs, gallery(150, 170)["causal"], out=cupy.flip(cupy.empty_like(inputs[0]), axis)
    )
