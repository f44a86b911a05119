"""What a caller says of dropout, checked: the probability, and the state of the random numbers."""

from __future__ import annotations

import numbers

import numpy as np

from nbflash.inputs.arrays import are_native, check_beside_q, native

_LIMIT = 2**64
_SHARED = "__dlpack__", "__cuda_array_interface__"
_RANGE = "seed must hold integers from 0 to 2**64 - 1"
_WANT = "an integer, a pair (seed, offset), or an array of these two of int64 or uint64"


def check_dropout(dropout) -> float:
    """``dropout`` as a float from 0 to below 1.

    Raises
    ------
    TypeError, ValueError
        If it is no real number, or out of range.
    """
    if isinstance(dropout, (bool, np.bool_)) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout must be a real number, got {dropout!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    return float(dropout)


def check_seed(seed, problem):
    """Seed and offset as two integers; in CUDA memory, an array of them stays where it is.

    Raises
    ------
    TypeError
        If ``seed`` is neither an integer nor a pair nor an array of 64-bit integers.
    ValueError
        If it is missing, out of range, of another shape or on another device than the problem.
    """
    if seed is None:
        raise ValueError(f"seed must be given with dropout: {_WANT}")
    if are_native(seed) or any(hasattr(seed, name) for name in _SHARED):
        return _from_array(*native(seed=seed), problem)
    pair = (seed, 0) if hasattr(seed, "__index__") else seed
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"seed must be {_WANT}, got {seed!r}")
    for x in pair:
        if isinstance(x, (bool, np.bool_)) or not hasattr(x, "__index__"):
            raise TypeError(f"seed must be {_WANT}, got {seed!r}")
        if not 0 <= x < _LIMIT:
            raise ValueError(f"{_RANGE}, got {seed!r}")
    return tuple(map(int, pair))


def _from_array(seed, problem):
    if seed.dtype.name not in ("int64", "uint64"):
        raise TypeError(f"seed must be {_WANT}, got an array of {seed.dtype}")
    if seed.shape != (2,) or seed.strides != (8,):
        raise ValueError(
            f"seed must be a contiguous array of shape (2,), got shape {seed.shape} and strides "
            f"{seed.strides}"
        )
    if isinstance(seed, np.ndarray):
        if (seed < 0).any():
            raise ValueError(f"{_RANGE}, got {seed!r}")
        return tuple(map(int, seed))
    check_beside_q("seed is", seed, problem)
    return seed
