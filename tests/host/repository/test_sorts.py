"""Sorts keep the order of equals, which NumPy's default does not promise, and ranks rely on."""

import ast

import pytest
from planting import ROOT

#: Sorted by numbers of which no two are equal.
DISTINCT = {
    ("nbflash.distributed.dealing", "first"),
    ("nbflash.distributed.parcels", "order"),
    ("nbflash.selection.pooled", "order"),
}


def sorts():
    """(module, what is sorted, its keywords) of every argsort."""
    for package in ("masks", "nbflash"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("argsort"):
                    how = {x.arg: ast.unparse(x.value) for x in node.keywords}
                    of = node.args[0] if node.args else node.func.value
                    yield module, ast.unparse(of), how


@pytest.mark.parametrize(("module", "of", "how"), list(sorts()))
def test_equals_keep_their_order(module, of, how):
    assert ((module, of) in DISTINCT) != (how.get("kind") == "'stable'")


def test_what_is_distinct_is_sorted_once():
    """The names above are of one place each."""
    found = [(module, of) for module, of, how in sorts() if "kind" not in how]
    assert sorted(found) == sorted(DISTINCT)
