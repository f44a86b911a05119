"""Faults of synchronisation, generated from the syntax tree of a kernel's module.

Every wait, arrival, fence, commit and barrier that is a statement is deleted; every phase that a
wait is given is flipped; every stage in the address of a barrier is shifted; every step of a ring
(``stage, phase = advance(stage, phase)``) is skipped. A mutant is named after its place (function,
call, number of that call there), not after the source text: renaming a variable costs nothing.
"""

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass

_WORDS = r"(?:^|_)(?:wait|arrive|fence|sync|commit|release|turns?)(?:_|$)|^sync(?:threads|warp)$"
_SYNCHRONISES = re.compile(_WORDS)
_WAIT = "mbarrier_wait"


@dataclass(frozen=True)
class GeneratedMutant:
    """One fault at a place in a source.

    Attributes
    ----------
    name : str
        Function, call, the number of that call in the function from the second on, and the change.
    first, last : (int, int)
        Line, from 1, and column in bytes: where the text begins and ends that is replaced.
    template : str
        What takes its place; ``{}`` stands for the text that was there.
    """

    name: str
    first: tuple
    last: tuple
    template: str

    def __str__(self):
        return self.name.replace(" ", "-")

    def apply(self, source):
        """The source with the fault."""
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (line, start), (last_line, stop) = self.first, self.last
        text = b"".join(lines[line - 1 : last_line])
        stop += sum(map(len, lines[line - 1 : last_line - 1]))
        new = self.template.replace("{}", text[start:stop].decode()).encode()
        lines[line - 1 : last_line] = [text[:start] + new + text[stop:]]
        return b"".join(lines).decode()


def _name_of(call):
    function = call.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def _mutant(name, node, template):
    return GeneratedMutant(
        name, (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), template
    )


class _Finder(ast.NodeVisitor):
    """Collects the faults of a module, function by function."""

    def __init__(self):
        self.found, self.function, self.numbers = [], "module", {}

    def visit_FunctionDef(self, node):
        outer, self.function = self.function, node.name
        self.generic_visit(node)
        self.function = outer

    def _place(self, call):
        """The name of the place of a call; called once for each call."""
        key = self.function, _name_of(call)
        number = self.numbers[key] = self.numbers.get(key, 0) + 1
        return f"{key[0]}: {key[1]}" + f" {number}" * (number > 1)

    def visit_Expr(self, node):
        call = node.value
        if isinstance(call, ast.Call) and _SYNCHRONISES.search(_name_of(call)):
            place = self._place(call)
            self.found.append(_mutant(f"{place} deleted", node, "pass"))
            if _name_of(call) == _WAIT:
                self.found.append(_mutant(f"{place} phase flipped", call.args[1], "({}) ^ 1"))
            for stage in filter(_is_stage, ast.walk(call.args[0] if call.args else call)):
                self.found.append(_mutant(f"{place} stage shifted", stage.right, "(({}) ^ 1)"))
        self.generic_visit(node)

    def visit_Assign(self, node):
        call = node.value
        if isinstance(call, ast.Call) and _name_of(call).startswith("advance"):
            self.found.append(_mutant(f"{self._place(call)} skipped", call.func, ""))
        self.generic_visit(node)


def _is_stage(node):
    """``8 * stage``: the bytes of barriers before it."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and getattr(node.left, "value", None) == 8
        and not isinstance(node.right, ast.Constant)
    )


def faults_of(source):
    """The mutants of a source text, in its order."""
    finder = _Finder()
    finder.visit(ast.parse(source))
    return finder.found


@functools.cache
def source_of(module):
    """The source text of a module, by its dotted name."""
    return importlib.util.find_spec(module).loader.get_source(module)


def generated(module):
    """:func:`faults_of` a module."""
    return faults_of(source_of(module))


def tree_of(module, mutant):
    """The syntax tree of a module with a fault, as text: what makes two faults the same."""
    return ast.dump(ast.parse(mutant.apply(source_of(module))))
