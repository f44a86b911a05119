"""Frozen dataclasses are equal by all of their fields, and so are kernels that are made of them."""

import ast
import dataclasses
import importlib

import numpy as np
import pytest
from keyed import assert_apart, assert_same
from keyed_places import decorators, is_frozen, places

from nbflash.cuda import kernel_key

FROZEN = places(is_frozen)
# Of libraries that this tier does without: their source is looked at.
ELSEWHERE = [name for name in FROZEN if name.startswith(("nbflash.torch", "nbflash.huggingface"))]
# Fields that count in no comparison, with the reason.
SPEED = "a measured speed: it decides which configuration is chosen, not what that one runs"
_WITH_SPEED = "Sm80Config", "Sm80BackwardConfig", "Sm90Config", "Sm90BackwardConfig", "Sm90DqConfig"
LEFT_OUT = {(name, "speed"): SPEED for name in _WITH_SPEED}


def _class(name):
    module, _, name = name.rpartition(".")
    return getattr(importlib.import_module(module), name)


CLASSES = {name: _class(name) for name in FROZEN if name not in ELSEWHERE}
CONFIGS = {name: x for name, x in CLASSES.items() if name.endswith("Config")}


def _made(cls, **changed):
    """An object with a value of its own in every field; nothing checks them."""
    made = object.__new__(cls)
    for i, field in enumerate(dataclasses.fields(cls)):
        object.__setattr__(made, field.name, changed.get(field.name, (f"value {i}", i)))
    return made


def _changes(cls):
    """Objects with one field changed, first and last part alike, by the name of the field."""
    for i, field in enumerate(dataclasses.fields(cls)):
        for other in ((f"other {i}", i), (f"value {i}", i + 100)):
            yield field.name, _made(cls, **{field.name: other})


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_counts(name):
    cls = CLASSES[name]
    assert_same(_made(cls), _made(cls))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(_made(cls), dataclasses.fields(cls)[0].name, 1)
    for field, other in _changes(cls):
        if (cls.__name__, field) in LEFT_OUT:
            assert_same(_made(cls), other, field)
        else:
            assert_apart(_made(cls), other, field)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_a_configuration_is_in_the_key_of_its_kernels(name):
    """Whatever counts in comparisons does there, and the class is among the sources."""
    cls = CONFIGS[name]

    def described(config):
        parts = kernel_key._Parts()
        text = repr(parts.describe(config))
        assert (cls.__module__, cls.__name__) in parts.own
        return text

    own = described(_made(cls))
    assert described(_made(cls)) == own
    for field, other in _changes(cls):
        assert (described(other) == own) == ((cls.__name__, field) in LEFT_OUT), field


def test_no_frozen_class_says_itself_what_it_is_equal_to():
    """Those of libraries that are not here are as the others: nothing but fields."""
    assert ELSEWHERE
    for name in FROZEN:
        node = FROZEN[name]
        assert "dataclass(frozen=True)" in decorators(node), name
        defined = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
        assert not defined & {"__eq__", "__hash__", "__getattribute__"}, name
        if name in ELSEWHERE:
            assert "compare=False" not in ast.unparse(node), name


def test_what_is_left_out_is_there():
    found = {
        (cls.__name__, field.name)
        for cls in CLASSES.values()
        for field in dataclasses.fields(cls)
        if not field.compare
    }
    assert found == set(LEFT_OUT)
    assert all(isinstance(reason, str) and reason for reason in LEFT_OUT.values())


def test_dtypes_and_strings_are_no_equal_fields():
    """What a field holds counts by its own equality: a dtype is equal to its name."""
    assert np.dtype("float32") == "float32"
    held = {
        name: field.type
        for name, cls in CONFIGS.items()
        for field in dataclasses.fields(cls)
        if "np.dtype" in str(field.type)
    }
    assert not held, f"say names of dtypes, as all others do: {held}"
