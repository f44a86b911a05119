"""Functions with `functools.cache` or `lru_cache`: every argument counts."""

import importlib
import inspect
import json
import lzma

import pytest
from logged_device import Logged

import masks
from nbflash import scores
from nbflash.cuda import bundled, device, pause
from nbflash.distributed.sharding import Sharding
from nbflash.inputs.positions import Positions

SHARDING = Sharding.of(masks.causal(64), 4, 8)
LONG = Sharding.of(masks.causal(8192), 4)
POSITIONS = Positions([0, 1], [1, 2])


def one(s, b, h, q, kv):
    return s


def two(s, b, h, q, kv):
    return 2 * s


def _stages(found):
    found = found if isinstance(found, list) else [found]
    return [(x.mask, x.positions, *x.receives._places, *x.sends._places) for x in found]


WINDOW = masks.window(64, left=9, right=0)
_OTHERS = [
    Sharding.of(masks.causal(64), 4, 16),
    Sharding.of(masks.window(64, left=9, right=0), 4, 8),
]
_FORM = {"name": None, "fn": one, "grad": two, "kinds": ("a",), "dtype": None}


def _form(x):
    return repr(vars(x))


def _some(x):
    return x[0x3C00], x[0x7BFF], x[0xFBFF]


# Of every function arguments, others of each, and what of an answer is compared.
CACHED = {
    "nbflash.backends.cpu.score_gradient._adding": ({"count": 1}, {"count": [0, 2]}, id),
    "nbflash.cuda.availability.installed": ({"module": "numpy"}, {"module": ["no_such"]}),
    "nbflash.cuda.tile.cells.float32_of": (
        {"dtype": "float16"},
        {"dtype": ["bfloat16"]},
        _some,
    ),
    "nbflash.cuda.tile.cells.bytes_by": ({"selector": 0x3210}, {"selector": [0x3211, 0x7210]}),
    "nbflash.cuda.tile.dequantise._widened_bits": ({"pair": 0x3A40}, {"pair": [0x3A41, 0x3B40]}),
    "nbflash.cuda.tile.smem_layout._layout_of": (
        {"names": ("a", "b")},
        {"names": [("b", "a"), ("a",)]},
        lambda x: x._fields,
    ),
    "nbflash.cuda.tile.wgmma.softmax.row_of": ({"element": 1}, {"element": [2, 3]}),
    "nbflash.cuda.tile.wgmma.softmax._chain_of": (
        {"size": 16, "chains": 8},
        {"size": [32], "chains": [4]},
    ),
    "nbflash.cuda.tile.score._form": (_FORM, {"fn": [two], "grad": [one, None]}, _form),
    "nbflash.distributed.placed_score._at_places": (
        {"fn": one, "count": 2},
        {"fn": [two], "count": [3]},
        lambda x: (x.__qualname__, x.__code__.co_varnames),
    ),
    "nbflash.distributed.placed_score.placed": (
        {"score": scores.alibi(0.5), "positions": POSITIONS, "shape": (8, 8)},
        {
            "score": [scores.alibi(0.25)],
            "positions": [Positions([0, 2], [1, 2])],
            "shape": [(8, 9), (9, 8)],
        },
    ),
    "nbflash.distributed.stages.part_count": (
        {
            "sharding": Sharding.of(masks.causal(8192), 4),
            "heads_kv": 4,
            "group": 2,
            "split": "ranks",
        },
        {"heads_kv": [3], "group": [9000], "split": ["heads"], "sharding": _OTHERS},
    ),
    "nbflash.distributed.stages.stages_of": (
        {"sharding": SHARDING, "rank": 1, "count": 2},
        {"sharding": _OTHERS, "rank": [2], "count": [1, 3]},
        _stages,
    ),
    "nbflash.distributed.stages.all_keys": (
        {"sharding": SHARDING, "rank": 1},
        {"sharding": _OTHERS, "rank": [2]},
        _stages,
    ),
    "nbflash.selection.blocks._causal": ({"nq": 5, "nk": 6}, {"nq": [6], "nk": [5]}),
    "nbflash.selection.blocks._last_column": (
        {"shape": (20, 30), "block": (4, 5), "causal": True},
        {"shape": [(21, 30), (20, 31)], "block": [(5, 5), (4, 6)], "causal": [False]},
    ),
}
BY_NAME = {"nbflash.distributed.stages.part_count"}  # a count: others may have the same
# `kinds` and `dtype` count for two forms alone, and `name` chooses among them.
LEFT_OUT = {"nbflash.cuda.tile.score._form": {"name", "kinds", "dtype"}}


@pytest.mark.parametrize("name", CACHED)
def test_every_argument_of_a_cached_function_counts(name):
    module, _, short = name.rpartition(".")
    function = getattr(importlib.import_module(module), short)
    base, changes, *shown = CACHED[name]
    shown = shown[0] if shown else lambda x: x
    names = set(inspect.signature(function).parameters)
    assert names == set(changes) | LEFT_OUT.get(name, set()), f"{name}: add others of {names}"
    function.cache_clear()
    own = shown(function(**base))
    assert shown(function(**base)) == own
    answers = {key: [shown(function(**base | {key: x})) for x in changes[key]] for key in changes}
    for key, values in changes.items():
        if name not in BY_NAME:
            assert all(x != own for x in answers[key]), (name, key)
        for value, answer in zip(values, answers[key], strict=True):
            if shown is not id and "_at_places" not in name:
                assert shown(function.__wrapped__(**base | {key: value})) == answer, (name, key)


def test_forms_of_scores():
    from nbflash.cuda.kinds import array, float32
    from nbflash.cuda.tile.score import _form as form

    slopes = array(float32, 1)
    given = [("softcap", one, two, (), None), ("softcap", one, two, (), "float16")]
    given += [("alibi", one, two, (float32,), None), ("alibi", one, two, (slopes,), None)]
    given.append((None, one, two, (), None))
    made = [form(*x) for x in given]
    assert len({id(x) for x in made}) == len(given)
    fresh = [form.__wrapped__(*x) for x in given]
    for a, b in zip(made, fresh, strict=True):
        assert (type(a), repr(vars(a))) == (type(b), repr(vars(b)))
    assert repr(vars(made[0])) != repr(vars(made[1]))
    assert repr(vars(made[2])) != repr(vars(made[3]))


def test_devices(monkeypatch):
    monkeypatch.setattr(device, "Gpu", lambda n: ("cupy", n))
    monkeypatch.setattr(device, "TorchGpu", lambda n: ("torch", n))
    device.cuda_device.cache_clear()
    asked = [(n, of) for n in (0, 1) for of in (False, True)]
    assert [device.cuda_device(*x) for x in asked] == [
        ("torch" if of else "cupy", n) for n, of in asked
    ]
    device.cuda_device.cache_clear()


def test_pauses(cupy, monkeypatch):
    made = {n: Logged() for n in (0, 1)}
    monkeypatch.setattr(pause, "cuda_device", made.get)
    for n, steps in ((0, 3), (1, 3), (0, 4), (0, 3)):
        pause.pause_of(n, steps)()
    assert [[x["steps"] for x in made[n].launches] for n in made] == [[3, 4, 3], [3]]
    pause.pause_of.cache_clear()


def test_packs_of_cubins(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    for name in "ab":
        (tmp_path / name).write_bytes(lzma.compress(name.encode()))
    (tmp_path / bundled.INDEX).write_text(json.dumps({"kernels": {}, "sources": {}}))
    bundled._unpacked.cache_clear()
    assert [bundled._unpacked(x) for x in "aba"] == [b"a", b"b", b"a"]
    bundled._unpacked.cache_clear()
