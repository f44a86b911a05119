"""What a function computes, as a digest: its bytecode, its constants, and what it refers to.

Compiled code that is known by this digest is right wherever it is found. Comments and lines do not
count; globals, variables of an enclosing function, defaults, and functions that are called do, and
what these refer to.

Where a function refers to something that has no content to speak of (an array, an object, a module
of one's own), there is no digest, and what is compiled of it is not to be kept.
"""

import builtins
import dis
import hashlib
import sys
import types
from typing import NamedTuple

import numpy as np

# Their functions and types are what they are called; versions are the caller's to add.
STANDARD = "builtins", "math", "cmath", "operator", "numpy"
_DISPATCHERS = "CPUDispatcher", "CUDADispatcher"  # of numba and numba.cuda: neither is imported
_PLAIN = type(None), type(...), bool, int, float, complex, str, bytes


class Content(NamedTuple):
    """A digest, and the functions jitted by Numba that are called in what it is of.

    If one of them had been compiled before, that may have been with globals of other values.
    """

    digest: str
    jitted: tuple


class _Unknown(Exception):
    """There is something without a content that can be told."""


def content_of(*values):
    """The `Content` of plain values, tuples and functions; None where it cannot be known.

    The digest is the same in every process, and for every function that computes the same.
    """
    description = _Description()
    try:
        text = repr(description.of(values))
    except _Unknown:
        return None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Content(digest, tuple(description.jitted))


class _Description:
    """Plain tuples that say what something is."""

    def __init__(self):
        self.jitted, self._functions = [], []

    def of(self, x):
        if type(x) in _PLAIN:
            return type(x).__name__, repr(x)
        if isinstance(x, np.generic):
            return "scalar", x.dtype.str, x.tobytes()
        if type(x) in (tuple, list):
            return type(x).__name__, *map(self.of, x)
        if type(x) in (set, frozenset):
            return "set", *sorted(repr(self.of(part)) for part in x)
        if type(x) is dict:
            return "dict", *map(self.of, x.items())
        if isinstance(x, types.ModuleType) and x.__name__ in STANDARD:
            return "module", x.__name__
        if name := _standard_name(x):
            return "standard", *name
        if isinstance(x, types.CodeType):
            return self._code(x)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if type(x).__name__ in _DISPATCHERS:
            return self._jitted(x)
        raise _Unknown

    def _function(self, fn):
        """Its module must be there again for compiled code of it: exec makes none."""
        if fn in self._functions:
            return "again", self._functions.index(fn)
        self._functions.append(fn)
        module = fn.__globals__.get("__name__")
        if module not in sys.modules or vars(sys.modules[module]) is not fn.__globals__:
            raise _Unknown
        refers_to = {name: _global(fn, name) for name in sorted(set(_globals_of(fn.__code__)))}
        parts = fn.__code__, fn.__defaults__, fn.__kwdefaults__, _variables(fn), refers_to
        return "function", module, *map(self.of, parts)

    def _jitted(self, dispatcher):
        """One that has signatures or a cache of its own is compiled of more than its content."""
        if dispatcher in self.jitted:
            return "again jitted", self.jitted.index(dispatcher)
        if (
            getattr(dispatcher, "locals", None)
            or not dispatcher._can_compile
            or dispatcher.stats.cache_path
        ):
            raise _Unknown
        self.jitted.append(dispatcher)
        return "jitted", self.of(dispatcher.targetoptions), self.of(dispatcher.py_func)

    def _code(self, code):
        """What is executed; where something is raised also the lines, which a traceback shows."""
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        executed = code.co_code, code.co_exceptiontable, *names, *counts
        if any(x.opname == "RAISE_VARARGS" for x in dis.get_instructions(code)):
            executed += code.co_filename, code.co_firstlineno, code.co_linetable
        return "code", executed, self.of(code.co_consts)


def _standard_name(x):
    """Where a function or type of the standard modules is found; None if it is none."""
    name = getattr(x, "__name__", None)
    for module in (getattr(x, "__module__", None), "numpy"):
        if module in STANDARD and vars(sys.modules[module]).get(name) is x:
            return module, name
    return None


def _variables(fn):
    """Of the functions around it."""
    try:
        return tuple(cell.cell_contents for cell in fn.__closure__ or ())
    except ValueError as error:  # not assigned yet
        raise _Unknown from error


def _global(fn, name):
    for names in (fn.__globals__, vars(builtins)):
        if name in names:
            return names[name]
    raise _Unknown


def _globals_of(code):
    """Names of the globals that a code object reads, and those inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
