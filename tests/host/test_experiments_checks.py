"""What the experiments say about numbers: checks, budgets, the baseline, fits and noise."""

from types import SimpleNamespace

import numpy as np
import pytest

import masks
from experiments.commands.sparsity import tile_height
from experiments.harness.backends import open_backend
from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import FACTOR, Oracle, sample_rows, sampled
from experiments.harness.passes import flops
from experiments.libraries.dense import DenseBaseline, fits_in_memory
from experiments.report import sparsity_report
from experiments.report.fit import fit_line, fixed_cost
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    error_budget,
    low_precision,
    low_precision_backward,
    make_qkv,
)


def test_fit_recovers_a_planted_line():
    s = np.array([0.01, 0.05, 0.1, 0.3, 0.6, 1.0])
    fit = fit_line(s, 0.7 + 9.0 * s, dense=8.0)
    assert fit.fixed == pytest.approx(0.7)
    assert fit.relative_slope == pytest.approx(9 / 8)
    assert fit.r_squared == pytest.approx(1)
    noisy = fit_line(s, 0.7 + 9.0 * s + np.array([1, -1, 1, -1, 1, -1]), dense=8.0)
    assert 0.8 < noisy.r_squared < 0.95


def test_fixed_cost_is_what_the_bound_lacks():
    s = np.array([0.01, 0.03, 0.5, 1.0])
    t = 1.25 * s * 8 + np.array([5.0, 0.25, 0.5, -1.0])
    assert fixed_cost(s, t, dense=8.0) == pytest.approx(0.5)
    assert fixed_cost(s, s * 8, dense=8.0) == 0


def test_flops_are_counted_as_the_papers_do():
    assert flops((2, 1024, 16, 64), 1.0, "forward") == 4 * 1024**2 * 64 * 16 * 2
    assert flops((2, 1024, 16, 64), 0.5, "backward") == 2.5 * 2 * 1024**2 * 64 * 16 * 2


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
    q, k, v, dout = make_qkv(2, 37, 37, 4, 2, 8, dtype, seed=2)
    mask = masks.butterfly(37, 4) & masks.causal(37)
    rows = sample_rows(37, 9)
    oracle = Oracle(q, k, v, dout, mask, rows)
    out, lse = reference.attention(q, k, v, mask)
    dq, _, _ = reference.attention_backward(dout, q, k, v, mask)
    _, dk, dv = reference.attention_backward(sampled(dout, rows), q, k, v, mask)
    got = {"out": out[:, rows], "lse": lse[:, :, rows], "dq": dq[:, rows], "dk": dk, "dv": dv}
    verdict = oracle.check("reference", **got)
    assert verdict.error <= verdict.budget
    for name, array in got.items():
        wrong = array.copy()
        wrong[0, -1, 0] += 2 * error_budget(oracle.exact[name], oracle.low[name], FACTOR[name])
        with pytest.raises(OutOfBudget, match=f"planted: no timing is reported, {name}: error"):
            oracle.check("planted", **{name: wrong})


@pytest.mark.parametrize(
    ("device", "head_dim", "tile_m", "height"),
    [
        ("cpu", 128, 192, 192),
        ("cuda", 64, 128, 64),
        ("cuda", 64, 192, 32),
        ("cuda", 64, 64, 32),
        ("cuda", 128, 128, 64),
    ],
)
def test_tiles_of_both_passes_are_made_of_the_tile_height(device, head_dim, tile_m, height):
    problem = SimpleNamespace(device=device, head_dim=head_dim)
    plan = SimpleNamespace(problem=problem, schedule=SimpleNamespace(tile_m=tile_m))
    assert tile_height(plan) == height
    assert tile_height(SimpleNamespace(problem=problem, schedule=None)) is None


def test_budget_is_the_one_that_is_enforced():
    exact, low = np.array([1.0, -4.0, np.inf]), np.array([1.5, -4.0, np.inf], np.float32)
    budget = error_budget(exact, low, 2)
    assert error_budget(exact, low, 3) == 1.5 * budget
    assert budget == 2 * (0.5 + 4 * np.finfo(np.float32).eps)
    assert_within_reference(exact + np.array([0, budget * 0.999, 0]), exact, low)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_reference(exact + np.array([0, budget * 1.001, 0]), exact, low)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_baseline_is_attention(dtype, chunk):
    q, k, v, dout = make_qkv(2, 33, 33, 4, 2, 8, dtype, seed=4)
    mask = masks.from_dense(np.random.default_rng(0).random((33, 33)) < 0.3).dense()
    mask[[0, 20]] = False
    baseline = DenseBaseline(open_backend("cpu"), q, k, v, dout, mask)
    baseline.chunk = chunk
    baseline.ds = np.empty((min(chunk, 8), 33, 33), dtype)
    for _ in range(2):
        (out,) = baseline.forward()
        dq, dk, dv = baseline.backward()
    dk, dv = (x.reshape(2, 33, 2, 2, 8).sum(axis=3) for x in (dk, dv))
    exact = (reference.attention(q, k, v, mask)[0],)
    exact += reference.attention_backward(dout, q, k, v, mask)
    low = (low_precision(q, k, v, mask)[0], *low_precision_backward(dout, q, k, v, mask))
    names = ("out", "dq", "dk", "dv")
    for name, got, x, y in zip(names, (out, dq, dk, dv), exact, low, strict=True):
        assert_within_reference(got, x, y, name)
    assert not out[:, [0, 20]].any()


def test_dense_baseline_is_left_out_where_its_scores_do_not_fit():
    backend = open_backend("cpu")
    assert fits_in_memory(backend, (1, 8192, 1, 64), np.dtype(np.float32))
    assert not fits_in_memory(backend, (1, 2**17, 1, 64), np.dtype(np.float32))


@pytest.mark.parametrize(("slow", "warned"), [(1.7, False), (1.8, True)])
def test_a_noisy_machine_is_named(capsys, slow, warned):
    rows = [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 1.0}] * 2
    rows += [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 5.0}]
    rows += [{"pass": "backward", "p10_ms": 2.0, "p90_ms": 2 * x} for x in (1.0, slow, slow)]
    sparsity_report._warn_of_noise(rows)
    out = capsys.readouterr().out
    assert ("backward" in out, "busy" in out, "forward" in out) == (warned, warned, False)
