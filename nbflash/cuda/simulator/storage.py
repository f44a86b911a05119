"""Where the arrays of device code live: shared, local and global memory, poisoned at first."""

import numpy as np
from greenlet import getcurrent

from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.memory import Allocation, wrap
from nbflash.cuda.simulator.race import Shadow
from nbflash.cuda.simulator.sites import capture, place

STATIC_SHARED_LIMIT = 48 * 1024
DYNAMIC_SHARED_LIMIT = 227 * 1024
ALIGNMENT = 1024
WORD = 4  # bytes that are told apart at first: see `race.Shadow`
POISON = 0xFF


def _aligned_bytes(nbytes, alignment, fill):
    raw = np.full(nbytes + alignment, fill, np.uint8)
    start = -raw.__array_interface__["data"][0] % alignment
    return raw[start : start + nbytes]


class SharedMemory:
    """The shared memory of one block: static arrays by place in the source, one dynamic buffer."""

    def __init__(self, dynamic_bytes, options):
        if dynamic_bytes > DYNAMIC_SHARED_LIMIT:
            raise SimError(
                f"{dynamic_bytes} bytes of dynamic shared memory, "
                f"the limit is {DYNAMIC_SHARED_LIMIT}"
            )
        self.options = options
        self.dynamic = self._allocate(dynamic_bytes, WORD)
        self.static = {}
        self.static_bytes = 0

    def _allocate(self, nbytes, granule):
        fill = POISON if self.options.poison else 0
        raw = _aligned_bytes(nbytes, ALIGNMENT, fill)
        shadow = Shadow(granule, across_blocks=False) if self.options.race else None
        return raw, Allocation(raw.__array_interface__["data"][0], shadow)

    def dynamic_array(self, dtype):
        raw, home = self.dynamic
        return wrap(raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype), home)

    def static_array(self, shape, dtype):
        """The array of this call chain: the same for every thread and every loop trip."""
        site = place(capture())
        array = self.static.get(site)
        if array is None:
            nbytes = int(np.prod(shape)) * dtype.itemsize
            self.static_bytes += nbytes
            if self.static_bytes > STATIC_SHARED_LIMIT:
                raise SimError(
                    f"{self.static_bytes} bytes of static shared memory, "
                    f"the limit is {STATIC_SHARED_LIMIT}"
                )
            raw, home = self._allocate(nbytes, dtype.itemsize)
            array = self.static[site] = wrap(raw.view(dtype).reshape(shape), home)
        return array


_LOCAL = Allocation(0, None)
_prototypes = {}


def local_array(shape, dtype):
    """A fresh array that only the running thread sees."""
    poison = getcurrent().block.options.poison
    prototype = _prototypes.get((shape, dtype, poison))
    if prototype is None:
        prototype = np.empty(shape, dtype)
        prototype.view(np.uint8).fill(POISON if poison else 0)
        _prototypes[shape, dtype, poison] = prototype
    return wrap(prototype.copy(), _LOCAL)


def global_memory(options):
    """The allocation that all array arguments of one launch belong to."""
    return Allocation(0, Shadow(4, across_blocks=True) if options.race else None)
