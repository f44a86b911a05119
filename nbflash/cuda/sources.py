"""The sources that a module is made of: its own, and those of ours that it imports."""

import ast
import functools
import importlib.util

OURS = "nbflash", "masks"


def sources_of(*names):
    """Dotted name to source: of modules, and of what they import of ours, directly or not.

    Imports inside functions do not count: what a kernel is made of is imported at the top.
    """
    found, left = {}, list(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name], imported = _read(name)
            left += imported
    return found


@functools.cache
def _read(name):
    """A module's source and the modules of ours that it imports."""
    source = importlib.util.find_spec(name).loader.get_source(name)
    imported, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {_module(node.module, alias.name) for alias in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = ast.stmt | ast.ExceptHandler
            nodes += (child for child in ast.iter_child_nodes(node) if isinstance(child, inside))
    return source, [module for module in imported if module.partition(".")[0] in OURS]


def _module(package, name):
    """What ``from package import name`` needs: a module of the package, or the package itself."""
    if package.partition(".")[0] not in OURS:
        return package
    spec = importlib.util.find_spec(package)
    if spec.submodule_search_locations and importlib.util.find_spec(f"{package}.{name}"):
        return f"{package}.{name}"
    return package
