"""What users call is annotated: mypy checks their calls (``make lint``: tests/typing/user.py)."""

import inspect
from pathlib import Path

import pytest

import masks
import nbflash
from nbflash import scores, selection

PACKAGES = masks, nbflash, selection
SCORES = [getattr(scores, name) for name in ("softcap", "alibi", "relative", "bias", "custom")]
OPERATORS = "__call__", "__or__", "__and__", "__invert__"


def functions(thing):
    """The public functions of a class, a function itself."""
    if not inspect.isclass(thing):
        return [thing]
    members = vars(thing).items()
    found = [x for name, x in members if not name.startswith("_") or name in OPERATORS]
    found = [getattr(x, "fget", getattr(x, "func", getattr(x, "__func__", x))) for x in found]
    return [x for x in found if inspect.isfunction(x)]


PUBLIC = {
    f"{f.__module__}.{f.__qualname__}": f
    for thing in [*SCORES, *(getattr(p, name) for p in PACKAGES for name in p.__all__)]
    if callable(thing) and thing is not nbflash.AttentionPlan
    for f in functions(thing)
}
assert len(PUBLIC) > 80


@pytest.mark.parametrize("name", PUBLIC)
def test_public_function_is_annotated(name):
    signature = inspect.signature(PUBLIC[name])
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    assert [p.name for p in parameters if p.annotation is p.empty] == []
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("package", [masks, nbflash], ids=["masks", "nbflash"])
def test_package_says_that_it_is_typed(package):
    assert Path(package.__file__).with_name("py.typed").is_file()
