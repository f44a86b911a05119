"""Kernels that run in the simulator with their arguments by name.

The order of the arguments is that of the kernel's parameters, and is written there.
"""

import inspect

import numpy as np

from nbflash.cuda import launch
from nbflash.cuda.simulator.hopper import SimTensorMap

SCHEDULE = "work", "plane_of", "row_ptr", "col_idx", "kind", "lo", "hi", "bits"


def simulate(spec, blocks, **arguments):
    """Run a kernel; every parameter of it has an argument."""
    names = list(inspect.signature(spec.make(spec.config)).parameters)
    assert arguments.keys() == set(names), sorted(arguments.keys() ^ set(names))
    launch.simulate(spec, blocks, tuple(arguments[name] for name in names))


def tensor_maps(**boxes):
    """Tensor maps by name, of pairs: an array, and how many of its rows a box has."""
    return {name: SimTensorMap(x.view(np.uint16), rows) for name, (x, rows) in boxes.items()}


def in_memory(x):
    """All of an array's elements in the order of memory."""
    order = np.argsort([-s for s in x.strides], kind="stable")
    return x.transpose(order).reshape(-1)


def words(x):
    """The same in words of 32 bits."""
    return in_memory(x).view(np.uint32)


def strides(x):
    """Of the first three axes, in elements."""
    return tuple(s // x.itemsize for s in x.strides[:3])
