"""Counted memory accesses, end to end at tiny sizes."""

from command_runs import assert_figure, read_csv, run

from experiments.harness import sweeps


def test_io_counts(tmp_path, capsys, monkeypatch):
    sweep = sweeps.load("io")
    sweep["length"] |= {"n": [32, 64], "head_dim": 8, "sram": 256}
    sweep["sram"] |= {"n": 64, "head_dim": 8, "sram": [64, 128, 256]}
    sweep["density"] |= {"n": 64, "head_dim": 8, "sram": 256, "block": 8}
    monkeypatch.setattr("experiments.commands.io.load", {"io": sweep}.get)
    status, _, _ = run(capsys, "io", "--out", tmp_path)
    assert status == 0
    rows = read_csv(tmp_path / "io.csv")
    of = {(row["sweep"], row["algorithm"], row["n"], row["sram"]): row for row in rows}
    # Algorithm 0 reads Q, K, S, P and V and writes S, P and O, whatever the SRAM.
    for sram in ("64", "128", "256"):
        standard = of["sram", "0: standard", "64", sram]
        assert int(standard["reads"]) == 3 * 64 * 8 + 2 * 64 * 64
        assert int(standard["writes"]) == 64 * 8 + 2 * 64 * 64
    # Twice the SRAM, half the passes over Q and O: N²d²/M.
    flash = [int(of["sram", "1: flash", "64", sram]["accesses"]) for sram in ("64", "128", "256")]
    once = 2 * 64 * 8 + 64 * 10
    assert [x - once for x in flash] == [64 * 32 * 28, 64 * 16 * 28, 64 * 8 * 28]
    sparse = {row["density"]: row for row in rows if row["algorithm"] == "5: block-sparse"}
    assert int(sparse["0.125"]["accesses"]) - once == (int(sparse["1.0"]["accesses"]) - once) / 8
    assert all(float(row["error"]) <= float(row["budget"]) for row in rows)
    assert_figure(tmp_path / "io.png", 3)
