"""What a call says besides its tensors, as constants of what torch.compile compiles."""

from __future__ import annotations

import ctypes

import masks
from nbflash.scores import Score

_OBJECT = "object at"  # (_OBJECT, address): a tuple of constants is a constant


class Outside:
    """Base of objects that are made outside of graphs and do not change, as masks and scores."""


_OUTSIDE = masks.Mask, Score, Outside


def constant(x):
    """A number that torch.compile may keep as a symbol, as a constant: it looks again."""
    if isinstance(x, (int, float)):
        return next(iter({x: None}))  # to hash a symbol makes it a constant
    return x


def number(name, x):
    """`constant` of an argument that must be a Python number; TypeError for any other.

    torch.compile takes a NumPy scalar for an array, whose value it does not guard.
    """
    if not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a Python number within torch.compile")
    return constant(x)


def addressed(x):
    """An argument of an `assume_constant_result` function; a mask or a score by its address.

    Releases of torch before 2.13 take no objects there. All releases guard ``id``: they compile
    again if it changes, or if the object is freed.
    """
    return (_OBJECT, id(x)) if isinstance(x, _OUTSIDE) else x


def object_of(x):
    """What `addressed` was given. It is alive: the call that is compiled holds it."""
    if not isinstance(x, tuple) or x[:1] != (_OBJECT,):
        return x
    given = ctypes.cast(x[1], ctypes.py_object).value
    if not isinstance(given, _OUTSIDE):  # what stands for an object that the graph makes
        raise TypeError("masks and the scores of nbflash.scores must be made outside of a graph")
    return given
