"""Launches of kernels without a fault, beside a planted one: run once, then remembered.

What a case runs before and after the faulty kernel, such as the statistics of rows for a backward
pass, is the same for each of a hundred faults. The simulator gives the same result for the same
kernel, options and bytes, so that the second launch writes what the first one wrote.
"""

import contextlib
import functools
import hashlib
import itertools
import sys

import numpy as np

from nbflash.cuda import launch
from nbflash.cuda.simulator.hopper import SimTensorMap
from nbflash.cuda.simulator.launch import settings

MOST = 128  # launches: those of the cases of a family or two
_known, _on = {}, [False]


class _Unknown(Exception):
    """An argument that has no bytes of its own."""


@contextlib.contextmanager
def launches():
    """Remember launches for a while, and what was remembered before."""
    _on[0] = True
    try:
        yield
    finally:
        _on[0] = False


def _described(x, arrays):
    """All of an argument that decides a result; its arrays are added to a list."""
    if isinstance(x, SimTensorMap):
        return SimTensorMap, x.rows, _described(x.array, arrays)
    if isinstance(x, tuple | list):
        return type(x), *(_described(part, arrays) for part in x)
    if isinstance(x, np.ndarray) and x.ndim:
        arrays.append(x)
        address = x.__array_interface__["data"][0]
        digest = hashlib.sha256(x.tobytes()).digest()
        return x.dtype.str, x.shape, x.strides, address % 16, x.flags.writeable, digest
    if x is None or isinstance(x, int | float | np.generic):
        return type(x), repr(x)
    raise _Unknown


def _is_imported(make):
    """Whether a function is the one that its module has: not one that was built around a fault."""
    module = sys.modules.get(make.__module__)
    return getattr(module, make.__qualname__, None) is make


def _key_of(spec, blocks, arguments, arrays):
    """What decides the result of a launch, or None where it cannot be told."""
    if not _is_imported(spec.make):
        return None
    try:
        described = _described(tuple(arguments), arrays)
    except _Unknown:
        return None
    if any(np.may_share_memory(a, b) for a, b in itertools.combinations(arrays, 2)):
        return None
    return spec, repr(blocks), settings(), described


def install():
    """Have launches remembered inside of :func:`launches`."""
    simulate = launch.simulate

    @functools.wraps(simulate)
    def remembering(spec, blocks, arguments):
        arrays = []
        key = _key_of(spec, blocks, arguments, arrays) if _on[0] else None
        if key is None:
            return simulate(spec, blocks, arguments)
        written = _known.pop(key, None)
        if written is None:
            before = [x.tobytes() for x in arrays]
            simulate(spec, blocks, arguments)
            changed = (i for i, x in enumerate(arrays) if x.tobytes() != before[i])
            written = {i: arrays[i].copy() for i in changed}
        else:
            for i, values in written.items():
                arrays[i][...] = values
        _known[key] = written  # behind all others
        if len(_known) > MOST:
            del _known[next(iter(_known))]
        return None

    launch.simulate = remembering
