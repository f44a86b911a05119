"""Argument checks shared by every generator: each error names the argument and its value."""

import numbers
import operator

import numpy as np

INT32_MAX = 2**31 - 1


def integer(name, value, minimum=0, maximum=INT32_MAX):
    """Return `value` as an int inside ``[minimum, maximum]``."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: must be an integer, not a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r}: must be an integer, not {type(value).__name__}"
        ) from None
    if not minimum <= number <= maximum:
        bound = f"at least {minimum}" if number < minimum else f"at most {maximum}"
        raise ValueError(f"{name}={number}: must be {bound}")
    return number


def flag(name, value):
    """Return `value` as a bool; anything but a bool is a TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: must be True or False")
    return bool(value)


def sizes(name, value):
    """Return one integer above 0, or a tuple of two, as a pair of ints."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value}: must be one integer or a pair")
    return tuple(integer(name, size, 1) for size in pair)


def array_of(name, values):
    """Return `values` as an array; ValueError for lists of several lengths."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} holds lists of several lengths: must be an array") from error


def integers(name, values, minimum=0, maximum=INT32_MAX):
    """Return `values` as a 1-D int64 array whose entries lie in ``[minimum, maximum]``."""
    array = array_of(name, values)
    if array.ndim == 0:
        raise TypeError(f"{name} is {type(values).__name__}: must be a sequence of integers")
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions: must be one-dimensional")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: must be integers")
    if maximum < minimum:
        raise ValueError(f"{name} has {array.size} entries: must be empty")
    bad = (array < minimum) | (array > maximum)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name}[{at}]={array[at]}: must lie in [{minimum}, {maximum}]")
    return array.astype(np.int64)


def real(name, value):
    """Return `value` as a float; a bool or a string is a TypeError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}")
    return float(value)


def fraction(name, value):
    """Return `value` as a float inside ``[0, 1]``."""
    number = real(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}={number}: must lie in [0, 1]")
    return number


def distinct(name, array):
    """Raise unless the entries of a 1-D integer array are distinct."""
    values, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name} holds {values[counts > 1][0]} more than once: must be distinct")
    return values
