"""A Python function as it is at one time: what it reads is copied, and part of what it equals."""

import dis
import functools
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType

import numpy as np

from masks.base import Mask, digest

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range)
_COLLECTIONS = (tuple, list, set, frozenset)
#: Taken as they are: np.where is of the last of these types.
_CONSTANT = (type, np.ufunc, np.dtype, type(np.where))


def snapshot(value, made=None):
    """A copy of a value that later changes do not reach, and a key that equal values have.

    A function is copied with its defaults, the variables of enclosing functions and the globals
    that it reads; so are the functions, arrays and collections among these. Other objects, the
    instances of classes say, are neither copied nor compared: their key is equal to itself only.

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
    made = {} if made is None else made
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
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return value.copy(), (kind, digest(np.asarray(value)))
    if kind is FunctionType:
        return made[id(value)] if id(value) in made else _function(value, made)
    if kind is functools.partial:
        (fn, args, keywords), keys = _all((value.func, value.args, value.keywords), made)
        return functools.partial(fn, *args, **keywords), (kind, *keys)
    builtin = kind is BuiltinFunctionType and isinstance(value.__self__, ModuleType)
    if builtin or isinstance(value, (Mask, ModuleType, *_CONSTANT)):
        return value, value
    return value, object()


def _all(values, made):
    pairs = [snapshot(value, made) for value in values]
    return [copy for copy, _ in pairs], [key for _, key in pairs]


def _function(fn, made):
    code, cells, space = fn.__code__, fn.__closure__ or (), {}
    closure = tuple(CellType() for _ in cells)
    copy = FunctionType(code, space, fn.__name__, None, closure)
    made[id(fn)] = copy, code
    names, attributes = _reads(code)
    names = sorted(names & fn.__globals__.keys())
    read = {name: fn.__globals__[name] for name in names}
    kept = "__builtins__", "__name__", "__package__"
    space |= {name: fn.__globals__[name] for name in kept if name in fn.__globals__}
    copies, keys = _all((fn.__defaults__, fn.__kwdefaults__, read), made)
    copy.__defaults__, copy.__kwdefaults__ = copies[:2]
    space |= copies[2]
    for old, new in zip(cells, closure, strict=True):
        try:
            value = old.cell_contents
        except ValueError:  # nothing has been assigned to it yet
            keys.append(None)
            continue
        new.cell_contents, key = snapshot(value, made)
        keys.append(key)
    keys += [_settings(x, attributes) for x in read.values() if isinstance(x, ModuleType)]
    made[id(fn)] = copy, (FunctionType, code, *keys)
    return made[id(fn)]


def _reads(code):
    """Names of the globals and of the attributes that code reads, functions within it too."""
    names, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _reads(inner)
            names |= more[0]
            attributes |= more[1]
    return names, attributes


def _settings(module, attributes):
    """A key of the numbers and the like that a module has under these names."""
    names = sorted(attributes & vars(module).keys())
    plain = [name for name in names if type(vars(module)[name]) in _PLAIN]
    return tuple((name, snapshot(vars(module)[name])[1]) for name in plain)
