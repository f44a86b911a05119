"""What ``numba.cuda`` offers to device code, on top of the engine."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

from nbflash.cuda.simulator import warp
from nbflash.cuda.simulator.dtypes import numpy_dtype
from nbflash.cuda.simulator.engine import current
from nbflash.cuda.simulator.memory import wrap
from nbflash.cuda.simulator.storage import local_array

_double = memoryview(bytearray(8)).cast("d")
_bits = memoryview(_double.cast("B")).cast("Q")
_single = np.zeros(1, np.float32)
_LOW_BITS, _HALF_ULP = (1 << 29) - 1, 1 << 28


class Position:
    """``threadIdx``, ``blockIdx``, ``blockDim`` or ``gridDim`` of whoever asks."""

    def __init__(self, read):
        self._read = read

    x = property(lambda self: self._read(current()).x)
    y = property(lambda self: self._read(current()).y)
    z = property(lambda self: self._read(current()).z)


def _shared_array(shape, dtype, alignment=None):
    """``cuda.shared.array``: shape 0 is the dynamic buffer. Every array is 1024-byte aligned."""
    memory, dtype = current().block.shared, numpy_dtype(dtype)
    if isinstance(shape, int) and shape == 0:
        return memory.dynamic_array(dtype)
    return memory.static_array(shape, dtype)


def _local_array(shape, dtype, alignment=None):
    return local_array(shape, numpy_dtype(dtype))


def _constant(array):
    data = np.ascontiguousarray(array).view()
    data.flags.writeable = False
    return wrap(data, current().block.global_memory)


def syncthreads():
    """Wait for the whole block."""
    thread = current()
    thread.block.syncthreads(thread)


def _reduced(reduce):
    def barrier(predicate):
        thread = current()
        votes = thread.block.state.setdefault("votes", {})
        votes[thread.tid] = bool(predicate)
        thread.block.syncthreads(thread)
        result = reduce(votes.values())
        thread.block.syncthreads(thread)
        return int(result)

    return barrier


class Atomic:
    """``cuda.atomic``: read, change, write; returns the old value."""

    @staticmethod
    def add(array, index, value):
        return array.update(index, lambda old: old + value)

    @staticmethod
    def sub(array, index, value):
        return array.update(index, lambda old: old - value)

    @staticmethod
    def max(array, index, value):
        return array.update(index, lambda old: max(old, value))

    @staticmethod
    def min(array, index, value):
        return array.update(index, lambda old: min(old, value))

    @staticmethod
    def and_(array, index, value):
        return array.update(index, lambda old: old & value)

    @staticmethod
    def or_(array, index, value):
        return array.update(index, lambda old: old | value)

    @staticmethod
    def xor(array, index, value):
        return array.update(index, lambda old: old ^ value)

    @staticmethod
    def exch(array, index, value):
        return array.update(index, lambda old: value)

    @staticmethod
    def cas(array, index, expected, value):
        return array.update(index, lambda old: value if old == expected else old)

    @staticmethod
    def inc(array, index, limit):
        return array.update(index, lambda old: 0 if old >= limit else old + 1)

    @staticmethod
    def dec(array, index, limit):
        return array.update(index, lambda old: limit if old == 0 or old > limit else old - 1)


def fma(a, b, c):
    """``a * b + c`` rounded once, in the type of ``c``.

    float32 goes through float64, where the product is exact; the sum is rounded twice only
    at a float32 midpoint, which is resolved exactly. Subnormal results may be rounded twice.
    """
    if isinstance(c, np.float64) or type(c) is float:
        return type(c)(_fma64(float(a), float(b), float(c)))
    product, addend = float(a) * float(b), float(c)
    _double[0] = total = product + addend
    if _bits[0] & _LOW_BITS == _HALF_ULP and math.isfinite(total):
        error = Fraction(product) + Fraction(addend) - Fraction(total)
        if error:
            total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    if isinstance(c, np.float32):
        _single[0] = total
        return _single[0]
    return type(c)(total)


def _fma64(a, b, c):
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else a * b + c


def grid(ndim):
    """This thread's position in the grid, as 64-bit integers of 1 to 3 axes."""
    thread = current()
    block = thread.block
    axes = zip(block.blockIdx, block.blockDim, thread.threadIdx, strict=True)
    at = [index * size + inner for index, size, inner in axes]
    return at[0] if ndim == 1 else tuple(at[:ndim])


def gridsize(ndim):
    """Threads in the grid along 1 to 3 axes."""
    block = current().block
    sizes = [n * size for n, size in zip(block.gridDim, block.blockDim, strict=True)]
    return sizes[0] if ndim == 1 else tuple(sizes[:ndim])


def _leading_zeros(value):
    width = 64 if isinstance(value, (np.int64, np.uint64)) else 32
    return width - (int(value) & ((1 << width) - 1)).bit_length()


DEVICE_NAMES = {
    "threadIdx": Position(lambda thread: thread.threadIdx),
    "blockIdx": Position(lambda thread: thread.block.blockIdx),
    "blockDim": Position(lambda thread: thread.block.blockDim),
    "gridDim": Position(lambda thread: thread.block.gridDim),
    "warpsize": 32,
    "grid": grid,
    "gridsize": gridsize,
    "shared": SimpleNamespace(array=_shared_array),
    "local": SimpleNamespace(array=_local_array),
    "const": SimpleNamespace(array_like=_constant),
    "atomic": Atomic,
    "syncthreads": syncthreads,
    "syncthreads_count": _reduced(lambda votes: sum(votes)),
    "syncthreads_and": _reduced(all),
    "syncthreads_or": _reduced(any),
    "threadfence": lambda: None,
    "threadfence_block": lambda: None,
    "threadfence_system": lambda: None,
    "nanosleep": lambda nanoseconds: None,
    "fma": fma,
    "popc": lambda value: (int(value) & 2 ** (8 * np.asarray(value).nbytes) - 1).bit_count(),
    "clz": _leading_zeros,
    "ffs": lambda value: (int(value) & -int(value)).bit_length(),
    "brev": lambda value: int(f"{int(value) & 0xFFFFFFFF:032b}"[::-1], 2),
    "selp": lambda condition, a, b: a if condition else b,
    "cbrt": np.cbrt,
    "syncwarp": warp.syncwarp,
    "ballot_sync": warp.ballot_sync,
    "any_sync": warp.any_sync,
    "all_sync": warp.all_sync,
    "match_any_sync": warp.match_any_sync,
    "match_all_sync": warp.match_all_sync,
    "shfl_sync": warp.shfl_sync,
    "shfl_xor_sync": warp.shfl_xor_sync,
    "shfl_up_sync": warp.shfl_up_sync,
    "shfl_down_sync": warp.shfl_down_sync,
    "activemask": warp.activemask,
}
