"""What graphs of older releases of torch do not know, where they would be traced."""

import ast
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import masks
from nbflash import scores
from nbflash.huggingface.layer_masks import Override
from nbflash.torch import attention
from nbflash.torch.constants import addressed, object_of
from nbflash.torch.scores import softcap

PACKAGE = Path(__file__).parents[2] / "nbflash"
# The calls of nbflash.torch up to their operators, and what checks their arguments.
HOW = {"fullgraph": True, "backend": "eager"}
TRACED = "torch", "huggingface", "inputs", "kv_cache.py"


def sources():
    paths = (PACKAGE / name for name in TRACED)
    return [p for path in paths for p in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def with_union(call):
    """Whether ``isinstance`` is given ``A | B``."""
    named = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance"
    return named and any(isinstance(x, ast.BinOp) for x in ast.walk(call.args[1]))


def test_types_of_isinstance_are_tuples():
    """2.9 knows no unions of types."""
    unions = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if with_union(node)
    ]
    assert not unions


def plain():
    return None, True, 3, 0.5, "auto", (1, (False, "x")), [2], masks.Mask, plain, len


def test_objects_go_by_their_address():
    """2.11 takes no others as constants."""
    for x in plain():
        assert addressed(x) is x
        assert object_of(x) is x
    for x in (masks.causal(5), scores.softcap(3.0), Override(masks.causal(5))):
        kind, number = addressed(x)
        assert (type(kind), type(number)) == (str, int)
        assert object_of((kind, number)) is x


def test_what_would_be_taken_for_another_one_is_refused():
    """A scalar of NumPy, and an object without weak references, whose address is used again."""
    q = torch.randn(1, 5, 2, 8)
    run = torch.compile(lambda cap: attention(q, q, q, score=softcap(cap)), **HOW)
    assert torch.equal(run(2.0), attention(q, q, q, score=softcap(2.0)))
    for cap in (np.float32(2), np.float64(2), Fraction(2)):
        with pytest.raises(TorchDynamoException, match="cap must be a Python number"):
            run(cap)


def test_a_score_that_a_graph_makes_is_refused():
    q, once = torch.randn(1, 5, 2, 8), scores.softcap(3.0)
    run = torch.compile(lambda: attention(q, q, q, score=scores.compose(once, once)), **HOW)
    with pytest.raises((TorchDynamoException, AttributeError, TypeError)):
        run()
    with pytest.raises(TypeError, match="must be made outside of a graph"):
        object_of((addressed(once)[0], id(q)))


def test_unions_are_seen():
    for text in ("isinstance(x, int | float)", "isinstance(x, (a, b | c))"):
        assert with_union(ast.parse(text).body[0].value)
    for text in ("isinstance(x, (int, float))", "f(x, int | float)"):
        assert not with_union(ast.parse(text).body[0].value)
