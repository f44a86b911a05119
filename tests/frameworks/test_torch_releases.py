"""What graphs of older releases of torch do not know, where they would be traced."""

import ast
from pathlib import Path

import masks
from nbflash import scores
from nbflash.torch.constants import addressed, found

PACKAGE = Path(__file__).parents[2] / "nbflash"
# The calls of nbflash.torch up to their operators, and what checks their arguments.
TRACED = "torch", "huggingface", "inputs", "kv_cache.py"


def sources():
    paths = (PACKAGE / name for name in TRACED)
    return [p for path in paths for p in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def with_union(call):
    """Whether ``isinstance`` is given ``A | B``."""
    named = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance"
    return named and any(isinstance(x, ast.BinOp) for x in call.args[1:])


def test_types_of_isinstance_are_tuples():
    """2.9 knows no unions of types."""
    found_unions = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if with_union(node)
    ]
    assert not found_unions


def plain():
    return None, True, 3, 0.5, "auto", (1, (False, "x")), [2], masks.Mask, plain, len


def test_objects_go_by_their_address():
    """2.11 takes no others as constants."""
    for x in plain():
        assert addressed(x) is x
        assert found(x) is x
    for x in (masks.causal(5), scores.softcap(3.0)):
        kind, number = addressed(x)
        assert (type(kind), type(number)) == (str, int)
        assert found((kind, number)) is x


def test_unions_are_seen():
    given = ("isinstance(x, int | float)", True), ("isinstance(x, (int, float))", False)
    for text, has in (*given, ("f(x, int | float)", False)):
        assert with_union(ast.parse(text).body[0].value) == has
