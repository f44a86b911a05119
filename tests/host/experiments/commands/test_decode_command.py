"""The rate at which decode reads its keys, at tiny sizes."""

import numpy as np
import pytest
from command_runs import command, read_csv

import nbflash
from experiments.commands import decode
from experiments.harness import sweeps
from experiments.harness.errors import OutOfBudget
from experiments.harness.setup import set_up
from nbflash.testing import make_qkv

CACHES = ["contiguous", "pages of 16", "pages of 256", "int8", "float8_e4m3fn"]
CACHES += ["window", "sinks and window"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    sweep = sweeps.load("decode")
    sweep["cpu"]["copied"] = 2**16
    sweep["quick"] |= {"rounds": 2, "sizes": [[1, 512], [3, 256]]}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)


def test_every_cache(tmp_path, capsys):
    command("decode --quick --device cpu --out", tmp_path)
    rows = read_csv(tmp_path / "decode.csv")
    found = [(row["batch"], row["keys"], row["cache"]) for row in rows]
    sizes = ("1", "512"), ("3", "256")
    assert found == [(*size, name) for size in sizes for name in (*CACHES, "")]
    assert {"commit", "device", "driver", "numba_cuda", "cupy"} <= set(rows[0])
    for row in rows:
        assert float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        rate = float(row["bytes"]) / float(row["median_ms"]) / 1e6
        assert float(row["gb_per_s"]) == pytest.approx(rate)
        assert (row["library"] == "copy") == (row["error"] == "")
    plain = {row["cache"]: float(row["bytes"]) for row in rows[:7]}
    assert plain["contiguous"] == plain["pages of 16"] == 2 * 512 * 8 * 128 * 4
    assert plain["int8"] == plain["float8_e4m3fn"] == 2 * 512 * 8 * (128 + 4)
    assert plain["sinks and window"] == plain["window"] == plain["contiguous"] / 8
    assert "sinks and window" in capsys.readouterr().out


def test_an_implementation_beside_what_auto_chooses(tmp_path, capsys):
    command("decode --quick --device cpu --impl cpu --impl sm80 --out", tmp_path)
    rows = read_csv(tmp_path / "decode.csv")
    assert {row["library"] for row in rows} == {"nbflash", "nbflash cpu", "copy"}
    assert [row["cache"] for row in rows if row["library"] == "nbflash cpu"] == CACHES * 2
    assert "nbflash sm80 is left out: decode: impl='sm80' cannot run" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(monkeypatch):
    q, *_ = make_qkv(2, 1, 1, 4, 2, 16, np.float32)
    _, k, v, _ = make_qkv(1, 1, 256, 4, 2, 16, np.float32)
    problem = decode.Problem(q, k[0], v[0])
    right = nbflash.decode

    def wrong(*args, block_table=None, **options):
        out = right(*args, block_table=block_table, **options)
        return out if block_table is None else out * np.float32(1.01)

    monkeypatch.setattr(nbflash, "decode", wrong)
    with pytest.raises(OutOfBudget, match="pages of 16: no timing is reported"):
        decode.measure(set_up("decode", "quick", "cpu"), problem)
