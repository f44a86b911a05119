"""What attention must survive on the device: empty rows, garbage, extreme scores."""

import cupy
import numpy as np
import poisoned_rows
import pytest
from device_runs import DTYPES, assert_close, by_mode, check, expected, gallery, host, make_qkv, run

import masks
from nbflash.testing import assert_within_reference

NARROW = [d for d in DTYPES if d != "float64"]


@by_mode
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-scattered", "causal", "empty"])
def test_rows_that_attend_nothing(name, deterministic):
    mask = gallery(300, 200)[name]
    inputs = make_qkv(1, 300, 200, 2, 1, 64, "float32")
    out, lse, dq, dk, dv = map(host, check(inputs, mask, deterministic=deterministic))
    dead_rows, dead_keys = ~mask.dense().any(axis=1), ~mask.dense().any(axis=0)
    assert dead_rows.any()
    assert np.all(np.isneginf(lse[..., dead_rows]))
    for x, dead in ((out, dead_rows), (dq, dead_rows), (dk, dead_keys), (dv, dead_keys)):
        assert not x[:, dead].any()


@by_mode
@pytest.mark.parametrize("dead", [slice(0, 256), slice(256, 512), slice(512, 700)])
@pytest.mark.parametrize("axis", ["queries", "keys"])
def test_whole_tiles_without_partners(axis, dead, deterministic):
    n, keep = 700, np.ones((700, 700), bool)
    keep[(dead, slice(None)) if axis == "queries" else (slice(None), dead)] = False
    inputs = make_qkv(1, n, n, 2, 2, 64, "float32")
    results = check(inputs, masks.from_dense(keep), deterministic=deterministic)
    out, lse, dq, dk, dv = map(host, results)
    if axis == "queries":
        assert np.all(np.isneginf(lse[..., dead]))
    for x in (out, dq) if axis == "queries" else (dk, dv):
        assert not x[:, dead].any()


@by_mode
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["padding", "dead-keys", "dead-scattered", "documents", "per-batch-per-head"]
)
def test_garbage_where_nothing_attends(name, poison, deterministic):
    """Padding of Q, K, V and dO may hold anything."""
    mask = gallery(190, 210)[name]
    clean = make_qkv(2, 190, 210, 2, 1, 64, "float32")
    keep = np.broadcast_to(mask.dense(), (2, 2, 190, 210))
    rows = cupy.asarray(~keep.any(axis=3).transpose(0, 2, 1))
    keys = cupy.asarray(~keep.any(axis=(1, 2))[..., None])
    dirty = [x.copy() for x in clean]
    for x, where in zip(dirty, (rows, keys, keys, rows), strict=True):
        x[where] = poison
    assert_close(run(dirty, mask, deterministic=deterministic), *expected(clean, mask))


@by_mode
@pytest.mark.parametrize("name", poisoned_rows.MASKS)
@pytest.mark.parametrize("which", poisoned_rows.INPUTS)
def test_one_row_of_nan(which, name, deterministic):
    """NaN in every score of a row, or in one of it."""
    n = 300
    mask, inputs = gallery(n, n)[name], make_qkv(1, n, n, 2, 2, 64, "float32")

    def results(*inputs):
        inputs = [cupy.asarray(x) for x in inputs]
        return [*map(host, run(inputs, mask, deterministic=deterministic))]

    poisoned_rows.check(results, mask, [*map(host, inputs)], which, 170)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["window", "butterfly", "dead-scattered", "checkerboard"])
def test_one_poisoned_key(name, poison):
    """Rows that do not attend it keep their results; others may not hide it."""
    n, bad = 300, 170
    mask, (q, k, v, dout) = gallery(n, n)[name], make_qkv(1, n, n, 2, 2, 64, "float32")
    hit = mask.dense()[:, bad]
    assert hit.any()
    assert not hit.all()
    ref, low = expected((q, k, v, dout), mask)
    k[:, bad] = v[:, bad] = poison
    out, lse, dq, *_ = map(host, run((q, k, v, dout), mask))
    alone = [x[:, ~hit] for x in (out, dq)]
    places = [[x[i][:, ~hit] for i in (0, 2)] for x in (ref, low)]
    for got, exact, plain in zip(alone, *places, strict=True):
        assert_within_reference(got, exact, plain, factor=3)
    if np.isnan(poison):
        assert np.isnan(out[:, hit]).all()
        assert np.isnan(lse[..., hit]).all()


@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("n", [1, 63, 65, 127, 129, 257])
@pytest.mark.parametrize("name", ["dense", "dead-scattered"])
@pytest.mark.parametrize("dtype", NARROW)
def test_shifted_logits(shift, n, name, dtype):
    """All scores of a row move together, far outside the range of exp; the tail is ragged.

    It is Q that is large, since dQ = dS K would magnify how O was rounded. Not in float64, where
    the reference rounds the same scores.
    """
    mask = gallery(n, n + 1)[name]
    q, k, v, dout = make_qkv(1, n, n + 1, 2, 1, 64, dtype, seed=n)
    q[..., -1], k[..., -1] = 8 * shift, 1
    check((q, k, v, dout), mask, deterministic=n % 2 == 0)


@by_mode
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", NARROW)
def test_scales(scale, dtype, deterministic):
    inputs = make_qkv(1, 190, 190, 2, 2, 64, dtype)
    check(inputs, gallery(190, 190)["causal"], scale=scale, deterministic=deterministic)


@by_mode
@pytest.mark.parametrize("factor", [3, 5])
def test_large_half_precision_inputs(factor, deterministic):
    q, k, v, dout = make_qkv(1, 190, 210, 2, 2, 64, "float16")
    check(
        (q * factor, k * factor, v, dout), gallery(190, 210)["strided"], deterministic=deterministic
    )


@by_mode
def test_equal_scores_everywhere(deterministic):
    q, k, v, dout = make_qkv(1, 190, 210, 2, 2, 64, "float32")
    k[:] = k[:, :1]
    check((q, k, v, dout), gallery(190, 210)["causal"], deterministic=deterministic)
