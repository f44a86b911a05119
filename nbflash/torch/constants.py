"""What a call says besides its tensors, as constants of what torch.compile compiles."""

from __future__ import annotations

import ctypes
import enum
from types import BuiltinFunctionType, FunctionType

#: What every release of torch gives to a function whose result is a constant.
_PLAIN = (int, float, str, tuple, list, type, enum.Enum, FunctionType, BuiltinFunctionType)
_OBJECT = "object at"  # (_OBJECT, address): a tuple of constants is a constant


def constant(x):
    """A number that torch.compile may keep as a symbol, as a constant: it looks again."""
    if isinstance(x, (int, float)):
        return next(iter({x: None}))  # to hash a symbol makes it a constant
    return x


def addressed(x):
    """An argument of a function whose result is a constant: an object by its address.

    Releases of torch before 2.13 take no objects there. All of them know ``id``, and compile anew
    when it is another one.
    """
    return x if x is None or isinstance(x, _PLAIN) else (_OBJECT, id(x))


def found(x):
    """What `addressed` was given. An object is alive: the call that is compiled has it."""
    if isinstance(x, tuple) and x[:1] == (_OBJECT,):
        return ctypes.cast(x[1], ctypes.py_object).value
    return x
