"""Mutants that leave something out: what a hurried change forgets, and no operator replaces.

An operand of ``and``, ``or``, ``min`` and ``max``; an entry of a dictionary; a keyword of a call; a
copy or a conversion; a call for its effect, a change in place, an early end. What a ``raise`` says
is left alone.
"""

import ast
import copy
import re

#: Keywords that change no result, and those of ``**``.
_SPARE = {None, "strict", "digest_size", "sparse", "maxsize", "copy"}
_BOUNDS = re.compile(r"\b(min|max|minimum|maximum)$")
_METHODS = {"copy", "astype", "tobytes", "tolist", "lower", "strip", "get"}
_FUNCTIONS = {
    *("array", "asarray", "ascontiguousarray", "contiguous", "native"),
    *("int", "float", "bool", "str", "repr", "len", "abs"),
    *("tuple", "list", "set", "frozenset", "dict", "sorted"),
}


def omissions(source):
    """Pairs ((line, column), function from the source to a mutant), by place."""
    tree = ast.parse(source)
    for node in _without_errors(tree):
        for other in _shorter(node):
            text = ast.unparse(other)
            text = f"({text})" if isinstance(other, ast.expr) else text
            yield (node.lineno, node.col_offset), _Replaced(node, text)


class _Replaced:
    """A node of the source as another text."""

    def __init__(self, node, text):
        self._at = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        self._text = text.encode()

    def __call__(self, source):
        lines = source.encode().splitlines(keepends=True)
        start, end = (sum(map(len, lines[: n - 1])) + column for n, column in self._at)
        whole = b"".join(lines)
        return (whole[:start] + self._text + whole[end:]).decode()


def _without_errors(node):
    """Nodes in order, but for the messages of errors, annotations and decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if isinstance(child, ast.expr | ast.stmt):
                    yield child
                yield from _without_errors(child)


def _shorter(node):
    """What stands in the place of a node that lacks a part."""
    match node:
        case ast.BoolOp(values=[_, _]):
            yield from node.values
        case ast.BoolOp():
            yield from (_without(node, "values", i) for i in range(len(node.values)))
        case ast.Dict(keys=[_, *_]):
            for i in range(len(node.keys)):
                yield ast.Dict(
                    node.keys[:i] + node.keys[i + 1 :], node.values[:i] + node.values[i + 1 :]
                )
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.Call():
            yield from _shorter_call(node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.Pass()
        case ast.If(body=[ast.Return() | ast.Raise() | ast.Continue() | ast.Break()], orelse=[]):
            yield ast.Pass()


def _shorter_call(node):
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in _SPARE:
            yield _without(node, "keywords", i)
    if any(isinstance(x, ast.Starred) for x in node.args):
        return
    if len(node.args) > 1 and _BOUNDS.search(name):
        yield from node.args
    elif isinstance(node.func, ast.Attribute) and last in _METHODS:
        yield node.func.value
    elif len(node.args) == 1 and last in _FUNCTIONS:
        yield node.args[0]


def _without(node, field, i):
    node = copy.copy(node)
    values = getattr(node, field)
    setattr(node, field, values[:i] + values[i + 1 :])
    return node
