"""What score functions, dropout and attention sinks cost, at tiny sizes."""

import numpy as np
import pytest
from command_runs import command, read_csv

from experiments.commands.features import beside_plain
from experiments.libraries.features import FEATURES, PLAIN
from nbflash.backends.reference import ReferenceExecutor

TINY = "features --quick --device cpu --impl reference --seqlen 128 --head-dim 8"


def test_every_feature_of_every_mask(tmp_path, capsys):
    command(TINY, "--out", tmp_path)
    rows = read_csv(tmp_path / "features.csv")
    assert [(row["mask"], row["pass"], row["feature"]) for row in rows] == [
        (mask, which, name)
        for mask in ("dense", "causal", "butterfly")
        for which in ("forward", "backward")
        for name in FEATURES
    ]
    assert {"commit", "date", "device", "driver", "numba_cuda", "cupy", "config"} <= set(rows[0])
    for row in rows:
        assert (row["impl"], row["dtype"], row["aim"]) == ("reference", "float32", "")
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        if row["feature"] == PLAIN:
            plain = row
            assert float(row["time_over_plain"]) == 1
        ratio = float(row["median_ms"]) / float(plain["median_ms"])
        assert float(row["time_over_plain"]) == pytest.approx(ratio)
    printed = capsys.readouterr().out
    for which in ("forward", "backward"):
        assert f"{which}, float32: batch=1, seqlen=128, heads=2, head_dim=8" in printed


def test_chosen_features_stand_beside_plain(tmp_path):
    options = "--feature sink --feature bias --mask causal --passes both --dtype bfloat16"
    command(TINY, options, "--out", tmp_path)
    rows = read_csv(tmp_path / "features.csv")
    assert [row["feature"] for row in rows] == [PLAIN, "bias", "sink"]
    assert {(row["pass"], row["mask"], row["dtype"]) for row in rows} == {
        ("both", "causal", "bfloat16")
    }


def test_the_tiles_are_named_and_tensor_cores_have_aims(tmp_path):
    options = "--quick --device cpu --seqlen 128 --head-dim 8 --mask dense --feature dropout"
    command("features", options, "--out", tmp_path)
    rows = read_csv(tmp_path / "features.csv")
    assert [(row["impl"], row["config"]) for row in rows[::2]] == [("cpu", "128×128"), ("cpu", "")]
    row = {"pass": "forward", "mask": "dense", "impl": "sm90", "median_ms": 2.0}
    found = beside_plain([row | {"library": name} for name in (PLAIN, "softcap", "bias")])
    assert [row["aim"] for row in found] == [None, 1.15, None]
    found = beside_plain([row | {"library": name, "impl": "sm80"} for name in (PLAIN, "alibi")])
    assert [row["aim"] for row in found] == [None, 1.25]
    (alone,) = beside_plain([row | {"library": "dropout"}])
    assert (alone["time_over_plain"], alone["aim"]) == (None, 1.5)


def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch):
    right = ReferenceExecutor.forward

    def wrong(self, q, k, v, out, lse, *state):
        right(self, q, k, v, out, lse, *state)
        out *= np.float32(1.01 if state else 1)

    monkeypatch.setattr(ReferenceExecutor, "forward", wrong)
    options = "--passes forward --mask dense --feature dropout --feature sink"
    with pytest.raises(SystemExit, match="1"):
        command(TINY, options, "--out", tmp_path)
    printed = capsys.readouterr()
    assert "nbflash is wrong: dropout, forward, dense, d=8, N=128" in printed.err
    assert "dropout is left out (forward, dense, d=8, N=128): out: error" in printed.out
    rows = read_csv(tmp_path / "features.csv")
    assert [row["feature"] for row in rows] == [PLAIN, "sink"]


def test_options_that_do_not_fit(tmp_path, capsys):
    for options, message in {
        "--feature tanh": "--feature tanh: expected one of plain, softcap, alibi",
        "--dtype float64": "'float64' is not one of",
        "--device cpu --mask diagonal": "expected one of dense, causal, butterfly",
        "--device cpu --seqlen 100": "no mask has room in 100: dense takes mul",
        "--passes sideways": "--passes sideways: expected some of forward, backward, both",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            command("features", options, "--out", tmp_path)
        assert message in capsys.readouterr().err
