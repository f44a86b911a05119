"""Finds in the source every place where a key decides that two things are the same."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = "nbflash", "masks"
_METHODS = {"__eq__", "__hash__", "key", "_key", "digest", "layout", "signature"}


@functools.cache
def _nodes():
    """``module.name`` to the node of all functions and classes."""
    return {f"{module}.{name}": node for module, tree in _modules() for name, node in _named(tree)}


def _modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def _named(tree, outer=""):
    """Functions and classes with their names within a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{outer}{node.name}"
            yield name, node
            yield from _named(node, f"{name}.")
        else:
            yield from _named(node, outer)


def places(what):
    """``module.name`` to the node of all functions and classes of which ``what`` is true."""
    return {name: node for name, node in _nodes().items() if what(node)}


def decorators(node):
    return [ast.unparse(x) for x in node.decorator_list]


def is_frozen(node):
    """A frozen dataclass that has an equality."""
    found = [x for x in decorators(node) if x.startswith("dataclass(")]
    return isinstance(node, ast.ClassDef) and any("frozen" in x and "eq=" not in x for x in found)


def is_cached(node):
    """A function with `functools.cache` or `lru_cache`."""
    named = {x.partition("(")[0].rpartition(".")[2] for x in decorators(node)}
    return isinstance(node, ast.FunctionDef) and bool(named & {"cache", "lru_cache"})


def wraps_a_cache(node):
    """A function that makes one with `lru_cache` inside."""
    calls = (x for x in _own(node) if isinstance(x, ast.Call))
    named = {ast.unparse(x.func).rpartition(".")[2] for x in calls}
    wraps = isinstance(node, ast.FunctionDef) and bool(named & {"cache", "lru_cache"})
    return wraps and not is_cached(node)


def compares(node):
    """A class that says what it is equal to, or known by."""
    defined = {x.name for x in getattr(node, "body", ()) if isinstance(x, ast.FunctionDef)}
    assigned = {
        target.attr
        for x in _own(node)
        if isinstance(x, ast.Assign)
        for target in x.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    return isinstance(node, ast.ClassDef) and bool((defined | assigned) & _METHODS)


def remembers(node):
    """A function that looks into a mapping and, for a key that is not there, puts something in."""
    return isinstance(node, ast.FunctionDef) and bool(_read(node) & _written(node))


def _read(node):
    """Mappings that are asked for a key."""
    found = set()
    for x in _own(node):
        if isinstance(x, ast.Compare) and isinstance(x.ops[0], ast.In | ast.NotIn):
            found.add(ast.unparse(x.comparators[0]))
        elif _method_of(x) in ("get", "setdefault", "pop"):
            found.add(ast.unparse(x.func.value))
    return found


def _written(node):
    """Mappings that are given something for a key."""
    found = set()
    for x in _own(node):
        if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store | ast.Del):
            found.add(ast.unparse(x.value))
        elif _method_of(x) in ("put", "setdefault"):
            found.add(ast.unparse(x.func.value))
    return found


def _method_of(x):
    """The name of the method that is called, None where none is."""
    return getattr(x.func, "attr", None) if isinstance(x, ast.Call) else None


def _own(node):
    """What is in a function or class, methods too, without what is in a function inside one."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.ClassDef) or isinstance(node, ast.ClassDef):
            yield from _own(child)
