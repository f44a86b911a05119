"""What a function or class is made of: its definition, and those of ours that it refers to.

The unit is a statement of a module. One counts if its name is referred to by one that counts; an
import leads on to the module that it names. Comments, docstrings and layout do not count, so that a
digest is that of what is executed, the same under every version of Python.
"""

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import time
from typing import NamedTuple

OURS = "nbflash", "masks"
WHOLE = "*"  # a name: all of a module
BESIDES = ""  # a name: what a module executes that binds none


_STARTED = time.time()


class Digest(NamedTuple):
    """Of what is executed, and the modules that it was read from, by the digests of their files."""

    digest: str
    modules: dict

    @property
    def is_current(self):
        """Whether the modules are as they were."""
        return all(_is_module(name) and file_digest(name) == x for name, x in self.modules.items())


def digest_of(*roots):
    """The `Digest` of the definitions of `definitions_of`."""
    found = definitions_of(*roots)
    text = repr(sorted(found.items())).encode()
    modules = sorted({module for module, _ in found})
    return Digest(hashlib.sha256(text).hexdigest(), {name: file_digest(name) for name in modules})


def are_as_imported(modules):
    """Whether no file was written since this process began: it may run what was there before."""
    return all(os.stat(_spec(name).origin).st_mtime < _STARTED for name in modules)


def definitions_of(*roots):
    """(module, name) to what is executed, of definitions and of all of ours that they refer to.

    Imports inside functions do not count: what a kernel is made of is imported at the top.

    Parameters
    ----------
    roots : tuples of str
        (module, name of a definition at its top level, or `WHOLE`).
    """
    found, left = {}, list(roots)
    while left:
        at = left.pop()
        if at not in found:
            found[at], refers_to = _definition(*at)
            left += refers_to
    return found


def _definition(module, name):
    """What is executed for a name of a module, and what it refers to."""
    statements = _statements(module)
    if name == WHOLE:
        return "", [(module, each) for each in statements]
    if name in statements:
        text, refers_to = statements[name]
        return text, [*refers_to, (module, BESIDES)]
    if _is_module(f"{module}.{name}"):
        return "", [(f"{module}.{name}", WHOLE)]
    return "", [(module, BESIDES if name.startswith("__") else WHOLE)]


def source_of(module):
    """The source of a module of ours."""
    return _spec(module).loader.get_source(module)


@functools.cache
def file_digest(module):
    """Of the source as it is written."""
    return hashlib.sha256(source_of(module).encode()).hexdigest()


def _spec(module):
    """That of an imported module, or of one that can be found."""
    return getattr(sys.modules.get(module), "__spec__", None) or importlib.util.find_spec(module)


@functools.cache
def _statements(module):
    """What a module executes at its top level, by the names that are bound.

    Of each name what is executed to bind it, and the definitions of ours that this refers to.
    """
    nodes, imported = {BESIDES: []}, {}
    for node in ast.parse(source_of(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= _imported(node)
        elif not _is_docstring(node):
            for name in _bound_by(node) or [BESIDES]:
                nodes.setdefault(name, []).append(node)
    known = {name: (module, name) for name in nodes if name} | imported
    found = {name: (repr(at), [at] if _is_ours(at) else []) for name, at in imported.items()}
    for name, own in nodes.items():
        refers_to = {at for node in own for at in _references(node, module, known)}
        found[name] = repr([_executed(node) for node in own]), sorted(refers_to)
    return found


def _imported(node):
    """The names that an import binds, and what they are: a definition, or a `WHOLE` module."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: _target(node, alias.name) for alias in node.names}
    return {
        alias.asname or alias.name.partition(".")[0]: (alias.name, WHOLE) for alias in node.names
    }


def _target(node, name):
    """What ``from package import name`` gives: a module of the package, or a definition."""
    inner = f"{node.module}.{name}"
    if _is_ours((inner, name)) and _is_module(inner):
        return inner, WHOLE
    return node.module, name


@functools.cache
def _is_module(name):
    try:
        return _spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module and no package
        return False


def _is_ours(at):
    return at[0].partition(".")[0] in OURS


def _bound_by(node):
    """Names that a statement at the top level binds, inside an ``if``, ``for`` or ``try`` too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    names = []
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.append(child.id)
        elif isinstance(child, ast.alias):
            names.append(child.asname or child.name.partition(".")[0])
        elif isinstance(child, ast.FunctionDef | ast.ClassDef):
            names.append(child.name)
    return list(dict.fromkeys(names))


def _references(node, module, known):
    """Definitions of ours that a statement may refer to; a local name may be taken for one."""
    of_name = {}  # what is taken of a name, by the name's node
    for child in _walk(node):
        if isinstance(child, ast.Attribute):
            of_name[id(child.value)] = child.attr
        elif isinstance(child, ast.Import | ast.ImportFrom):  # under an ``if`` or ``try``
            yield from filter(_is_ours, _imported(child).values())
        elif isinstance(child, ast.Name) and child.id in known:
            where, name = known[child.id]
            if not _is_ours((where, name)):
                yield module, child.id
            elif name == WHOLE:
                yield where, of_name.get(id(child), WHOLE)
            else:
                yield where, name


def _walk(node, is_inside=False):
    """A node and all below, but for imports inside functions."""
    if is_inside and isinstance(node, ast.Import | ast.ImportFrom):
        return
    yield node
    is_inside = is_inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, is_inside)


def _executed(node):
    """A node as plain values, without what is not executed and what versions of Python add."""
    if isinstance(node, list):
        return [_executed(part) for part in node if not _is_docstring(part)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields)
    kept = (x for x in fields if x[0] not in ("ctx", "kind", "type_comment", "type_params"))
    return type(node).__name__, [(name, _executed(x)) for name, x in kept if x not in (None, [])]


def _is_docstring(node):
    """Whether a statement is a constant that nobody takes."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
