"""Scaling over ranks, end to end at tiny sizes; ranks are threads."""

import sys

import pytest
from command_runs import PROVENANCE, read_csv, run

from experiments.harness import sweeps
from nbflash import distributed


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    sweep = sweeps.load("distributed")
    sweep["cpu"] |= {"head_dim": 8, "heads": 2, "heads_kv": 1, "tile": 32}
    sweep["cpu"]["quick"] = {"rounds": 1, "weak": [96], "strong": [128]}
    monkeypatch.setattr("experiments.commands.distributed.load", {"distributed": sweep}.get)
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)

    def threads(function, ranks, *args, processes, timeout):
        assert processes
        return distributed.run(function, ranks, *args, timeout=60)

    stand_in = {name: getattr(distributed, name) for name in distributed.__all__} | {"run": threads}
    module = type(sys)("distributed")
    vars(module).update(stand_in)
    monkeypatch.setattr("experiments.commands.distributed.distributed", module)
    return module


COMMAND = "distributed", "--processes", 2, "--quick", "--device", "cpu"


def test_rows_of_both_passes_and_scalings(tmp_path, capsys):
    chosen = "--mask", "causal", "--mask", "window", "--out", tmp_path
    status, out, err = run(capsys, *COMMAND, *chosen)
    assert status == 0, err
    assert "Attention over 2 ranks" in out
    rows = read_csv(tmp_path / "distributed.csv")
    assert rows[0].keys() >= PROVENANCE
    found = [(row["scaling"], row["mask"], row["tokens"], row["pass"]) for row in rows]
    assert found == [
        (scaling, mask, tokens, name)
        for scaling, tokens in (("weak", "192"), ("strong", "128"))
        for mask in ("causal", "window")
        for name in ("forward", "backward")
    ]
    for row in rows:
        assert float(row["error"]) <= float(row["budget"])
        ideal = float(row["alone_ms"]) / 2 / float(row["median_ms"])
        assert float(row["of_ideal"]) == pytest.approx(ideal)


def test_a_wrong_result_is_refused(tmp_path, capsys, tiny):
    right = tiny.attention

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out * 1.01, lse

    tiny.attention = wrong
    status, _, err = run(capsys, *COMMAND, "--mask", "causal", "--out", tmp_path)
    assert status == 1
    assert err.startswith("error: out:")
    assert not (tmp_path / "distributed.csv").exists()


def test_without_mpi_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    status, _, err = run(capsys, "distributed", "--device", "cpu", "--out", tmp_path)
    assert (status, "mpi4py is not installed (pip install 'nbflash[mpi]')" in err) == (2, True)
