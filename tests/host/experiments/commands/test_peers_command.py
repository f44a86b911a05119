"""nbflash beside other libraries: options, columns and a whole run, with stand-ins."""

import pytest
from command_runs import read_csv, stand_in

from experiments import cli
from experiments.commands import peers
from experiments.commands.peers import COLUMNS
from experiments.harness import sweeps
from experiments.harness.errors import BadInput
from experiments.harness.passes import BACKWARD, BOTH, FORWARD


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
    chosen = {"names": ("dense",), "head_dims": (64, 128), "seqlens": ()}
    passes = (BACKWARD, FORWARD)
    assert calls == [((tmp_path, 0, False, passes, "auto", ("nbflash",)), chosen)]
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
    peers.run(tmp_path, quick=True, impl="cpu", **chosen)
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
