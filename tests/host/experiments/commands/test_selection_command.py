"""Blocks chosen at run time, step by step, at the sizes of --quick."""

import numpy as np
import pytest
from command_runs import assert_figure, command, read_csv

from experiments.harness import sweeps
from nbflash.backends.cpu.executor import CpuExecutor

METHODS = [spec["name"] for spec in sweeps.load("selection")["method"]]


def test_every_method_on_random_and_real_arrays(tmp_path, capsys):
    command("selection --quick --device cpu", "--out", tmp_path)
    rows = read_csv(tmp_path / "selection.csv")
    assert [(row["input"], row["method"]) for row in rows] == [
        (name, method) for name in ("random", "sample") for method in ("dense", *METHODS)
    ]
    assert {"commit", "date", "device", "driver"} <= set(rows[0])
    for row in rows:
        times = [float(row[f"{step}_ms"] or 0) for step in ("select", "plan", "forward")]
        backward = float(row["backward_ms"])
        if row["method"] == "dense":
            dense = times[2], times[2] + backward
            assert (row["select_ms"], row["plan_ms"]) == ("", "")
            assert [float(row[key]) for key in ("density", "kept", "distance")] == [1, 1, 0]
            continue
        assert min(times) > 0
        assert float(row["speedup"]) == pytest.approx(dense[0] / sum(times))
        assert float(row["speedup_training"]) == pytest.approx(dense[1] / (sum(times) + backward))
        assert 0 < float(row["density"]) <= 1
        assert 0 < float(row["kept"]) <= 1 + 1e-9
        assert (float(row["distance"]) < 0.01) == (float(row["kept"]) > 0.999)
    assert (
        "sample, causal, float32: batch=1, seqlen=512, heads=12, head_dim=32"
        in capsys.readouterr().out
    )
    assert_figure(tmp_path / "selection.png", 2)


def test_chosen_methods_over_all_keys(tmp_path, monkeypatch):
    sweep = sweeps.load("selection")
    sweep["cpu"]["quick"]["causal"] = [False]
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    names = "mean_pooled", "vertical_slash"
    command("selection --quick --device cpu", *(f"--method={x}" for x in names), "--out", tmp_path)
    rows = read_csv(tmp_path / "selection.csv")
    assert [row["method"] for row in rows] == ["dense", "mean_pooled"] * 2
    assert {row["causal"] for row in rows} == {"False"}


def test_unknown_method(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command("selection --quick --device cpu --method nobody", "--out", tmp_path)
    assert "expected one of mean_pooled" in capsys.readouterr().err


def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch):
    right = CpuExecutor.forward

    def wrong(self, q, k, v, out, lse, *state):
        right(self, q, k, v, out, lse, *state)
        out *= np.float32(1.01)

    monkeypatch.setattr(CpuExecutor, "forward", wrong)
    with pytest.raises(SystemExit, match="1"):
        command("selection --quick --device cpu", "--out", tmp_path)
    assert "no timing is reported" in capsys.readouterr().err
