"""What the process remembers between calls: plans and decoders, bounded by the bytes they hold."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import types
from collections import Counter
from typing import NamedTuple

import numpy as np

from nbflash.inputs.tensors import CudaTensor

#: Entries of a cache; a plan has two.
LIMIT = 256
#: Bytes that the cache of plans may hold, of host memory and of CUDA memory.
BYTES = 256 * 2**20

_OURS = "nbflash", "masks"
_clearable = []

# Of all caches: no thread holds it when a process is forked.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


class CacheInfo(NamedTuple):
    """What `cache_info` returns.

    Attributes
    ----------
    plans : int
        Plans and decoders that are kept.
    host_bytes, device_bytes : int
        Bytes of their arrays in host and in CUDA memory: schedules, work lists, tiles of their
        masks, arrays of their scores. What several plans share counts once.
    host_limit, device_limit : int
    """

    plans: int
    host_bytes: int
    device_bytes: int
    host_limit: int
    device_limit: int


class _Item:
    """What a cache holds, and when it was last asked for and last measured."""

    __slots__ = ("buffers", "measured", "used", "value")

    def __init__(self, value, used):
        self.value, self.used, self.measured, self.buffers = value, used, -1, {}


class Cache:
    """Bounded, thread-safe mapping that forgets what was used longest ago.

    To get an item takes no lock and hashes its key once; what to forget is searched for when a new
    one comes.

    Parameters
    ----------
    limit : int
        Items that it holds.
    clearable : bool
        Whether `clear_cache` empties it.
    """

    def __init__(self, limit: int = LIMIT, *, clearable=False):
        self._limit = limit
        self._items, self._clock = {}, itertools.count()
        if clearable:
            _clearable.append(self)

    def get(self, key):
        """None for what is not there, also for a key that cannot be hashed."""
        try:
            item = self._items.get(key)
        except TypeError:
            return None
        if item is None:
            return None
        item.used = next(self._clock)
        return item.value

    def put(self, key, value):
        with _lock:
            self._forget(key)
            self._items[key] = _Item(value, next(self._clock))
            self._shrink()

    def clear(self):
        with _lock:
            for key in list(self._items):
                self._forget(key)

    def __len__(self):
        return len(self._items)

    def _shrink(self):
        while self._is_full() and len(self._items) > 1:
            oldest, _ = min(self._items.items(), key=lambda pair: pair[1].used)
            self._forget(oldest)

    def _is_full(self):
        return len(self._items) > self._limit

    def _forget(self, key):
        return self._items.pop(key, None)


class PlanCache(Cache):
    """A `Cache` that is also bounded by the bytes of host and CUDA memory that its items hold.

    One item is always kept. An item grows while it is used, by the tables of a backward pass, say:
    when a new item comes, those that were asked for since the last one are measured again.
    """

    def __init__(self, limit: int = LIMIT):
        super().__init__(limit)
        self.limits = {"host": BYTES, "device": BYTES}
        self.bytes = {"host": 0, "device": 0}
        self._holders = Counter()

    def limit_to(self, limits):
        """Set limits, and forget what is beyond them."""
        with _lock:
            self.limits.update(limits)
            self._shrink()

    def info(self):
        """The `CacheInfo`."""
        with _lock:
            self._measure()
            plans = len({id(item.value) for item in self._items.values()})
            return CacheInfo(plans, *self.bytes.values(), *self.limits.values())

    def _shrink(self):
        self._measure()
        super()._shrink()

    def _is_full(self):
        return super()._is_full() or any(self.bytes[x] > self.limits[x] for x in self.bytes)

    def _measure(self):
        for key, item in self._items.items():
            if item.measured < item.used:
                # A new one once more: by the next time it has run.
                item.measured = item.used if item.buffers else item.measured
                self._release(item)
                item.buffers = buffers_of((key, item.value))
                self._hold(item)

    def _hold(self, item):
        for buffer, (where, nbytes) in item.buffers.items():
            self.bytes[where] += nbytes if not self._holders[buffer] else 0
            self._holders[buffer] += 1

    def _release(self, item):
        for buffer, (where, nbytes) in item.buffers.items():
            self._holders[buffer] -= 1
            if not self._holders[buffer]:
                del self._holders[buffer]
                self.bytes[where] -= nbytes

    def _forget(self, key):
        item = super()._forget(key)
        if item is not None:
            self._release(item)


def buffers_of(root) -> dict:
    """The memory of the arrays that an object of ours holds: {address: ("host" | "device", bytes)}.

    Followed are containers, what functions close over, and attributes of this package's objects.
    Arrays of other libraries are not asked for anything.
    """
    of_cupy = getattr(sys.modules.get("cupy"), "ndarray", ())
    found, seen, pending = {}, set(), [root]
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            owner = x
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            found["host", owner.ctypes.data] = "host", owner.nbytes
        elif isinstance(x, of_cupy):
            memory = getattr(x.data, "mem", None)
            size = x.nbytes if memory is None else memory.size
            found["device", x.data.ptr if memory is None else memory.ptr] = "device", size
        elif isinstance(x, CudaTensor):
            memory = x.tensor.untyped_storage()
            found["device", memory.data_ptr()] = "device", memory.nbytes()
        else:
            pending += _held_by(x)
    return found


def _held_by(x):
    """What an object refers to, as far as it is ours."""
    if isinstance(x, str | bytes | int | float | type | types.ModuleType) or x is None:
        return ()
    if isinstance(x, dict):
        return *list(x), *list(x.values())
    if isinstance(x, tuple | list | set | frozenset):
        return tuple(x)
    if isinstance(x, types.FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
        return *cells, *x.__dict__.values()
    if isinstance(x, types.MethodType):
        return (x.__self__,)
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if type(x).__module__.partition(".")[0] not in _OURS:
        return ()
    slots = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
    values = [getattr(x, name) for name in slots if name[:2] != "__" and hasattr(x, name)]
    return *values, *list(getattr(x, "__dict__", {}).values())


#: Plans by call and by (spec, impl), since different calls may state the same problem; decoders by
#: call.
plans = PlanCache()


def clear_cache() -> None:
    """Forget all plans, and with them schedules, work lists and copies on devices.

    Plans that a caller holds go on working. CUDA memory returns to CuPy's memory pool, which
    ``cupy.get_default_memory_pool().free_all_blocks()`` empties. Compiled code stays in memory and
    on disk.
    """
    plans.clear()
    for cache in _clearable:
        cache.clear()


def cache_info() -> CacheInfo:
    """Plans that are kept, the bytes that they hold, and the limits of these.

    Returns
    -------
    CacheInfo
        Named tuple (plans, host_bytes, device_bytes, host_limit, device_limit).
    """
    return plans.info()


def set_cache_limit(*, host: int | None = None, device: int | None = None) -> None:
    """Bound the bytes that cached plans hold; those used longest ago are dropped.

    Parameters
    ----------
    host, device : int, optional
        Bytes of host memory, and of the memory of all CUDA devices; default 256 MiB each. None
        leaves a limit as it is. The plan that was made last is kept whatever its size.

    Raises
    ------
    TypeError, ValueError
        If a limit is no integer, or negative.
    """
    limits = {"host": host, "device": device}
    limits = {name: x for name, x in limits.items() if x is not None}
    for name, x in limits.items():
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            raise TypeError(f"{name} must be an integer, a number of bytes, got {x!r}")
        if x < 0:
            raise ValueError(f"{name} must be at least 0 bytes, got {x}")
    plans.limit_to({name: int(x) for name, x in limits.items()})
