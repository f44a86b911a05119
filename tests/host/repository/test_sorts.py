"""Sorts keep the order of equals, which NumPy's default does not promise, and ranks rely on."""

import ast

from planting import ROOT

#: Sorts of numbers of which no two are equal.
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


def test_equals_keep_their_order():
    """But for the places above, one of each name."""
    found = [(module, of) for module, of, how in sorts() if how.get("kind") != "'stable'"]
    assert sorted(found) == sorted(DISTINCT)
