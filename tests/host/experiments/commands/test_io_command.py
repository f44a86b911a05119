"""Counted memory accesses, end to end at tiny sizes."""

from command_runs import assert_figure, read_csv, run

from experiments.harness import sweeps


def test_io_counts(tmp_path, capsys, monkeypatch):
    sweep = sweeps.load("io")
    sweep["length"] |= {"n": [32, 64], "head_dim": 8, "sram": 256}
    sweep["sram"] |= {"n": 64, "head_dim": 8, "sram": [64, 128, 256]}
    sweep["density"] |= {"n": 64, "head_dim": 8, "sram": 256, "block": 8}
    sweep["comparison"] |= {"n": [64], "head_dim": 4, "sram": 64, "query_chunk": 16}
    sweep["dropout"] |= {"n": 64, "head_dim": 8, "sram": 256, "block": 8}
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
    # Dropout adds seed and offset of its state: written forward, read backward, two elements saved.
    dropout = [row for row in rows if row["sweep"] == "dropout"]
    names = [row["algorithm"] for row in dropout]
    assert names == ["2: flash", "4: flash", "5: block-sparse", "4: flash"]
    assert int(dropout[0]["accesses"]) == flash[2] + 2
    assert [int(row["extra"]) for row in dropout] == [2 * 64 + 2] * 4
    assert_the_three_differences(rows, n=64, head_dim=4)
    assert_figure(tmp_path / "io.png", 3)


def assert_the_three_differences(rows, n, head_dim):
    """Of appendix B.5: accesses, copies of the output, and what the backward pass does again."""
    of = {(row["algorithm"], row["pass"]): row for row in rows if row["sweep"] == "comparison"}
    forward = {name: row for (name, which), row in of.items() if which == "forward"}
    extra = {name: int(row["extra"]) for name, row in forward.items()}
    # Eight chunks of keys, each with an output, a sum and a maximum for 16 queries, and S and P.
    chunks = 8 * 16 * (head_dim + 2) + 2 * 16 * 8
    assert extra == {
        "0: standard": 2 * n * n,
        "B.1": n,
        "Rabe and Staats": chunks,
        "1: flash": 2 * n,
    }
    accesses = {name: int(row["accesses"]) for name, row in forward.items()}
    assert accesses["1: flash"] < accesses["0: standard"] < accesses["Rabe and Staats"]
    again = {
        name: (float(row["recomputed_s"]), float(row["recomputed_o"]), int(row["extra"]))
        for (name, which), row in of.items()
        if which == "backward"
    }
    assert again == {
        "3: standard": (0, 0, 3 * n * n),
        "B.2": (3, 0, 2 * n),
        "Rabe and Staats": (2, 8, chunks + 2 * 16 * 8),
        "4: flash": (1, 0, 2 * n),
    }
