"""Mutation testing: kernels with one planted fault, made from their own source text.

A mutant is data. The text that it replaces must occur in the source exactly as often as it
says, so that a mutant cannot rot silently when the kernel changes.
"""

import ast
import functools
import importlib.util
import inspect
import linecache
import sys
import textwrap
import types
from dataclasses import dataclass

# Why some shifted stages are not noticed.
TWO_STAGES = "of two stages the loader takes the other one first, and it is free no sooner"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes
    ----------
    name : str
    old, new : str
        Text of the source and what replaces it.
    which : int
        The occurrence to replace, from 0.
    count : int
        How often ``old`` occurs in the source.
    """

    name: str
    old: str
    new: str
    which: int = 0
    count: int = 1

    def __str__(self):
        return self.name.replace(" ", "-")

    def apply(self, source):
        """The source with the fault; ValueError if the source has changed under it."""
        found = source.count(self.old)
        if found != self.count:
            raise ValueError(
                f"mutant {self.name!r}: {self.old!r} occurs {found} times, expected {self.count}"
            )
        parts = source.split(self.old)
        head, tail = parts[: self.which + 1], parts[self.which + 1 :]
        return self.old.join(head) + self.new + self.old.join(tail)


def lines(indent, *text):
    """Lines of the source."""
    return "".join(f"{' ' * indent}{line}\n" for line in text)


def without(what, line, count=1, which=0):
    """Drop a statement."""
    indent = " " * (len(line) - len(line.lstrip()))
    return Mutant(f"no {what}", line, f"{indent}pass", which, count)


def swapped(name, *parts):
    """Two statements of the source, first, second, in the other order; then what stays behind."""
    first, second, *rest = parts
    return Mutant(name, "".join(parts), "".join([second, first, *rest]))


def without_barrier(comment):
    """Drop the barrier whose comment says what it stands for."""
    return Mutant(f"no barrier: {comment}", f"cuda.syncthreads()  # {comment}\n", "pass\n")


def _execute(source, name, namespace):
    """Run source under a file name that tracebacks and reports can show."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), namespace)


@functools.cache
def _code_of(loader, name):
    """A module's own code, compiled once for all faults."""
    return loader.get_code(name)


def rebuilt(fn, mutant):
    """A function of a test with the fault planted, sharing its module's globals."""
    source = mutant.apply(textwrap.dedent(inspect.getsource(fn)))
    namespace = dict(fn.__globals__)
    _execute(source, f"<{mutant.name}>", namespace)
    return namespace[fn.__name__]


@functools.cache
def _imported_by(name):
    """Dotted names that a module imports, wherever in it, and with a dot what may lie below."""
    spec, found = importlib.util.find_spec(name), set()
    for node in ast.walk(ast.parse(spec.loader.get_source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), spec.parent
            )
            found |= {package, *(f"{package}.{alias.name}" for alias in node.names)}
    return found


def _imports(name, modules):
    """Whether a module imports one of others, or a package that one of them may be taken from."""
    found = _imported_by(name)
    return any(x in found or any(x.startswith(f"{y}.") for y in found) for x in modules)


def mutated_modules(target, mutant, dependents):
    """The modules ``dependents``, rebuilt around a faulty ``target`` where they import it.

    Parameters
    ----------
    target : str
        Dotted name of the module to mutate.
    mutant : Mutant
    dependents : sequence of str
        Modules that may import it, directly or not, in the order of their imports.

    Returns
    -------
    dict of str to module
        Fresh modules, and those that import none of them; those in ``sys.modules`` stay as they
        are.
    """
    names = [target, *(name for name in dependents if name != target)]
    original = {name: importlib.import_module(name) for name in names}
    built = {}
    try:
        for name in names:
            if name != target and not _imports(name, built):
                continue
            spec = importlib.util.find_spec(name)
            module = types.ModuleType(name)
            module.__file__, module.__package__ = spec.origin, name.rpartition(".")[0]
            built[name] = module
            _bind(name, module)
            if name == target:
                source = mutant.apply(spec.loader.get_source(name))
                _execute(source, f"{spec.origin}<{mutant.name}>", module.__dict__)
            else:
                exec(_code_of(spec.loader, name), module.__dict__)
    finally:
        for name, module in original.items():
            _bind(name, module)
    return original | built


def _bind(name, module):
    """Have imports of a dotted name find a module, by its package too."""
    package, _, leaf = name.rpartition(".")
    sys.modules[name] = module
    if package:
        setattr(sys.modules[package], leaf, module)
