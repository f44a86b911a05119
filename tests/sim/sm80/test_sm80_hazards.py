"""What the mma kernels must survive: garbage where nothing attends, NaN, extreme scores."""

from functools import partial

import numpy as np
import poisoned_rows
import pytest
from simt_runs import RESULTS, assert_close, expected
from sm80_runs import DTYPES, Geometry, check, run

from masks import FULL
from nbflash import scores
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import assert_within_reference, make_qkv, mask_gallery

FORMS = {
    "one-pass": Geometry(vector_red=True),
    "two-passes": Geometry(m_tiles=2, deterministic=True),
}
forms = pytest.mark.parametrize("form", FORMS)
T = 16


@forms
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-scattered", "causal", "empty"])
def test_rows_that_attend_nothing(name, form):
    mask = mask_gallery(2 * T + 1, T + 1)[name]
    out, lse, dq, dk, dv = check(FORMS[form], mask, *make_qkv(1, *mask.shape, 2, 1, 8, np.float16))
    dead_rows, dead_keys = ~mask.dense().any(axis=1), ~mask.dense().any(axis=0)
    assert dead_rows.any()
    assert np.all(np.isneginf(lse[..., dead_rows]))
    for x, dead in ((out, dead_rows), (dq, dead_rows), (dk, dead_keys), (dv, dead_keys)):
        assert not x[:, dead].any()


@forms
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["padding", "dead-keys", "dead-scattered"])
def test_garbage_where_nothing_attends(name, poison, form):
    """Padding of Q, K, V and dO changes no bit of any result, NaN or not."""
    mask = mask_gallery(2 * T - 1, 2 * T + 1)[name]
    dtype = DTYPES["bfloat16" if name == "padding" else "float16"]
    batch = mask.batch or 1
    clean = make_qkv(batch, *mask.shape, 2, 1, 8, dtype)
    rows, keys = poisoned_rows.unused(mask, batch, 2, 1)
    assert rows.any() | keys.any()
    dirty = [x.copy() for x in clean]
    for x, where in zip(dirty, (rows, keys, keys, rows), strict=True):
        x[where] = poison
    got = run(FORMS[form], mask, *dirty)
    assert_close(got, *expected(mask, *clean))
    plain = run(FORMS[form], mask, *clean)
    for name, a, b in zip(RESULTS, got, plain, strict=True):
        assert a.tobytes() == b.tobytes(), name


@forms
@pytest.mark.parametrize("name", poisoned_rows.MASKS)
@pytest.mark.parametrize("which", poisoned_rows.INPUTS)
def test_one_row_of_nan(which, name, form):
    """NaN in every score of a row, or in one of it."""
    n = 2 * T + 1
    mask, inputs = mask_gallery(n)[name], make_qkv(1, n, n, 1, 1, 8, np.float16)
    seen = mask.dense()
    at = next(i for i in range(T + 1, n) if seen[i].any() and seen[:, i].any())
    poisoned_rows.check(partial(run, FORMS[form], mask), mask, inputs, which, at)


@forms
@pytest.mark.parametrize("shift", [120.0, -1000.0])
@pytest.mark.parametrize("name", ["dense", "dead-scattered"])
def test_shifted_logits(shift, name, form):
    """All scores of a row move together, far outside the range of exp; the tail is ragged."""
    n, dtype = 2 * T + 1, DTYPES["float16" if shift > 0 else "bfloat16"]
    q, k, v, dout = make_qkv(1, n, n + 1, 2, 1, 16, dtype, seed=3)
    q[..., -1], k[..., -1] = 4 * shift, 1
    check(FORMS[form], mask_gallery(n, n + 1)[name], q, k, v, dout)


def test_masked_tiles_go_on_with_the_softmax():
    """Rows of several masked tiles: equal scores, so that l is the number of attended keys.

    The forward kernel of flash-attention for compute capability 8.0 began anew in each (its pull
    request 2329).
    """
    n, geometry = 3 * T, Geometry(warps=3)
    mask, (_, k, v, dout) = mask_gallery(n)["causal"], make_qkv(1, n, n, 1, 1, 8, np.float16)
    schedule = TileSchedule.from_mask(mask, *geometry.tile)
    assert (schedule.kind != FULL).sum() == len(schedule.kind) == 3
    _, lse, *_ = check(geometry, mask, np.zeros_like(k), k, v, dout)
    exact = np.log(np.arange(1, n + 1.0)).reshape(lse.shape)
    assert_within_reference(lse, exact, exact.astype(np.float16))


@forms
def test_nan_in_a_value_where_the_softcap_is_flat(form):
    """Slopes of 0 hide no NaN: P is not 0, and so dQ and dK are NaN as the reference's are."""
    n = 2 * T + 1
    q, k, v, dout = make_qkv(1, n, n, 2, 1, 16, np.float16, seed=3)
    q[..., -1], k[..., -1], v[:, T] = -1000.0, 1, np.nan
    given = mask_gallery(n)["causal"], q, k, v, dout
    got = run(FORMS[form], *given, score=scores.softcap(5.0))
    ref, _ = expected(*given, score=scores.softcap(5.0))
    for name, a, b in zip(RESULTS, got, ref, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=name)
    assert np.isnan(ref[2][:, T:]).all()


@forms
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(scale, form):
    mask, inputs = mask_gallery(T + 3)["causal"], make_qkv(1, T + 3, T + 3, 2, 2, 8, np.float16)
    check(FORMS[form], mask, *inputs, scale=scale)
