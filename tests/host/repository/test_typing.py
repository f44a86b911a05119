"""What users call is annotated: mypy checks their calls (``make lint``: tests/typing/user.py)."""

from pathlib import Path

import pytest
from annotations import functions, missing, public

import masks
import nbflash
import nbflash.distributed
from nbflash import scores, selection

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


@pytest.mark.parametrize("package", [masks, nbflash], ids=["masks", "nbflash"])
def test_package_says_that_it_is_typed(package):
    assert Path(package.__file__).with_name("py.typed").is_file()
