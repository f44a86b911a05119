"""Functions that kernels call on the scores of a tile, by address: one kernel serves all of them.

    function(x, y, step, rows, columns, b, h, first_query, first_key, record)

All are int64: ``x`` and ``y`` the addresses of blocks of the working precision, with ``step`` bytes
from row to row and ``columns`` numbers side by side, ``record`` that of whatever else the function
is given. What it raises, the kernel raises.
"""

import sys
from typing import NamedTuple

import numpy as np
from numba import from_dtype, types

from nbflash.backends.cpu.compiling import compiled_at_address, inlined
from nbflash.backends.cpu.intrinsics import call
from nbflash.backends.cpu.walk import place

SIGNATURE = (types.int64,) * 10


class TileFunction(NamedTuple):
    """What kernels are given of one: addresses, 0 where there is no function."""

    address: int
    record: int


class Bound(NamedTuple):
    """A `TileFunction`, and what must not be freed before it."""

    function: TileFunction
    held: tuple


ABSENT = Bound(TileFunction(0, 0), ())


def compile_tile_function(make, *decided_by):
    """`compiled_at_address` for these functions."""
    return compiled_at_address(make, SIGNATURE, *decided_by)


def bind(compiled, values):
    """A compiled function with its record: numbers, C-contiguous arrays and tuples of them."""
    record = np.array(_words(values), np.int64)
    function = TileFunction(compiled.address, record.ctypes.data)
    return Bound(function, (compiled, values, record))


def _words(x):
    """As `intrinsics.read` reads it: a number's bytes, an array's address and shape."""
    if isinstance(x, tuple):
        return [word for part in x for word in _words(part)]
    if x.ndim:
        return [x.ctypes.data, *x.shape]
    return [int.from_bytes(x.tobytes().ljust(8, b"\0"), sys.byteorder, signed=True)]


def kind_of(x):
    """The Numba type of such values."""
    if isinstance(x, tuple):
        return types.Tuple([kind_of(part) for part in x])
    dtype = from_dtype(x.dtype)
    readonly = x.ndim > 0 and not x.flags.writeable
    return types.Array(dtype, x.ndim, "C", readonly=readonly) if x.ndim else dtype


@inlined
def on_tiles(walk, function, b, h, own, p, stop, x, y):
    """Call a function on the tiles p..stop of row ``own``, which stand side by side in ``x``.

    And in ``y``, an array like ``x`` or None.
    """
    if function.address != 0:
        step = x.shape[1] * x.itemsize
        for t in range(p, stop):
            q0, kv0, top, left = place(walk, own, p, t)
            at = top * step + left * x.itemsize
            beside = 0 if y is None else y.ctypes.data + at
            rows, columns = min(walk.tile_m, walk.nq - q0), min(walk.tile_n, walk.nk - kv0)
            block = x.ctypes.data + at, beside, step, rows, columns
            call(function.address, (*block, b, h, q0, kv0, function.record))
