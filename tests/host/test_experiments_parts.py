"""The parts of the experiments: inputs, timing protocol, baseline, fit, closed forms, checks."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import masks
from experiments import bench_simt, sparsity_report, sweeps
from experiments.backends import open_backend
from experiments.check import FACTOR, Oracle, error_budget, sample_rows, sampled
from experiments.dense import DenseBaseline, fits_in_memory
from experiments.errors import BadInput, OutOfBudget
from experiments.figures import draw_simt
from experiments.fit import fit_line, fixed_cost
from experiments.gallery import row_of
from experiments.inputs import load_qkv
from experiments.passes import flops
from experiments.patterns import PATTERNS
from experiments.provenance import provenance
from experiments.timing import MIN_ROUNDS, Timing, WallClock, interleave
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
)

DATA = Path(sweeps.__file__).parents[1] / "data"
F32 = np.dtype(np.float32)


# Inputs


def test_the_shipped_sample_is_one_layer_on_real_text():
    path = DATA / "sample.npz"
    assert path.stat().st_size <= 2 * 2**20
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(str(file["meta"]))
        assert {file[name].dtype.name for name in "qkv"} == {"float16"}
    assert meta["model_licence"] == "Apache-2.0"
    assert "public domain" in meta["text"]
    q, k, v, dout = load_qkv(path, F32, seed=0)
    assert q.shape == k.shape == v.shape == dout.shape == (1, 512, 12, 32)
    assert q.dtype == k.dtype == v.dtype == F32
    # Attention of a trained model is anything but even: neighbouring blocks hold 18 % of the pairs.
    mask = masks.local(512, 32, 1)
    kept = masks.coverage(q, k, mask)[0]
    assert mask.stats(32).token_density == 46 / 256
    assert kept.mean() > 0.5
    assert kept.max() > 0.7
    assert kept.min() < 0.25


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("form", ["npz", "npz upper case", "npy"])
def test_a_users_arrays_arrive_unchanged(tmp_path, form, batched):
    q, k, v, _ = make_qkv(1, 12, 12, 4, 4, 8, np.float32, seed=1)
    stored = (q, k, v) if batched else (q[0], k[0], v[0])
    path = tmp_path / f"x.{form[:3]}"
    if form == "npy":
        np.save(path, np.stack(stored))
    else:
        names = "QKV" if "upper" in form else "qkv"
        np.savez(path, other=np.arange(3), **dict(zip(names, stored, strict=True)))
    *loaded, dout = load_qkv(path, F32, seed=0)
    for got, expected in zip(loaded, (q, k, v), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.flags.c_contiguous
    assert dout.shape == q.shape
    assert np.abs(dout).mean() > 0.5


def test_safetensors_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="needs the package safetensors"):
        load_qkv(path, F32, seed=0)


# Sweeps


def test_cases_are_distinct_and_say_what_they_are():
    family = {
        "name": "both",
        "union": [{"pattern": "local", "width": 1}, {"pattern": "butterfly"}],
        "vary": "stages",
        "values": [0, 1, 3, 4],
    }
    found = sweeps.cases([family], 64, 8)
    # local | butterfly of 0 or 1 stages is local; 8 blocks have room for 3 stages.
    assert [case.expression for case in found][-1] == "local width=1 | butterfly stages=3"
    expected = masks.local(64, 8, 1) | masks.butterfly(64, 8, stages=3)
    np.testing.assert_array_equal(found[-1].mask.dense(), expected.dense())
    assert "stages 4" not in [case.label for case in found]
    assert sweeps.cases([family, family | {"name": "again"}], 64, 8) == found


@pytest.mark.parametrize("section", ["quick", "full"])
def test_sweep_covers_one_percent_to_all(section):
    sweep = sweeps.load("sparsity")[section]
    for device in ("cpu", "cuda"):
        n, block = sweep[device]["seqlen"], sweep[device]["block"]
        found = sweeps.cases(sweep["family"], n, block)
        density = [case.mask.stats(block).tile_density for case in found]
        assert min(density) < 0.02
        assert max(density) == 1
        assert {case.family for case in found} >= {"butterfly", "local", "union"}


# Timing


class CountingClock:
    """Ten milliseconds for every call that was measured before."""

    def __init__(self):
        self.order = []

    def measure(self, task):
        self.order.append(task())
        return 10.0 * len(self.order), self.order[-1]


def test_interleave_runs_every_task_once_a_round():
    clock, kept, ticks = CountingClock(), [], []
    tasks = {name: lambda name=name: name for name in "abcd"}
    timings = interleave(
        tasks,
        clock,
        rounds=8,
        seconds=60,
        keep=lambda name, result: kept.append((name, result, len(clock.order))),
        progress=lambda: ticks.append(1),
    )
    rounds = [tuple(clock.order[i : i + 4]) for i in range(0, 32, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len(set(rounds)) > 3
    assert sum(sum(t.samples) for t in timings.values()) == 10 * 32 * 33 / 2
    assert [(name, at) for name, _, at in kept] == list(zip(rounds[-1], range(29, 33), strict=True))
    assert len(ticks) == 4 * 9


def test_interleave_stops_when_the_time_is_up_but_not_before_three_rounds():
    kept = []
    timings = interleave(
        {"a": int}, WallClock(), rounds=50, seconds=0, keep=lambda name, _: kept.append(name)
    )
    assert len(timings["a"].samples) == MIN_ROUNDS
    assert kept == ["a"]
    with pytest.raises(ValueError, match="rounds=0"):
        interleave({"a": int}, WallClock(), rounds=0, seconds=1)


def test_timing_percentiles():
    timing = Timing(tuple(float(i) for i in range(11)))
    assert (timing.p10, timing.median, timing.p90) == (1, 5, 9)


def test_wall_clock_measures_milliseconds():
    duration, result = WallClock().measure(lambda: sum(range(200_000)))
    assert 0.1 < duration < 1000
    assert result == 19_999_900_000


# Fit


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


# Checks


def test_sampled_rows_reach_every_stretch():
    rows = sample_rows(1000, 10, seed=3)
    np.testing.assert_array_equal(rows // 100, np.arange(10))
    np.testing.assert_array_equal(sample_rows(7, 10), np.arange(7))
    np.testing.assert_array_equal(sample_rows(10, 10), np.arange(10))


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


def test_budget_is_the_one_that_is_enforced():
    exact, low = np.array([1.0, -4.0, np.inf]), np.array([1.5, -4.0, np.inf], np.float32)
    budget = error_budget(exact, low, 2)
    assert error_budget(exact, low, 3) == 1.5 * budget
    assert budget == 2 * (0.5 + 4 * np.finfo(np.float32).eps)
    assert_within_reference(exact + np.array([0, budget * 0.999, 0]), exact, low)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_reference(exact + np.array([0, budget * 1.001, 0]), exact, low)


# Baseline


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
    assert fits_in_memory(backend, (1, 8192, 1, 64), F32)
    assert not fits_in_memory(backend, (1, 2**17, 1, 64), F32)


# Gallery


@pytest.mark.parametrize(("n", "block"), [(64, 8), (96, 8), (160, 16), (336, 12)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_pattern_has_its_closed_form(pattern, n, block):
    mask = pattern.build(n, block)
    row = row_of(pattern, mask, n, block)
    assert row["cells"] == row["closed_form"] == mask.dense().sum()


def test_every_generator_is_in_the_gallery():
    other = {"from_dense", "from_function", "from_scipy", "per_head", "per_batch"}
    other |= {"coverage", "load", "save", "reorder", "documents_from_cu_seqlens"}
    generators = {name for name in masks.__all__ if name.islower()} - other
    assert {pattern.name for pattern in PATTERNS} == generators


def test_a_count_that_differs_from_its_closed_form_is_refused():
    causal = next(pattern for pattern in PATTERNS if pattern.name == "causal")
    with pytest.raises(OutOfBudget, match=r"causal: 1552 cells.*gives 2080"):
        row_of(causal, masks.window(64, left=31, right=0), 64, 8)


# GPU benchmark, the part that any device runs


def test_simt_tasks_are_checked_and_callable():
    backend = open_backend("cpu")
    host = make_qkv(1, 40, 40, 2, 2, 8, np.float32)
    tasks, verdicts, verify = bench_simt.nbflash_tasks(
        backend, host, check_rows=16, impl="reference"
    )
    assert {which for which, _ in tasks} == {"forward", *bench_simt.FORMS}
    assert set(verdicts) == set(tasks)
    out, lse = tasks["forward", bench_simt.NBFLASH]()
    assert (out.shape, lse.shape) == ((1, 40, 2, 8), (1, 2, 40))
    first, second = (tasks[form, bench_simt.NBFLASH]() for form in bench_simt.FORMS)
    for got, same in zip(first, second, strict=True):
        np.testing.assert_array_equal(got, same)
    for key, task in tasks.items():
        result = task()
        verify(key, result)
        result[0][0, :, 1] += 1
        with pytest.raises(OutOfBudget, match=f"{key[0]}, as timed"):
            verify(key, result)


def test_simt_figure(tmp_path):
    rows = [
        {"head_dim": d, "implementation": name, "what": what, "tflops": 30.0 + d / 10}
        | {"device": "GPU", "seqlen": 4096, "heads": 16, "batch": 2, "commit": "0"}
        for d in (64, 128)
        for what, name in (("forward", "ours"), ("forward", "theirs"), ("backward", "ours"))
    ]
    draw_simt(rows, tmp_path / "simt.png")
    assert (tmp_path / "simt.png").stat().st_size > 10_000


def test_provenance_names_commit_device_and_versions():
    found = provenance("cpu")
    assert found["commit"]
    assert found["device"].endswith("cores")
    assert found["numpy"] == np.__version__
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize(("slow", "warned"), [(1.7, False), (1.8, True)])
def test_a_noisy_machine_is_named(capsys, slow, warned):
    rows = [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 1.0}] * 2
    rows += [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 5.0}]
    rows += [{"pass": "backward", "p10_ms": 2.0, "p90_ms": 2 * x} for x in (1.0, slow, slow)]
    sparsity_report._warn_of_noise(rows)
    out = capsys.readouterr().out
    assert ("backward" in out, "busy" in out, "forward" in out) == (warned, warned, False)
