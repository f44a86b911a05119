"""The oracle: sampled rows, exact results and the error that is allowed."""

import ml_dtypes
import numpy as np
import pytest

import masks
from experiments.harness.backends import open_backend
from experiments.harness.errors import OutOfBudget
from experiments.harness.inputs import random_inputs
from experiments.harness.oracle import Oracle, Relative, sample_rows, sampled
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    error_budget,
    low_precision,
    low_precision_backward,
    make_qkv,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


SHAPE = (2, 128, 2, 16)


def test_sampled_rows_reach_every_stretch():
    rows = sample_rows(1000, 10, seed=3)
    np.testing.assert_array_equal(rows // 100, np.arange(10))
    np.testing.assert_array_equal(sample_rows(7, 10), np.arange(7))
    np.testing.assert_array_equal(sample_rows(10, 10), np.arange(10))


@pytest.mark.parametrize(("nq", "limit", "tile_m"), [(16384, 64, 128), (1000, 7, 64), (130, 2, 64)])
def test_sampled_rows_reach_every_row_of_tiles(nq, limit, tile_m):
    tiles = -(-nq // tile_m)
    for seed in range(20):
        rows = sample_rows(nq, limit, seed, tile_m)
        assert set(rows // tile_m) == set(range(tiles))
        assert tiles <= len(rows) <= tiles + limit
        assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_oracle_of_sampled_rows_agrees_with_the_whole_reference(dtype):
    q, k, v, dout = arrays = make_qkv(2, 37, 37, 4, 2, 8, dtype, seed=2)
    mask = masks.butterfly(37, 4) & masks.causal(37)
    rows = sample_rows(37, 9)
    oracle = Oracle(open_backend("cpu"), arrays, mask, rows)
    out, lse = reference.attention(q, k, v, mask)
    dq, _, _ = reference.attention_backward(dout, q, k, v, mask)
    _, dk, dv = reference.attention_backward(sampled(np, dout, rows), q, k, v, mask)
    got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    places = {"out": (0, rows[-1], 0), "lse": (0, -1, rows[0]), "dq": (0, rows[-1], 0)}
    for name, array in got.items():
        (verdict,) = oracle.check(**{name: array})
        assert verdict.error <= verdict.budget
        wrong = array.copy()
        wrong[places.get(name, (0, -1, 0))] += 2 * verdict.budget
        with pytest.raises(OutOfBudget, match=f"^{name}: error"):
            oracle.check(**{name: wrong})


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_budgets_are_those_of_the_low_precision_reference(dtype):
    """Within what one draw of a largest error differs from another."""
    arrays = make_qkv(1, 256, 256, 2, 2, 32, dtype, seed=1)
    exact = *reference.attention(*arrays[:3]), *reference.attention_backward(arrays[3], *arrays[:3])
    low = *low_precision(*arrays[:3]), *low_precision_backward(arrays[3], *arrays[:3])
    oracle = Oracle(open_backend("cpu"), arrays, None, np.arange(256))
    names = ("out", "lse", "dq", "dk", "dv")
    for name, x, y, factor in zip(names, exact, low, (2, 2, 3, 3, 3), strict=True):
        (verdict,) = oracle.check(**{name: x})
        assert 0.4 < verdict.budget / error_budget(x, y, factor) < 2.5


def test_relative_errors_of_some_heads_agree_with_the_reference():
    arrays = random_inputs(np, SHAPE, BF16, seed=0)
    mask, rows = masks.butterfly(128, 32), sample_rows(128, 32)
    oracle = Oracle(open_backend("cpu"), arrays, mask, rows, [(0, 1), (1, 0)], measure=Relative)
    wide = [x.astype(np.float64) for x in arrays]
    out, _ = reference.attention(*wide[:3], mask.dense())
    only = sampled(np, arrays[3], rows).astype(np.float64)
    grads = reference.attention_backward(only, *wide[:3], mask.dense())
    good = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    assert max(verdict.error for verdict in oracle.check(**good)) < 1e-6
    for key, x in good.items():
        off = x * np.where(np.arange(128) == rows[5], 1.3, 1)[:, None, None]
        with pytest.raises(OutOfBudget, match=f"{key}: error .*, allowed"):
            oracle.check(**{key: off})
        lost = x.copy()
        lost[0, 1, 0, 3] = np.nan
        with pytest.raises(OutOfBudget, match=f"{key} is not finite"):
            oracle.check(**{key: lost})


def test_budget_is_the_one_that_is_enforced():
    exact, low = np.array([1.0, -4.0, np.inf]), np.array([1.5, -4.0, np.inf], np.float32)
    budget = error_budget(exact, low, 2)
    assert error_budget(exact, low, 3) == 1.5 * budget
    assert budget == 2 * (0.5 + 4 * np.finfo(np.float32).eps)
    assert_within_reference(exact + np.array([0, budget * 0.999, 0]), exact, low)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_reference(exact + np.array([0, budget * 1.001, 0]), exact, low)
