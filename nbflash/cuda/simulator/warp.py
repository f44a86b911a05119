"""Warp primitives, and the means to give any warp-wide instruction a Python body."""

import numpy as np

from nbflash.cuda.simulator.engine import WARP, current
from nbflash.cuda.simulator.errors import SimError

FULL = 0xFFFFFFFF


def warp_collective(op, args, mask=None, group=WARP, *, ordered=False):
    """Meet the other threads of a group at the same call and combine their values.

    Parameters
    ----------
    op : callable
        ``op(values, mask) -> results``, both dicts from lane to value. Called once, when
        every thread of ``mask`` that has not left the kernel is here.
    args
        This thread's value.
    mask : int, optional
        One bit per lane of the group; all by default.
    group : int
        Threads in a group: 32, or 128 for a warpgroup.
    ordered : bool
        Whether the instruction orders memory (``syncwarp`` does, ``shfl`` does not).

    Returns
    -------
    This lane's entry of ``results``.
    """
    thread = current()
    mask = (1 << group) - 1 if mask is None else int(mask) & ((1 << group) - 1)
    return thread.block.collective(thread, op, args, mask, group, ordered)


def over_lanes(fn, group=WARP):
    """A collective from a function of whole operands.

    ``fn(*columns)`` sees each operand as an array over the ``group`` lanes and returns an
    array, or a tuple of arrays, over the lanes; the collective takes and returns scalars.
    Every lane must take part.
    """

    def op(values, mask):
        if len(values) < group:
            missing = sorted(set(range(group)) - set(values))
            raise SimError(f"{fn.__name__} needs all {group} lanes, missing {missing}")
        columns = [np.array(column) for column in zip(*map(values.get, range(group)), strict=True)]
        results = fn(*columns)
        if isinstance(results, tuple):
            return dict(enumerate(zip(*results, strict=True)))
        return dict(enumerate(results))

    def call(*args):
        return warp_collective(op, args, None, group)

    op.__name__ = call.__name__ = fn.__name__
    return call


def _syncwarp(values, mask):
    return dict.fromkeys(values)


def _ballot(values, mask):
    bits = np.uint32(sum(1 << lane for lane, flag in values.items() if flag))
    return dict.fromkeys(values, bits)


def _any(values, mask):
    return dict.fromkeys(values, any(values.values()))


def _all(values, mask):
    return dict.fromkeys(values, all(values.values()))


def _match_any(values, mask):
    return {
        lane: np.uint32(sum(1 << other for other in values if values[other] == value))
        for lane, value in values.items()
    }


def _match_all(values, mask):
    same = len(set(values.values())) == 1
    return dict.fromkeys(values, (np.uint32(mask if same else 0), same))


def _shuffle(values, mask):
    """Lanes ask for a source; one that is not there gives back the lane's own value."""
    return {
        lane: values[source][0] if source in values else own
        for lane, (own, source) in values.items()
    }


def syncwarp(mask=FULL):
    """Wait for the lanes of ``mask``; orders their memory accesses."""
    warp_collective(_syncwarp, None, mask, ordered=True)


def ballot_sync(mask, predicate):
    """Bit mask of the lanes whose predicate holds."""
    return warp_collective(_ballot, bool(predicate), mask)


def any_sync(mask, predicate):
    """Whether the predicate holds in any lane."""
    return warp_collective(_any, bool(predicate), mask)


def all_sync(mask, predicate):
    """Whether the predicate holds in every lane."""
    return warp_collective(_all, bool(predicate), mask)


def match_any_sync(mask, value):
    """Bit mask of the lanes with the same value."""
    return warp_collective(_match_any, value, mask)


def match_all_sync(mask, value):
    """``(mask, True)`` if all lanes have the same value, else ``(0, False)``."""
    return warp_collective(_match_all, value, mask)


def _shuffled(mask, value, source):
    """The value of lane ``source(lane)``."""
    thread = current()
    brought = value, source(thread.tid % WARP)
    return thread.block.collective(thread, _shuffle, brought, int(mask) & FULL, WARP, False)


def shfl_sync(mask, value, lane):
    """The value of lane ``lane % 32``."""
    return _shuffled(mask, value, lambda own: int(lane) % WARP)


def shfl_xor_sync(mask, value, lane_mask):
    """The value of lane ``lane ^ lane_mask``."""
    return _shuffled(mask, value, lambda own: own ^ int(lane_mask))


def shfl_up_sync(mask, value, delta):
    """The value of lane ``lane - delta``."""
    return _shuffled(mask, value, lambda own: own - int(delta))


def shfl_down_sync(mask, value, delta):
    """The value of lane ``lane + delta``."""
    return _shuffled(mask, value, lambda own: own + int(delta))


def laneid():
    """This thread's lane in its warp."""
    return current().tid % WARP


def activemask():
    """The lanes of this warp that have not left the kernel."""
    thread = current()
    first = thread.tid // WARP * WARP
    live = thread.block.live
    return np.uint32(sum(1 << lane for lane in range(WARP) if first + lane in live))
