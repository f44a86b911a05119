"""What users call is annotated: mypy checks their calls (``make lint``: tests/typing/user.py)."""

import inspect
import types
import typing
from pathlib import Path

import numpy as np
import pytest
from annotations import functions, missing, public
from scipy.sparse import csr_array

import masks
import nbflash
import nbflash.distributed
from nbflash import scores, selection
from nbflash.schedule.tile_schedule import TileSchedule

SCORES = [getattr(scores, name) for name in ("softcap", "alibi", "relative", "bias", "custom")]


def test_public_functions_are_annotated():
    found = public(masks, nbflash, selection, nbflash.distributed)
    found |= {f.__qualname__: f for f in [*SCORES, scores.compose]}
    assert len(found) > 110
    assert {name: gaps for name, f in found.items() if (gaps := missing(f))} == {}


def test_what_is_not_annotated_is_found():
    class Example:
        def whole(self, x: int) -> int: ...

        def partly(self, x: int, y): ...

        @property
        def size(self): ...

        def _hidden(self, x): ...

    assert {f.__name__: missing(f) for f in functions(Example)} == {
        "whole": [],
        "partly": ["y", "return"],
        "size": ["return"],
    }


PLAIN = masks.butterfly(64, 8) & masks.causal(64)
SHARDING = nbflash.distributed.Sharding.of(PLAIN, 2, 8)
OBJECTS = {
    "mask": PLAIN,
    "intervals": masks.causal(64),
    "function": masks.from_function(lambda q, kv: kv <= q, 64),
    "planes": masks.per_head([PLAIN, masks.causal(64)]),
    "tiles": PLAIN.tiles(16),
    "stats": PLAIN.stats(16),
    "schedule": TileSchedule.from_mask(PLAIN, 16, 16),
    "sharding": SHARDING,
    "block map": nbflash.BlockMap(np.zeros((1, 1, 8, 1), int), shape=64, block=8),
    "score": scores.softcap(2.0),
}
NAMES = {"MaskStats": type(OBJECTS["stats"]), "csr_array": csr_array}  # of annotations alone


def asked(thing):
    """By name what properties and methods without arguments return, and their annotation."""
    for name, member in inspect.getmembers(type(thing)):
        of = member.fget if isinstance(member, property) else getattr(member, "func", member)
        if name.startswith("_") or not inspect.isfunction(of):
            continue
        needed = [x for x in inspect.signature(of).parameters.values() if x.default is x.empty]
        if len(needed) == 1 and "return" in of.__annotations__:
            value = getattr(thing, name)
            value = value() if inspect.isfunction(member) else value
            yield name, value, typing.get_type_hints(of, localns=NAMES)["return"]


def is_of(value, annotation):
    """Exactly: a number of NumPy is none of Python."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(is_of(value, part) for part in parts)
    if origin is dict:
        return type(value) is dict and all(
            is_of(x, of) for pair in value.items() for x, of in zip(pair, parts, strict=True)
        )
    if origin is tuple:
        parts = (parts[0],) * len(value) if parts[-1:] == (...,) else parts
        return len(value) == len(parts) and all(map(is_of, value, parts))
    if annotation in (int, float, bool, str):
        return type(value) is annotation
    return annotation is typing.Any or isinstance(value, origin or annotation or type(None))


@pytest.mark.parametrize("name", OBJECTS)
def test_results_are_what_their_annotations_say(name):
    found = list(asked(OBJECTS[name]))
    wrong = {of: (value, said) for of, value, said in found if not is_of(value, said)}
    assert not wrong
    assert found


def test_what_is_of_no_type_is_found():
    assert not is_of(np.int64(3), int)
    assert not is_of({"a": np.int64(3)}, dict[str, int])
    assert not is_of((1, 2.0), tuple[int, int])
    assert not is_of((1, 2, 3), tuple[int, int])
    assert is_of((1, 2, 3), tuple[int, ...])
    assert is_of(None, int | None)
    assert not is_of(1.0, int | None)


@pytest.mark.parametrize("package", [masks, nbflash], ids=["masks", "nbflash"])
def test_package_says_that_it_is_typed(package):
    assert Path(package.__file__).with_name("py.typed").is_file()
