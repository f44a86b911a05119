"""What score functions, dropout and attention sinks cost, at tiny sizes."""

import csv

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from experiments import cli
from experiments.commands.features import beside_plain
from experiments.harness.device_oracle import DeviceOracle, random_inputs, sampled
from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import sample_rows
from experiments.libraries.features import FEATURES, PLAIN, STATE, Featured
from experiments.libraries.peers import BLOCKS, Case
from nbflash import reference
from nbflash.backends.reference import ReferenceExecutor

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 128, 4, 16)
MASK = masks.butterfly(128, 16)
PLANES = [(0, 3), (1, 1)]
TINY = "features --quick --device cpu --impl reference --seqlen 128 --head-dim 8"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)


def command(*args):
    cli.main(" ".join(map(str, args)).split())


def oracle_of(name, dtype):
    arrays, rows = random_inputs(np, SHAPE, dtype, seed=0), sample_rows(128, 32)
    feature = FEATURES[name](*SHAPE[1:3])
    oracle = DeviceOracle(np, arrays, MASK, rows, PLANES, feature)
    return oracle, feature, (*arrays[:3], sampled(np, arrays[3], rows))


def results(feature, q, k, v, dout):
    """By the reference and, for a sink, by the derivative of what it does to the output."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    more = {"score": feature.score, "dropout": feature.dropout, "seed": STATE}
    out, lse = reference.attention(*wide, MASK, **more)
    dout, dlse = dout.astype(np.float64), None
    if feature.sink is not None:
        dout, dlse, _ = nbflash.merge_sink_backward(dout, out, lse, feature.sink.astype(float))
        out, _ = nbflash.merge_sink(out, lse, feature.sink.astype(float))
    grads = reference.attention_backward(dout, *wide, MASK, dlse=dlse, **more)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))


@pytest.mark.parametrize("name", FEATURES)
def test_the_oracle_agrees_with_the_reference(name):
    oracle, feature, inputs = oracle_of(name, np.dtype(np.float32))
    right = results(feature, *inputs)
    assert oracle.check(**right) < 1e-6
    for key, x in right.items():
        with pytest.raises(OutOfBudget, match=f"{key}: error"):
            oracle.check(**{key: x * 1.001})


@pytest.mark.parametrize("name", [name for name in FEATURES if name != PLAIN])
def test_plain_attention_is_not_taken_for_a_feature(name):
    """In the dtype of the GPU, whose budget is the widest."""
    oracle, _, inputs = oracle_of(name, BF16)
    for key, x in results(FEATURES[PLAIN](*SHAPE[1:3]), *inputs).items():
        if (name, key) != ("sink", "dv"):
            with pytest.raises(OutOfBudget, match=f"{key}: error"):
                oracle.check(**{key: x})


@pytest.mark.parametrize("name", ["dropout", "sink"])
def test_an_adapter_computes_its_feature_in_half_precision(name):
    oracle, _, (q, k, v, only) = oracle_of(name, BF16)
    ours = Featured(q, k, v, xp=np, name=name, impl="cpu")
    case = Case("butterfly", BLOCKS, MASK, 0.5, 16, SHAPE)
    oracle.check(out=ours.forward(case)())
    for gradients in (ours.backward, ours.both):
        oracle.check(**dict(zip(("dq", "dk", "dv"), gradients(case, only)(), strict=True)))


def test_every_feature_of_every_mask(tmp_path, capsys):
    command(TINY, "--out", tmp_path)
    with (tmp_path / "features.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
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
    with (tmp_path / "features.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["feature"] for row in rows] == [PLAIN, "bias", "sink"]
    assert {(row["pass"], row["mask"], row["dtype"]) for row in rows} == {
        ("both", "causal", "bfloat16")
    }


def test_the_tiles_are_named_and_aims_are_hoppers(tmp_path):
    options = "--quick --device cpu --seqlen 128 --head-dim 8 --mask dense --feature dropout"
    command("features", options, "--out", tmp_path)
    with (tmp_path / "features.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["impl"], row["config"]) for row in rows[::2]] == [("cpu", "128×128"), ("cpu", "")]
    row = {"pass": "forward", "mask": "dense", "impl": "sm90", "median_ms": 2.0}
    found = beside_plain([row | {"library": name} for name in (PLAIN, "softcap", "bias")])
    assert [row["aim"] for row in found] == [None, 1.15, None]
    (alone,) = beside_plain([row | {"library": "dropout"}])
    assert (alone["time_over_plain"], alone["aim"]) == (None, 1.5)


def test_a_backward_pass_tells_how_many_it_takes(monkeypatch):
    q = np.zeros((1, 128, 1, 8), BF16)
    case = Case("dense", "dense", masks.dense(128), 1.0, 128, q.shape)
    ours = Featured(q, q, q, xp=np, name=PLAIN, impl="reference")
    for two, config in {None: "", False: "one pass", True: "two passes"}.items():
        monkeypatch.setattr(ours._plan(case)._executor, "two_passes", two)
        assert ours.details(case, "backward") == {"impl": "reference", "config": config}


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
    with (tmp_path / "features.csv").open(newline="", encoding="utf-8") as file:
        assert [row["feature"] for row in csv.DictReader(file)] == [PLAIN, "sink"]


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
