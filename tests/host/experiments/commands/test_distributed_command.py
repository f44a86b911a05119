"""Scaling over ranks, end to end at tiny sizes; ranks are threads."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from command_runs import PROVENANCE, read_csv, run

import masks
import nbflash
from experiments.commands.cluster import cluster_of
from experiments.commands.distributed import Measured, predicted
from experiments.commands.distributed_peers import why_not
from experiments.harness import sweeps
from nbflash import distributed


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    sweep = sweeps.load("distributed")
    sweep["cpu"] |= {"head_dim": 8, "heads": 2, "heads_kv": 1, "tile": 32}
    sweep["cpu"]["quick"] = {"rounds": 1, "weak": [96], "strong": [128]}
    found = {"distributed": sweep, "cluster": sweeps.load("cluster")}
    monkeypatch.setattr("experiments.commands.distributed.load", found.get)
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
    assert (tmp_path / "distributed.png").stat().st_size > 10_000
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
        assert row["predicted_of_ideal"] == ""  # the model is of GPUs
    n, seconds = 128, float(rows[-4]["median_ms"]) / 1e3
    work = 4 * n * (n + 1) / 2 * 8 * 2 / 2  # of one of two ranks, causal, 2 heads of 8
    assert float(rows[-4]["tflops"]) == pytest.approx(work / seconds / 1e12)


def test_heads_are_split_where_one_asks_for_it(tmp_path, capsys):
    status, _, err = run(
        capsys, *COMMAND, "--mask", "causal", "--split", "heads", "--out", tmp_path
    )
    assert status == 0, err
    rows = read_csv(tmp_path / "distributed.csv")
    assert {row["split"] for row in rows} == {"heads"}
    assert all(float(row["error"]) <= float(row["budget"]) for row in rows)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_prediction_is_at_the_rate_of_one_rank(which):
    """At once sent and merged: what is left is the balance. A second for a launch: 9 of 10."""
    sweep = sweeps.load("cluster")
    free = dict.fromkeys(("hbm", "nvlink", "infiniband"), 1e30)
    free |= dict.fromkeys(("launch", "latency", "message"), 0.0)
    cluster = replace(cluster_of(sweep, "documents"), **free)
    sharding = distributed.Sharding.of(masks.documents([3000, 1000, 5000], causal=True), 4, 128)
    settings = {"split": "ranks", "heads_kv": 2, "dtype": np.dtype(np.float16)}
    given = sharding, (1, 9000, 8, 64), settings, which, 36_000.0
    assert predicted(*given, cluster) == pytest.approx(1 / sharding.balance)
    slower = predicted(*given, replace(cluster, launch=1.0))
    assert 9 / (9 * sharding.balance + 1) == pytest.approx(slower, rel=0.02)


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


def test_only_the_lengths_that_are_asked_for(tmp_path, capsys):
    chosen = "--mask", "window", "--out", tmp_path, "--tokens"
    assert run(capsys, *COMMAND, *chosen, 128)[0] == 0
    assert {row["tokens"] for row in read_csv(tmp_path / "distributed.csv")} == {"128"}
    status, _, err = run(capsys, *COMMAND, *chosen, 100)
    assert status == 2
    assert "--tokens 100: expected 192 or 128" in err


class Peer:
    """Stands in for torch: right by one backend, off by a hundredth by the other on one rank."""

    def __init__(self, mesh, kind, whole, only):
        q, k, v, self._dout = whole
        self._only, self._rank, self._mask = only, mesh, getattr(masks, kind)(q.shape[1])
        self._given = q, k, v

    def dealt(self):
        return nullcontext()

    def results(self, backend):
        out, found = self._forward(), self._backward(self._only)
        off = 1.01 if backend == "CUDNN_ATTENTION" and self._rank == 1 else 1.0
        return {"out": off * out[0]} | dict(zip(("dq", "dk", "dv"), found, strict=True))

    def calls(self, backend):
        backward = lambda: self._backward(self._dout)
        return {"forward": (self._forward,) * 2, "backward": (backward,) * 2}

    def _forward(self):
        return nbflash.attention(*self._given, self._mask, return_lse=True)

    def _backward(self, dout):
        given = dout, *self._given, *self._forward(), self._mask
        return nbflash.attention_backward(*given)


def test_peers_that_are_right_on_all_ranks(tmp_path, capsys, monkeypatch):
    places = "experiments.commands.distributed_peers"
    monkeypatch.setattr(f"{places}.ContextParallel", Peer)
    monkeypatch.setattr(f"{places}.mesh_of", lambda comm, device: nullcontext(comm.rank))
    monkeypatch.setattr("experiments.commands.distributed.why_not_torch", lambda device: "")
    chosen = "--mask", "causal", "--mask", "window", "--peers", "--tokens", 192
    status, out, err = run(capsys, *COMMAND, *chosen, "--out", tmp_path)
    assert status == 0, err
    assert out.count("torch-context-parallel-cudnn is left out (causal, 192): out: error ") == 1
    assert "torch-context-parallel is left out (window, 192): dense and causal alone" in out
    rows = read_csv(tmp_path / "distributed.csv")
    assert [(row["mask"], row["pass"], row["library"], row["split"]) for row in rows] == [
        ("causal", "forward", "nbflash", "ranks"),
        ("causal", "forward", "torch-context-parallel-flash", ""),
        ("causal", "backward", "nbflash", "ranks"),
        ("causal", "backward", "torch-context-parallel-flash", ""),
        ("window", "forward", "nbflash", "ranks"),
        ("window", "backward", "nbflash", "ranks"),
    ]
    for row in rows:
        assert float(row["error"]) <= float(row["budget"])


def test_peers_need_torch(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = run(capsys, *COMMAND, "--peers", "--out", tmp_path)
    assert (status, "--peers: " in err) == (2, True)


def test_what_context_parallel_is_left_out_of():
    assert why_not("causal", 96, 4) == ""
    assert why_not("dense", 96, 4) == ""
    assert why_not("documents", 96, 4) == "dense and causal alone"
    assert why_not("causal", 100, 4) == "multiples of 8 tokens alone"


def test_calls_are_timed_in_turns_by_the_slowest_rank():
    """The other rank of this one takes 5 ms for every call."""
    made, took = [], iter([100.0, 100.0, 4.0, 6.0, 7.0, 3.0])

    def measure(call):
        call()
        return next(took), None

    comm = SimpleNamespace(agree=lambda note: [note, note and "5.0"])
    measured = Measured.__new__(Measured)
    measured.comm, measured.clock = comm, SimpleNamespace(measure=measure)
    measured.settings = {"rounds": 2, "seconds": 1.0}
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    found = measured.time(calls)
    assert made == list("ababab")
    assert {name: timing.samples for name, timing in found.items()} == {
        "a": (5.0, 7.0),
        "b": (6.0, 5.0),
    }
    took = iter([1.0, 1200.0])
    assert measured.time({"a": calls["a"]})["a"].samples == (1200.0,)
