"""The speed of the CPU kernels, end to end at a tiny size."""

from command_runs import PROVENANCE, read_csv, run

from experiments.commands import cpu
from experiments.harness import sweeps


def test_cpu_kernels_are_measured_beside_in_place_numpy(tmp_path, capsys, monkeypatch):
    sweep = sweeps.load("cpu") | {"check_rows": 16}
    sweep["shape"] = [{"batch": 1, "seqlen": 96, "heads": 2, "head_dim": 16}]
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    monkeypatch.setattr(cpu, "why_not_torch", lambda device: "no torch")
    status, out, _ = run(capsys, "cpu --quick --out", tmp_path)
    assert status == 0
    rows = read_csv(tmp_path / "cpu.csv")
    assert [(row["what"], row["implementation"]) for row in rows] == [
        ("forward", "nbflash cpu"),
        ("backward", "nbflash cpu"),
        ("forward", "NumPy in place"),
    ]
    assert {*PROVENANCE, "torch", "gflops", "speed_of_nbflash"} <= set(rows[0])
    for row in rows[:2]:
        assert 0 < float(row["error"]) <= float(row["budget"])
        assert float(row["speed_of_nbflash"]) == 1
    assert rows[2]["error"] == rows[2]["budget"] == ""
    assert "torch is not installed here" in out
