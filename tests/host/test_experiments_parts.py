"""The parts of the experiments: inputs, sweeps, timing protocol, closed forms, GPU tasks."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import masks
import nbflash
from experiments.commands import simt as bench_simt
from experiments.commands.gallery import row_of
from experiments.commands.sparsity import read_settings
from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.errors import BadInput, OutOfBudget, one_line
from experiments.harness.inputs import load_qkv
from experiments.harness.patterns import PATTERNS
from experiments.harness.provenance import provenance
from experiments.harness.timing import MIN_ROUNDS, Timing, WallClock, interleave
from experiments.report.figures import draw_simt
from nbflash.testing import make_qkv

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


@pytest.mark.parametrize(
    ("given", "dtype"),
    [({}, "float32"), ({"impl": "sm90"}, "float16"), ({"impl": "sm90", "dtype": "b"}, "b")],
)
def test_the_hopper_kernels_are_measured_in_a_dtype_that_they_have(given, dtype):
    options = {"impl": "auto", "input": None, "seed": 0, "mask": ()} | given
    assert read_settings("full", "cuda", options).dtype == dtype


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


def test_the_matrix_product_is_checked_and_counted(monkeypatch):
    backend = open_backend("cpu")
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)
    row = bench_simt.product(backend, 300, rounds=3, seconds=1, seed=0)
    assert row["tflops"] == pytest.approx(2 * 300**3 / (row["median_ms"] * 1e-3) / 1e12)
    assert 0 < row["error"] <= row["budget"] < 1e-3
    assert set(row) == set(sweeps.load("simt")["host"]) | set(
        bench_simt._row("", "", "", Timing((1.0,)))
    )

    def tf32(a, b):
        return (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) @ b

    truncating = SimpleNamespace(matmul=tf32, array=np.array, __name__="truncating")
    with pytest.raises(OutOfBudget, match="no timing is reported, matrix product: error"):
        bench_simt.product(replace(backend, xp=truncating), 300, rounds=3, seconds=1, seed=0)


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


def test_reasons_in_one_line():
    inputs = np.ones((3, 1, 4, 1, 8), np.float32)
    reasons = nbflash.why_not("sm90", *inputs)
    assert len(reasons) > 1
    with pytest.raises(ValueError, match="cannot run") as error:
        nbflash.attention(*inputs, impl="sm90")
    line = one_line(error.value)
    assert "\n" not in line
    assert line.endswith(", cpu): " + "; ".join(reasons))
    assert one_line(KeyError()) == "KeyError"
