"""A Python function as it is at one time: what it reads is copied, and part of what it equals."""

import builtins
import dis
import functools
import sys
from collections import ChainMap
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace

import numpy as np

from masks.base import Mask, digest

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range)
_COLLECTIONS = (tuple, list, set, frozenset)
#: Nobody changes what these modules hold: their functions and types are constants.
_FIXED = (
    *("builtins", "bisect", "cmath", "functools", "itertools", "math", "operator"),
    *("masks", "numpy", "scipy"),
)
_READING = (
    *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"),
    *("LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"),
)
_ATTRIBUTE = "LOAD_ATTR", "LOAD_METHOD"
#: With these a function may read any variable.
_REACHING = (
    *("eval", "exec", "globals", "__import__"),
    *("__builtins__", "__globals__", "f_globals", "f_locals"),
)


def snapshot(value, made=None):
    """A copy of a value that later changes do not reach, and a key that equal values have.

    A function is copied with its defaults and attributes, the variables of enclosing functions and
    the globals that it reads; so are the functions, arrays and collections among these, and the
    numbers and the like that it reads of a module. Functions and types of NumPy and of some modules
    of Python are constants. Other objects (classes, instances of classes, modules of which anything
    else is read) are neither copied nor compared: their key is equal to itself only.

    Parameters
    ----------
    value : object
    made : dict, optional
        What was made of functions by their number, as some call themselves.

    Returns
    -------
    copy : object
    key : hashable
    """
    if made is None:
        try:
            return snapshot(value, {})
        except RecursionError:  # a list that holds itself, say
            return value, object()
    kind = type(value)
    if kind in _PLAIN:
        return value, (kind, repr(value))
    if kind in _COLLECTIONS:
        copies, keys = _all(value, made)
        ordered = kind in (tuple, list)
        return kind(copies), (kind, tuple(keys) if ordered else frozenset(keys))
    if kind is dict:
        (names, values), keys = _all((tuple(value), tuple(value.values())), made)
        return dict(zip(names, values, strict=True)), (kind, *keys)
    if isinstance(value, Mask | np.dtype) or _is_fixed(value):
        return value, (kind, value)
    if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
        return value.copy(), (kind, value.dtype, digest(np.asarray(value)))
    if kind is FunctionType:
        return made[id(value)] if id(value) in made else _function(value, made)
    if kind is functools.partial and not vars(value):
        (fn, args, keywords), keys = _all((value.func, value.args, value.keywords), made)
        return functools.partial(fn, *args, **keywords), (kind, *keys)
    return value, object()


def _all(values, made):
    pairs = [snapshot(value, made) for value in values]
    return [copy for copy, _ in pairs], [key for _, key in pairs]


def _is_fixed(value):
    """Whether it is one of the modules that nobody changes, or what one has under this name."""
    name = getattr(value, "__name__", None)
    if type(value) is ModuleType:
        ours = name.partition(".")[0].lstrip("_") in _FIXED  # len is of builtins, add of _operator
        return ours and sys.modules.get(name) is value
    if not isinstance(name, str) or name in _REACHING:
        return False
    home = sys.modules.get(getattr(value, "__module__", None) or "numpy")  # a ufunc says None
    return home is not None and _is_fixed(home) and getattr(home, name, None) is value


def _function(fn, made):
    code, cells = fn.__code__, fn.__closure__ or ()
    closure = tuple(CellType() for _ in cells)
    reads, reaches, imports = _reads(code)
    kept = "__builtins__", "__name__", "__package__"
    space = {name: fn.__globals__[name] for name in kept if name in fn.__globals__}
    space = fn.__globals__ if reaches else space
    copy = FunctionType(code, space, fn.__name__, None, closure)
    made[id(fn)] = copy, code
    copies, keys = _all((fn.__defaults__, fn.__kwdefaults__, vars(fn)), made)
    copy.__defaults__, copy.__kwdefaults__ = copies[:2]
    vars(copy).update(copies[2])
    keys += [object()] * (reaches or imports)
    known = {} if reaches else ChainMap(fn.__globals__, vars(builtins))
    for name in sorted(name for name in reads if name in known):
        space[name], key = _variable(known[name], reads[name], made)
        keys.append((name, key))
    for name, old, new in zip(code.co_freevars, cells, closure, strict=True):
        try:
            value = old.cell_contents
        except ValueError:  # nothing has been assigned to it yet
            keys.append(None)
            continue
        new.cell_contents, key = _variable(value, reads.get(name, {None}), made)
        keys.append(key)
    made[id(fn)] = copy, (FunctionType, code, *keys)
    return made[id(fn)]


def _variable(value, attributes, made):
    """`snapshot` of a variable; of a module these attributes, where all of them are plain."""
    if type(value) is ModuleType:
        read = {name: vars(value).get(name, value) for name in attributes}
        if all(type(x) in _PLAIN for x in read.values()):
            keys = {(name, snapshot(x, made)[1]) for name, x in read.items()}
            return SimpleNamespace(**read), (ModuleType, frozenset(keys))
    return snapshot(value, made)


def _reads(code):
    """What code reads, functions within it too.

    Returns
    -------
    reads : dict
        Of names of variables the attributes that are read of them; None where the variable itself
        is read.
    reaches, imports : bool
        Whether it may read other variables; whether it imports anything.
    """
    reads, reaches, imports = {}, False, False
    steps = list(dis.get_instructions(code))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.opname in _READING:
            of_it = after.argval if after.opname in _ATTRIBUTE else None
            reads.setdefault(step.argval, set()).add(of_it)
        reaches |= step.opname in (*_READING, *_ATTRIBUTE) and step.argval in _REACHING
        imports |= step.opname == "IMPORT_NAME"
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, *others = _reads(inner)
            for name, attributes in more.items():
                reads.setdefault(name, set()).update(attributes)
            reaches, imports = reaches | others[0], imports | others[1]
    return reads, reaches, imports
