"""What attention must survive: rows and keys without partners, garbage, extreme scores."""

from functools import partial

import numpy as np
import poisoned_rows
import pytest
from simt_runs import DTYPES, RESULTS, Geometry, assert_close, check, expected, run

import masks
from nbflash.testing import assert_within_reference, make_qkv, mask_gallery

FORMS = {
    "atomic": Geometry(),
    "deterministic": Geometry(deterministic=True),
    "vectors": Geometry(vectors=True, vector_red=True, p_over_k=True, send_v=True),
}
forms = pytest.mark.parametrize("form", FORMS)
T = 8


@forms
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-scattered", "causal", "empty"])
def test_rows_that_attend_nothing(name, form):
    mask = mask_gallery(2 * T + 1, T + 1)[name]
    inputs = make_qkv(1, *mask.shape, 2, 1, 8)
    out, lse, dq, dk, dv = check(FORMS[form], mask, *inputs)
    dead_rows, dead_keys = ~mask.dense().any(axis=1), ~mask.dense().any(axis=0)
    assert dead_rows.any()
    assert np.all(np.isneginf(lse[..., dead_rows]))
    for x, dead in ((out, dead_rows), (dq, dead_rows), (dk, dead_keys), (dv, dead_keys)):
        assert not x[:, dead].any()


@forms
@pytest.mark.parametrize("dead", [slice(0, T), slice(T, 2 * T), slice(2 * T, 3 * T)])
@pytest.mark.parametrize("axis", ["queries", "keys"])
def test_whole_tiles_without_partners(axis, dead, form):
    """The first, a middle or the last tile of rows or of columns has no live tile at all."""
    n, keep = 3 * T - 1, np.ones((3 * T - 1, 3 * T - 1), bool)
    keep[(dead, slice(None)) if axis == "queries" else (slice(None), dead)] = False
    out, lse, dq, dk, dv = check(FORMS[form], masks.from_dense(keep), *make_qkv(1, n, n, 2, 2, 8))
    if axis == "queries":
        assert np.all(np.isneginf(lse[..., dead]))
    for x in (out, dq) if axis == "queries" else (dk, dv):
        assert not x[:, dead].any()


@forms
@pytest.mark.parametrize("alive", range(3))
def test_heads_of_a_group_that_see_nothing(alive, form):
    """A column of work starts with a head that has no tile there."""
    dense = masks.dense(T + 1, T + 3)
    mask = masks.per_head([dense if h == alive else ~dense for h in range(3)])
    check(FORMS[form], mask, *make_qkv(1, *mask.shape, 3, 1, 8))


@forms
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["padding", "dead-keys", "dead-scattered", "documents", "per-batch-per-head"]
)
def test_garbage_where_nothing_attends(name, poison, form):
    """Padding of Q, K, V and dO changes no bit of any result, NaN or not."""
    mask = mask_gallery(2 * T - 1, 2 * T + 1)[name]
    clean = make_qkv(2, *mask.shape, 2, 1, 8)
    rows, keys = poisoned_rows.unused(mask, 2, 2, 1)
    assert rows.any() | keys.any()
    dirty = [x.copy() for x in clean]
    for x, where in zip(dirty, (rows, keys, keys, rows), strict=True):
        x[where] = poison
    got = run(FORMS[form], mask, *dirty)
    assert_close(got, *expected(mask, *clean))
    plain = run(FORMS[form], mask, *clean)
    for name, a, b in zip(RESULTS, got, plain, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["window", "butterfly", "dead-scattered", "checkerboard"])
def test_one_poisoned_key(name, poison):
    """Rows that do not attend it keep their results; others may not hide it."""
    n, bad = 2 * T + 1, T + 2
    mask, (q, k, v, dout) = mask_gallery(n)[name], make_qkv(1, n, n, 2, 2, 8)
    hit = mask.dense()[:, bad]
    assert hit.any()
    assert not hit.all()
    ref, low = expected(mask, q, k, v, dout)
    k[:, bad] = v[:, bad] = poison
    out, lse, dq, _, _ = run(Geometry(), mask, q, k, v, dout)
    for i, x in ((0, out), (2, dq)):
        assert_within_reference(x[:, ~hit], ref[i][:, ~hit], low[i][:, ~hit], name=RESULTS[i])
    assert_within_reference(lse[..., ~hit], ref[1][..., ~hit], low[1][..., ~hit], name="lse")
    if np.isnan(poison):
        assert np.isnan(out[:, hit]).all()
        assert np.isnan(lse[..., hit]).all()


@forms
@pytest.mark.parametrize("name", poisoned_rows.MASKS)
@pytest.mark.parametrize("which", poisoned_rows.INPUTS)
def test_one_row_of_nan(which, name, form):
    """NaN in every score of a row, or in one of it."""
    n = 2 * T + 1
    mask, inputs = mask_gallery(n)[name], make_qkv(1, n, n, 2, 2, 8)
    poisoned_rows.check(partial(run, FORMS[form], mask), mask, inputs, which, T + 3)


@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("n", [1, T - 1, T + 1, 2 * T + 1])
@pytest.mark.parametrize("name", ["dense", "dead-scattered"])
def test_shifted_logits(shift, n, name):
    """All scores of a row move together, far outside the range of exp; the tail is ragged.

    The last coordinate moves them, so that a score is rounded once at its full size, in whatever
    order it is summed; it is Q that is large, since dQ = dS K would magnify how O was rounded. Not
    in float64, where the reference rounds the same scores.
    """
    mask, at = mask_gallery(n, n + 1)[name], n + int(abs(shift))
    dtype = tuple(DTYPES.values())[(n + at // 8) % 3]
    q, k, v, dout = make_qkv(1, n, n + 1, 2, 1, 16, dtype, seed=at)
    q[..., -1], k[..., -1] = 4 * shift, 1
    check(FORMS[("atomic", "deterministic", "vectors")[at % 3]], mask, q, k, v, dout)


@forms
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scales(scale, dtype, form):
    mask, inputs = mask_gallery(T + 3)["causal"], make_qkv(1, 11, 11, 2, 2, 8, DTYPES[dtype])
    check(FORMS[form], mask, *inputs, scale=scale)


@pytest.mark.parametrize("factor", [3.0, 5.0])
@forms
def test_large_half_precision_inputs(factor, form):
    """Scores of a few hundred in float16, one key taking nearly all the weight."""
    q, k, v, dout = make_qkv(1, 2 * T - 1, 2 * T + 1, 2, 2, 32, np.float16)
    mask = mask_gallery(2 * T - 1, 2 * T + 1)["strided"]
    check(FORMS[form], mask, q * np.float16(factor), k * np.float16(factor), v, dout)
