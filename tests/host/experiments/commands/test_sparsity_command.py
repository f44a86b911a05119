"""Runtime against sparsity, end to end at tiny sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
from command_runs import PROVENANCE, assert_figure, read_csv, run

from experiments.commands.sparsity import read_settings, tile_height
from experiments.harness import sweeps
from experiments.harness.timing import interleave
from nbflash.backends.cpu.executor import CpuExecutor
from nbflash.backends.reference import ReferenceExecutor

TINY = (
    "sparsity --quick --device cpu --dtype float64 --seqlen 128 --heads 2 --head-dim 8 --block 8 "
    "--rounds 3 --seconds 1 --check-rows 32"
)


def test_sparsity_on_random_input(tmp_path, capsys):
    status, _, err = run(capsys, TINY, "--out", tmp_path)
    assert (status, err) == (0, "")
    rows = read_csv(tmp_path / "sparsity.csv")
    wanted = {"impl", "dtype", "batch", "seqlen", "heads", "head_dim", "mask", "block", "density"}
    wanted |= {"tile", "pass", "median_ms", "p10_ms", "p90_ms", "tflops", "error", "budget"}
    assert PROVENANCE | wanted <= set(rows[0])
    families = {"butterfly", "local", "union", "dense", "baseline"}
    assert {row["family"] for row in rows} == families
    for which, work_of in {"forward": 1, "backward": 2.5, "both": 3.5}.items():
        masks = [row for row in rows if row["pass"] == which and row["error"]]
        densities = [float(row["density"]) for row in masks]
        assert min(densities) == 1 / 16
        assert max(densities) == 1
        assert len({row["mask"] for row in masks}) == len(masks) >= 9
        for row in masks:
            assert float(row["error"]) <= float(row["budget"])
            assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
            work = 4 * float(row["density"]) * 128 * 128 * 8 * 2
            work *= work_of
            assert float(row["tflops"]) == pytest.approx(work / float(row["median_ms"]) / 1e9)
    assert_figure(tmp_path / "sparsity.png", 3)


def test_sparsity_on_a_users_input_reports_fidelity(tmp_path, capsys):
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, q=rng.standard_normal((64, 4, 8)), **dict.fromkeys("kv", np.ones((64, 2, 8))))
    options = "--quick --device cpu --impl reference --rounds 3 --mask union --mask local"
    status, _, err = run(capsys, "sparsity", options, "--input", path, "--out", tmp_path)
    assert (status, err) == (0, "")
    rows = read_csv(tmp_path / "sparsity-mine.csv")
    assert {row["family"] for row in rows} == {"union", "local", "dense", "baseline"}
    assert (rows[0]["seqlen"], rows[0]["heads"], rows[0]["heads_kv"]) == ("64", "4", "2")
    for row in rows:
        if row["family"] != "baseline":
            # Equal keys share the attention evenly, and equal values make every average the same.
            assert float(row["attention_kept"]) == pytest.approx(float(row["density"]))
            assert float(row["output_error"]) < 1e-6
    assert_figure(tmp_path / "sparsity-mine.png", 4)


def test_full_sweep_is_the_default(tmp_path, capsys):
    options = TINY.replace("--quick ", "")
    status, out, _ = run(capsys, options, "--impl", "reference", "--out", tmp_path)
    assert status == 0
    assert out.count("of a tile of the dense run") == 3
    assert len(read_csv(tmp_path / "sparsity.csv")) > 3 * 16


def test_one_wrong_tile_is_refused_however_few_rows_are_asked_for(tmp_path, capsys, monkeypatch):
    right = CpuExecutor.forward

    def wrong(self, q, k, v, out, lse):
        right(self, q, k, v, out, lse)
        height = self.schedule.tile_m
        out[:, 3 * height : 4 * height] += 1e-6

    monkeypatch.setattr(CpuExecutor, "forward", wrong)
    options = "--impl cpu --seqlen 1024 --block 64 --check-rows 2"
    status, _, err = run(capsys, TINY, options, "--out", tmp_path)
    assert status == 1
    assert "no timing is reported, out" in err


WRONG = {
    "out": ("forward", 2, (0, 3, 0, 1)),
    "lse": ("forward", 3, (0, 1, 5)),
    "dq": ("backward", 7, (0, 7, 0, 0)),
    "dk": ("backward", 8, (0, 127, 1, 0)),
    "dv": ("backward", 9, (0, 64, 1, 7)),
}


@pytest.mark.parametrize("array", WRONG)
@pytest.mark.parametrize("fault", [lambda x: x + 1e-6 * (1 + abs(x)), lambda x: np.nan])
def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch, array, fault):
    method, argument, index = WRONG[array]
    right = getattr(ReferenceExecutor, method)

    def wrong(self, *args):
        right(self, *args)
        target = args[argument + (method == "forward")]
        target[index] = fault(target[index])

    monkeypatch.setattr(ReferenceExecutor, method, wrong)
    options = f"--impl reference --check-rows 128 --out {tmp_path}"
    status, out, err = run(capsys, TINY, options)
    assert status == 1
    assert err.startswith("error: dense: no timing is reported, " + array)
    assert err.count("\n") == 1
    assert "ms" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "argument"), [("forward", 3), ("backward", 7)])
def test_a_result_that_goes_wrong_while_it_is_timed_is_refused(
    tmp_path, capsys, monkeypatch, method, argument
):
    right, timed = getattr(ReferenceExecutor, method), []

    def wrong(self, *args):
        right(self, *args)
        if timed:
            args[argument][:] += 1

    def interleaved(*args, **options):
        timed.append(args)
        return interleave(*args, **options)

    monkeypatch.setattr("experiments.harness.runner.interleave", interleaved)
    monkeypatch.setattr(ReferenceExecutor, method, wrong)
    status, _, err = run(capsys, TINY, "--impl", "reference", "--out", tmp_path)
    assert status == 1
    assert "as timed: no timing is reported" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritten_row_outside_the_sample_is_refused(tmp_path, capsys, monkeypatch):
    right = ReferenceExecutor.forward

    def wrong(self, q, k, v, out, lse):
        kept = out[:, 1:3].copy()
        right(self, q, k, v, out, lse)
        out[:, 1:3] = kept

    monkeypatch.setattr(ReferenceExecutor, "forward", wrong)
    options = f"--impl reference --check-rows 1 --out {tmp_path}"
    status, _, err = run(capsys, TINY, options)
    assert status == 1
    assert "out is not finite" in err


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
