"""Device functions of the same code and the same values are one function, compiled once.

A kernel is made of some fifty device functions, which are made anew for every kernel. Most of them
are what another kernel has, too. Numba types and lowers them alike for all architectures.

Only processes that compile many kernels and do nothing else share them: it takes memory, and time
to free it when a process ends.
"""

import threading
from types import FunctionType

import numpy as np

from nbflash.cuda.ptx._deferred import Callee, Module

MOST = 2048  # functions that are remembered, with what Numba made of them: 0.15 MB each
_OURS = __name__.partition(".")[0]
_PLAIN = bool, int, float, str, range, type(None), np.generic
_lock = threading.Lock()
# By content: a function, which keeps alive what its content names, and what it became. None: off.
_known = None


class _UnknownContent(Exception):
    """A function's content is not known, or may change."""


def begin():
    """Share functions that are made from now on."""
    global _known
    _known = {}


def shared(fn, make):
    """``make(fn)``, or what it was for a function of the same content."""
    if _known is None:
        return make(fn)
    try:
        content = _content(fn, ())
    except _UnknownContent:
        return make(fn)
    with _lock:
        known = _known.pop(content, None) or (fn, make(fn))
        _known[content] = known  # behind all others
        if len(_known) > MOST:
            del _known[next(iter(_known))]
    return known[1]


def _content(x, within):
    """What decides what a function computes; objects other than plain ones by their addresses.

    ``within``: the functions that this one is a value of.
    """
    if isinstance(x, FunctionType):
        if x in within:  # it calls itself
            return within.index(x)
        values = _values_of(x)
        return id(x.__code__), id(x.__globals__), *(_content(v, (*within, x)) for v in values)
    if isinstance(x, tuple | list):
        return type(x), *(_content(value, within) for value in x)
    if _is_ours(type(x)) and not isinstance(x, Callee | Module):
        return type(x), *(_content(item, within) for item in vars(x).items())
    return (type(x), repr(x)) if isinstance(x, _PLAIN) else (None, id(x))


def _is_ours(x):
    return (x.__module__ or "").partition(".")[0] == _OURS


def _values_of(fn):
    """The values that a function of ours is closed over, and its defaults."""
    if not _is_ours(fn):
        raise _UnknownContent  # a user may change its globals
    try:
        values = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # one is defined further down
        raise _UnknownContent from None
    return [*values, fn.__defaults__, *(fn.__kwdefaults__ or {}).items()]
