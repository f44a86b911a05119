"""``cuda.jit`` in the simulator: a kernel that runs its blocks one after the other."""

import functools
import itertools
import random

import numpy as np
from greenlet import getcurrent

from nbflash.cuda.collector import collector_off
from nbflash.cuda.simulator.engine import MAX_THREADS, Block, Dim3, Options, Thread
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.memory import wrap
from nbflash.cuda.simulator.storage import global_memory

JIT_OPTIONS = frozenset(
    {
        *("argtypes", "boundscheck", "cache", "debug", "device", "extensions", "fastmath"),
        *("forceinline", "inline", "launch_bounds", "lineinfo", "link", "lto", "max_registers"),
        *("opt", "restype", "shared_memory_carveout"),
    }
)

_settings = Options()


def settings():
    """The :class:`Options` that the next launch runs under."""
    return _settings


def set_settings(new):
    """Replace the options of every launch to come."""
    global _settings
    _settings = new


def _dimensions(size, name):
    sizes = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    dims = Dim3(*(int(n) for n in (*sizes, 1, 1, 1)[:3]))
    if len(sizes) > 3 or min(dims) < 1:
        raise ValueError(f"{name}={size}: one to three positive sizes are needed")
    return dims


class Kernel:
    """A ``@cuda.jit`` function. ``kernel[grid, block, stream, dynamic_bytes](*args)`` runs it.

    Arguments are used in place: no copies, so strided and overlapping arrays work. A call
    from inside a kernel is a call of a device function.
    """

    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.py_func = fn

    def __getitem__(self, configuration):
        grid, block, _, dynamic_bytes = (*configuration, 0, 0)[:4]
        return functools.partial(launch, self.py_func, grid, block, dynamic_bytes)

    def __call__(self, *args):
        if not _inside_kernel():
            raise SimError(f"{self.py_func.__name__} needs a launch configuration: kernel[...]()")
        return self.py_func(*args)


def _inside_kernel():
    return type(getcurrent()) is Thread


def launch(fn, grid, block, dynamic_bytes, *args):
    """Run every block of the grid in an order that the seed chooses.

    Raises
    ------
    SimError
        The first fault that the simulator finds.
    """
    if _inside_kernel():
        raise SimError("a kernel cannot be launched from device code")
    options = _settings
    grid, block = _dimensions(grid, "grid"), _dimensions(block, "block")
    if block.x * block.y * block.z > MAX_THREADS:
        raise SimError(f"{tuple(block)} threads in a block, the limit is {MAX_THREADS}")
    memory = global_memory(options)
    args = tuple(_device_view(arg, memory) for arg in args)
    indices = list(itertools.product(range(grid.x), range(grid.y), range(grid.z)))
    random.Random(options.seed).shuffle(indices)
    with collector_off():  # collecting makes half the time of a million live access records
        for index in indices:
            running = Block(index, block, grid, int(dynamic_bytes), options)
            running.global_memory = memory
            running.run(fn, args)
        del running, args, memory


def _device_view(arg, memory):
    if isinstance(arg, (tuple, list)):
        return type(arg)(_device_view(part, memory) for part in arg)
    data = getattr(arg, "_ary", arg)
    if isinstance(data, np.ndarray) and data.ndim > 0:
        return wrap(data, memory)
    return arg


def jit(func_or_sig=None, **options):
    """``numba.cuda.jit``: compiler options are accepted and have no effect.

    Raises
    ------
    TypeError
        For an option that numba-cuda does not have.
    """
    unknown = set(options) - JIT_OPTIONS
    if unknown:
        raise TypeError(f"cuda.jit has no option {', '.join(sorted(unknown))}")

    def decorate(fn):
        return fn if options.get("device") else Kernel(fn)

    is_function = callable(func_or_sig) and hasattr(func_or_sig, "__code__")
    return decorate(func_or_sig) if is_function else decorate
