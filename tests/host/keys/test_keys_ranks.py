"""What ranks compare before they send anything: every argument, or the reason why it may differ."""

import ast
import inspect

import numpy as np
import pytest
from cuda_arrays import DeviceArray
from keyed import REFUSED
from keyed_places import places

import masks
from nbflash import distributed, scores
from nbflash.distributed import Sharding
from nbflash.distributed.decoding import _OPTIONS
from nbflash.inputs.score_arrays import key_of

MASK, N = masks.causal(64), 32
OWN = "each rank has its own"
CHOICE = "of the rank alone: nothing that travels depends on it"
COMPARED = "a Sharding is for as many ranks, and each has another number"


class Agreed(Exception):
    """A rank's note, in place of what comes behind it."""


class Comm:
    """The first of two ranks, up to where they compare."""

    rank, size = 0, 2

    def agree(self, note):
        raise Agreed(note)


def x(heads=4, batch=2, head_dim=8, dtype=np.float32):
    return np.ones((batch, N, heads, head_dim), dtype)


def sharding(mask=MASK, tile=32):
    return Sharding.of(mask, 2, tile)


BIAS = scores.bias(np.ones((1, 1, 64, 64)))
ATTENTION = {"q": x(), "k": x(), "v": x(), "sharding": sharding(), "comm": Comm(), "scale": 0.5}
ATTENTION |= {"score": BIAS, "dropout": 0.5, "seed": 1, "stages": 1, "split": "ranks"}
BACKWARD = {"dout": x(), "out": x(), "lse": np.ones((2, 4, N), np.float32), "dlse": None}
DIFFER = {
    "sharding": [sharding(masks.window(64, left=40, right=0)), sharding(masks.dense(64))],
    "scale": [0.25, np.float32(0.25)],
    "score": [None, scores.bias(np.ones((1, 4, 64, 64))), scores.softcap(2.0)],
    "dropout": [0.25],
    "seed": [2, (1, 1)],
    "stages": [None],
}
SAME = {"comm": COMPARED, "k": "`q, k and v`", "v": "`q, k and v`", "impl": CHOICE}
RESULTS = dict.fromkeys(("dout", "out", "lse", "dlse"), OWN)


def cache():
    """Of 8 bits: q has any dtype beside it."""
    return np.ones((2, 8, 4, 8), np.int8)


def token(batch=2, nq=1, heads=4, dtype=np.float32):
    return np.ones((batch, nq, heads, 8), dtype)


SCALES = np.ones(4, np.float32)
DECODE = {"q": token(), "k_cache": cache(), "v_cache": cache(), "lengths": [8, 8], "comm": Comm()}
DECODE |= {"newest": 0, "scale": 0.5, "k_scale": SCALES, "v_scale": SCALES}
GATHER = {"x": x(heads=N), "sharding": sharding(), "comm": Comm(), "axis": 1, "of": "queries"}
# By function: arguments of a call, others of each, and arguments that may differ with the reason.
AGREED = {
    "attention": (
        ATTENTION,
        {**DIFFER, "q": [x(heads=8)]},
        {**SAME, "return_lse": CHOICE, "split": "heads are not split with a score"},
    ),
    "attention_backward": (
        {**ATTENTION, **BACKWARD, "reduce": "wide", "score": None, "dropout": 0.0, "seed": None},
        {**DIFFER, "seed": [], "reduce": ["input"], "split": ["heads"]}
        | {"score": [scores.softcap(2.0)], "dropout": []},
        {**SAME, **RESULTS, "deterministic": CHOICE, "q": "`attention`"},
    ),
    "score_backward": (
        {name: value for name, value in (ATTENTION | BACKWARD).items() if name != "split"},
        {**DIFFER, "score": [scores.bias(np.full((1, 1, 64, 64), 2.0))]},
        {**SAME, **RESULTS, "q": "`attention`"},
    ),
    "decode": (
        DECODE,
        {
            "q": [token(nq=2), token(batch=2, heads=8), token(dtype=np.float16)],
            "newest": [1, None, np.int64(1)],
            "scale": [0.25, None, np.float32(0.25)],
        },
        {
            **dict.fromkeys(("k_cache", "v_cache", "lengths", "mask"), OWN),
            **dict.fromkeys(("block_table", "k_scale", "v_scale"), OWN),
            **{"comm": COMPARED, "return_lse": CHOICE, "impl": CHOICE, "options": "by name"},
        },
    ),
    "gather": (
        GATHER,
        {
            "x": [x(heads=N, batch=4), x(heads=N, head_dim=4), x(heads=N, dtype=np.int32)],
            "sharding": [sharding(tile=16)],
            "axis": [-2, np.int64(2)],
            "of": ["keys"],
        },
        {"comm": COMPARED},
    ),
}


def note_of(name, **given):
    with pytest.raises(Agreed) as found:
        getattr(distributed, name)(**given)
    return str(found.value)


def test_every_function_whose_ranks_agree_is_declared():
    def agrees(node):
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
        return isinstance(node, ast.FunctionDef) and any(
            ast.unparse(call.func) == "check_together" for call in calls
        )

    assert {name.rpartition(".")[2] for name in places(agrees)} == set(AGREED)


@pytest.mark.parametrize("name", AGREED)
def test_a_changed_argument_changes_what_ranks_compare(name):
    base, changes, may_differ = AGREED[name]
    own = note_of(name, **base)
    assert note_of(name, **base) == own
    parameters = {*inspect.signature(getattr(distributed, name)).parameters}
    if "options" in parameters:
        parameters |= {*_OPTIONS}
    assert {*changes, *may_differ} == parameters
    for argument, values in changes.items():
        for value in values:
            try:
                note = note_of(name, **base | {argument: value})
            except REFUSED:
                pytest.fail(f"{argument}={value!r} is refused")
            assert '"error"' not in note, (argument, note)
            assert note != own, (argument, value)


def test_calls_of_other_functions_differ():
    notes = [note_of(name, **base) for name, (base, _, _) in AGREED.items()]
    assert len(set(notes)) == len(AGREED)


def test_what_ranks_compare_of_a_score(cupy):
    """Shapes and dtypes too: the bytes of zeros, and what is not read, are the same in all."""

    def summary(array):
        return scores.bias(array).summary

    given = [np.zeros(shape) for shape in ((1, 2, 3, 4), (1, 3, 2, 4), (2, 1, 3, 4))]
    given += [np.zeros((1, 2, 3, 4), np.int64), np.zeros((1, 2, 3, 4)) + 1.0]
    places = [
        DeviceArray(shape, np.float32, address=2**40) for shape in ((1, 2, 3, 4), (1, 3, 2, 4))
    ]
    found = [summary(array) for array in (*given, *places)]
    assert len(set(found)) == len(found)
    elsewhere = DeviceArray((1, 2, 3, 4), np.float32, address=2**41)
    assert key_of(elsewhere) != key_of(places[0])
    assert summary(elsewhere) == summary(places[0])
