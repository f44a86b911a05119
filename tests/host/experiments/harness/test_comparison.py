"""Several libraries on the same inputs, with stand-ins."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from command_runs import FakeClock

import masks
from experiments.commands.peers import COLUMNS
from experiments.harness.backends import open_backend
from experiments.harness.comparison import Comparison, spread_planes
from experiments.harness.grid import BLOCKS, Case
from experiments.harness.inputs import random_inputs
from experiments.harness.passes import BACKWARD, BOTH, FORWARD, flops
from experiments.harness.setup import Setup
from experiments.libraries.nbflash import Nbflash

BF16 = np.dtype(ml_dtypes.bfloat16)


SHAPE = (2, 128, 2, 16)


SETTINGS = {"check_rows": 32, "check_heads": 3, "rounds": 3, "seconds": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def arrays():
    return random_inputs(np, SHAPE, BF16, seed=0)


def case_of(mask):
    return Case("a mask", BLOCKS, mask, 0.5, 32, SHAPE)


class Wrong(Nbflash):
    """The output of another mask."""

    def label(self, case):
        return "wrong"

    def forward(self, case):
        return super().forward(case_of(masks.local(128, 32, 0)))


class NoBackward(Nbflash):
    def backward(self, case, dout):
        raise NotImplementedError("no backward pass of [this] yet")


def comparison_of(arrays, **factories):
    setup = Setup({}, SETTINGS, {}, open_backend("cpu"), FakeClock(), {})
    return Comparison(setup, arrays, factories)


def test_right_results_are_timed_and_wrong_ones_named(arrays, capsys):
    def absent(*qkv):
        raise RuntimeError("no kernel\nfor this [/device]")

    ours = partial(Nbflash, impl="cpu")
    comparison = comparison_of(
        arrays, nbflash=ours, wrong=partial(Wrong, impl="cpu"), absent=absent
    )
    rows = comparison.measure(case_of(masks.butterfly(128, 32)), (FORWARD, BACKWARD, BOTH))
    assert [(row["library"], row["pass"]) for row in rows] == [
        ("nbflash cpu", FORWARD),
        ("nbflash cpu", BACKWARD),
        ("wrong", BACKWARD),
        ("nbflash cpu", BOTH),
        ("wrong", BOTH),
    ]
    for row in rows:
        assert set(row) == set(COLUMNS) - {"device", "driver", "commit", "date"}
        assert row["median_ms"] == 1
        assert row["tflops"] == flops(SHAPE, 0.5, row["pass"]) / 1e9
        assert 0 < row["error"] < 0.02
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == "absent is left out (d=16, N=128): no kernel for this [/device]"
    assert lines[1].startswith("wrong is left out (forward, a mask, d=16, N=128): out: error ")
    assert comparison.wrong == []


def test_a_pass_that_nbflash_lacks_is_not_measured(arrays, capsys):
    other = partial(Nbflash, impl="cpu")
    comparison = comparison_of(arrays, nbflash=partial(NoBackward, impl="cpu"), other=other)
    rows = comparison.measure(case_of(masks.dense(128)), (FORWARD, BACKWARD))
    assert [row["pass"] for row in rows] == [FORWARD, FORWARD]
    assert "nbflash is left out (backward, a mask" in capsys.readouterr().out


def test_a_wrong_nbflash_is_remembered(arrays):
    comparison = comparison_of(arrays, nbflash=partial(Wrong, impl="cpu"))
    assert comparison.measure(case_of(masks.butterfly(128, 32)), (FORWARD,)) == []
    assert comparison.wrong == ["forward, a mask, d=16, N=128"]


def test_checked_planes_are_whole_groups_of_heads():
    assert spread_planes(2, 4, None, 3) == [(0, 0), (0, 3), (1, 3)]
    assert spread_planes(2, 4, 2, 4) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert spread_planes(1, 4, 1, 2) == [(0, 0), (0, 1), (0, 2), (0, 3)]
