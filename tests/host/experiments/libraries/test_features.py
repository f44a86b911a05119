"""Score functions, dropout and sinks: what the oracle expects, and what the adapter computes."""

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from experiments.harness.backends import open_backend
from experiments.harness.errors import OutOfBudget
from experiments.harness.grid import BLOCKS, Case
from experiments.harness.inputs import random_inputs
from experiments.harness.oracle import Oracle, Relative, sample_rows, sampled
from experiments.libraries.features import FEATURES, PLAIN, STATE, Featured
from nbflash import reference

BF16 = np.dtype(ml_dtypes.bfloat16)


SHAPE = (2, 128, 4, 16)


MASK = masks.butterfly(128, 16)


PLANES = [(0, 3), (1, 1)]


def oracle_of(name, dtype):
    arrays, rows = random_inputs(np, SHAPE, dtype, seed=0), sample_rows(128, 32)
    feature = FEATURES[name](*SHAPE[1:3])
    oracle = Oracle(open_backend("cpu"), arrays, MASK, rows, PLANES, feature, Relative)
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
    assert max(verdict.error for verdict in oracle.check(**right)) < 1e-6
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


def test_a_backward_pass_tells_how_many_it_takes(monkeypatch):
    q = np.zeros((1, 128, 1, 8), BF16)
    case = Case("dense", "dense", masks.dense(128), 1.0, 128, q.shape)
    ours = Featured(q, q, q, xp=np, name=PLAIN, impl="reference")
    for two, config in {None: "", False: "one pass", True: "two passes"}.items():
        monkeypatch.setattr(ours.plan(case)._executor, "two_passes", two)
        assert ours.details(case, "backward") == {"impl": "reference", "config": config}
