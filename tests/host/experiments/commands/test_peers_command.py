"""nbflash beside other libraries: options, columns and a whole run, with stand-ins."""

import pytest
from command_runs import read_csv, stand_in

from experiments import cli
from experiments.commands import peers
from experiments.commands.peers import COLUMNS
from experiments.harness import sweeps
from experiments.harness.errors import BadInput
from experiments.harness.grid import DOCUMENTS
from experiments.harness.passes import BACKWARD, BOTH, FORWARD
from experiments.libraries.nbflash import Nbflash


def test_columns():
    assert ",".join(COLUMNS) == (
        "library,version,pass,mask,density,tile,head_dim,heads,heads_kv,batch,seqlen,dtype,"
        "median_ms,p10_ms,p90_ms,tflops,error,device,driver,commit,date"
    )


def test_the_command_passes_its_options_on(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(peers, "run", lambda *args, **chosen: calls.append((args, chosen)))
    options = (
        "--passes backward,forward --head-dim 64 --head-dim 128 --mask dense --library nbflash"
    )
    cli.main(["peers", "--out", str(tmp_path), *options.split()])
    chosen = {"names": ("dense",), "head_dims": (64, 128), "seqlens": (), "rounds": None}
    chosen |= {"passes": (BACKWARD, FORWARD), "libraries": ("nbflash",), "impl": "auto", "seed": 0}
    assert calls == [((tmp_path, "full"), chosen)]
    cli.main(["peers", "--out", str(tmp_path), "--cases", "--rounds", "5"])
    assert calls[1][0] == (tmp_path, "cases")
    assert calls[1][1]["rounds"] == 5
    with pytest.raises(SystemExit, match="2"):
        cli.main(["peers", "--out", str(tmp_path), "--passes", "sideways"])
    assert "--passes sideways: expected some of forward, backward, both" in capsys.readouterr().err
    with pytest.raises(BadInput, match="--library fa5: expected one of nbflash, sdpa-flash"):
        peers.open_factories(("fa5",), "auto")


def test_a_run_leaves_table_csv_and_figure(tmp_path, monkeypatch, capsys):
    sweep = sweeps.load("peers") | {"tokens": 256, "width": 32, "check_rows": 32}
    sweep["quick"] |= {"head_dim": [16], "seqlen": [256]}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    stand_in(monkeypatch)
    missing = lambda name: "" if name == "nbflash" else "not here"
    monkeypatch.setattr(peers, "why_not_here", missing)
    chosen = {"passes": (FORWARD, BOTH), "names": ("dense", "random-64")}
    peers.run(tmp_path, "quick", impl="cpu", **chosen)
    printed = capsys.readouterr().out
    assert "flash-attn-4 is left out (this machine): not here" in printed
    assert "bfloat16: batch=1, seqlen=256, heads=2, head_dim=16" in printed
    rows = read_csv(tmp_path / "peers.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [(row["mask"], row["pass"], row["density"], row["tile"]) for row in rows] == [
        ("dense", FORWARD, "1.0", "128"),
        ("dense", BOTH, "1.0", "128"),
        ("random-64", FORWARD, "0.25", "64"),
        ("random-64", BOTH, "0.25", "64"),
    ]
    assert (tmp_path / "peers.png").exists()


class Stranger(Nbflash):
    """Another library, which lacks one mask."""

    @staticmethod
    def why_not(case):
        return "no documents" if case.kind == DOCUMENTS else ""

    def label(self, case):
        return "flash-attn-4"


def test_cases_of_their_own_run_with_their_libraries(tmp_path, monkeypatch, capsys):
    sweep = sweeps.load("peers") | {"check_rows": 32}
    specs = [
        {"name": "gqa", "pattern": "causal", "shapes": [[2, 75, 4, 16]], "heads_kv": 2},
        {"name": "equal-heads", "pattern": "causal", "shapes": [[2, 75, 4, 16]]},
        {"name": "documents", "pattern": "documents", "shapes": [[1, 96, 2, 16]]}
        | {"lengths": [33, 63], "causal": True},
        {"name": "prefix", "pattern": "prefix", "shapes": [[1, 96, 2, 16]], "prefix_len": 40}
        | {"libraries": ["nbflash"]},
    ]
    sweep["cases"] |= {"case": specs}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    monkeypatch.setattr(peers, "LIBRARIES", {"nbflash": Nbflash, "flash-attn-4": Stranger})
    missing = lambda name: ""
    monkeypatch.setattr(peers, "why_not_here", missing)
    stand_in(monkeypatch)
    peers.run(tmp_path, "cases", impl="cpu", passes=(FORWARD, BACKWARD), rounds=1)
    out = capsys.readouterr().out
    assert out.count("left out") == 1
    assert "flash-attn-4 is left out (documents, d=16, N=96): no documents" in out
    rows = read_csv(tmp_path / "peers-cases.csv")
    found = [(row["mask"], row["heads_kv"], row["library"]) for row in rows]
    assert found[::2] == [
        ("gqa", "2", "nbflash cpu"),
        ("gqa", "2", "nbflash cpu"),
        ("equal-heads", "4", "nbflash cpu"),
        ("equal-heads", "4", "nbflash cpu"),
        ("documents", "2", "nbflash cpu"),
        ("prefix", "2", "nbflash cpu"),
    ]
    cells = (33 * 34 + 63 * 64) // 2
    assert {row["density"] for row in rows if row["mask"] == "documents"} == {str(cells / 96**2)}
    assert (tmp_path / "peers-cases.png").exists()
