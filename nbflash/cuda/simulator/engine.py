"""The scheduler: every CUDA thread is a greenlet, and the seed decides who runs next.

A thread runs until it waits (barrier, warp collective, mbarrier) and then switches to another, or
to the block's loop where a thread has ended or asynchronous work is due. Nothing else preempts, so
a kernel's arithmetic runs at plain Python speed and a failing schedule can be replayed from its
seed.
"""

import contextvars
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
from greenlet import getcurrent, greenlet

from nbflash.cuda.simulator import race
from nbflash.cuda.simulator.errors import (
    BarrierDivergence,
    Deadlock,
    Endless,
    OutOfBounds,
    SimError,
)
from nbflash.cuda.simulator.sites import capture, chain_of, known, place, same, show
from nbflash.cuda.simulator.storage import SharedMemory

WARP = 32
MAX_THREADS = 1024

Dim3 = namedtuple("Dim3", "x y z")


class Meeting:
    """A warp collective on its way: what its lanes have brought, and the bits of those to come."""

    __slots__ = ("missing", "ordered", "site", "values", "what")

    def __init__(self, what, site, missing, ordered):
        self.what, self.site, self.missing, self.ordered = what, site, missing, ordered
        self.values = {}


@dataclass(frozen=True)
class Options:
    """How the simulator runs a launch.

    Attributes
    ----------
    seed : int
        Chooses the schedule: order of blocks, of threads, moments of completion.
    race : bool
        Record every access to shared and global memory and raise :class:`Race`.
    strict_barrier : bool
        All threads of a block must reach ``syncthreads`` at the same place in the source.
        Turn off for warp-specialised kernels.
    poison : bool
        Shared and local memory start as 0xff bytes: NaN, or -1 for integers.
    turns : int
        How often a thread may go on after a wait, on average over its block, before the
        kernel counts as :class:`Endless`.
    """

    seed: int = 0
    race: bool = False
    strict_barrier: bool = True
    poison: bool = True
    turns: int = 10_000


class Thread(greenlet):
    """One CUDA thread."""

    def __init__(self, run, block, tid, position):
        super().__init__(run, block.hub)
        self.block = block
        self.tid = tid
        self.threadIdx = position
        self.waiting = None
        self.result = None
        self.clock = 1
        self.seen = block.unseen


def current():
    """The running :class:`Thread`."""
    thread = getcurrent()
    if type(thread) is not Thread:
        raise SimError("device code was called outside a kernel launch")
    return thread


class Block:
    """One thread block while it runs.

    Attributes
    ----------
    shared : SharedMemory
    state : dict
        For modules on top of the engine (mbarriers live here).
    checks : dict of str to callable
        Called when all threads have ended.
    in_flight : list of callable
        Asynchronous work; each is called once at a moment that the schedule chooses.
    """

    def __init__(self, index, block_dim, grid_dim, dynamic_bytes, options):
        self.index = index
        self.blockIdx, self.blockDim, self.gridDim = Dim3(*index), block_dim, grid_dim
        self.options = options
        self.random = random.Random(f"{options.seed} {index}")
        self.shared = SharedMemory(dynamic_bytes, options)
        self.state, self.checks = {}, {}
        self.in_flight = []
        self.ready = []
        self.running = None
        self.turns_left = 0
        self.due = False  # whether a copy is to finish in the next step
        self.barriers = {}
        self.collectives = {}
        self.generation = 0
        self.hub = getcurrent()

    def run(self, fn, args):
        """Run ``fn(*args)`` in every thread of the block."""
        with np.errstate(all="ignore"):
            context = contextvars.copy_context()
        positions = [
            Dim3(x, y, z)
            for z in range(self.blockDim.z)
            for y in range(self.blockDim.y)
            for x in range(self.blockDim.x)
        ]
        self.unseen = race.Clock([0] * (len(positions) + race.ENGINES))
        self.threads = [
            Thread(lambda: fn(*args), self, tid, at) for tid, at in enumerate(positions)
        ]
        for thread in self.threads:
            thread.gr_context = context
        self.live = set(range(len(self.threads)))
        self._make_ready(self.threads)
        self.turns_left = self.options.turns * len(self.threads)
        while self.live:
            if not self.turns_left:
                raise Endless(self._whereabouts(f"no end after {self.options.turns} turns: "))
            self._step()
        for check in self.checks.values():
            check()
        self.threads.clear()

    def _step(self):
        self.turns_left -= 1
        if self.in_flight and (self.due or not self.ready or self.random.random() < 0.05):
            self.due = False
            self.in_flight.pop(self.random.randrange(len(self.in_flight)))()
            return
        if not self.ready:
            raise Deadlock(self._whereabouts())
        self.running = self.ready.pop()
        try:
            self.running.switch()
        except IndexError as error:
            raise OutOfBounds(_locate(error, self.running)) from error
        except SimError as error:
            raise type(error)(_locate(error, self.running)) from error
        except Exception as error:
            error.add_note(_locate(error, self.running))
            raise
        thread = self.running  # threads switch to each other: not the one from above
        if thread.dead:
            self.live.discard(thread.tid)
            self._retire(thread)

    def _switch(self):
        """Let another thread run, as the loop's next step would, until this thread's turn comes.

        The loop starts each thread: one that another started would inherit the depth of its calls.
        """
        ready = self.ready
        if not self.turns_left or not ready or not ready[-1]:  # a thread is true while it is active
            self.hub.switch()
            return
        if self.in_flight and self.random.random() < 0.05:
            self.due = True
            self.hub.switch()
            return
        self.turns_left -= 1
        last, self.running = self.running, ready.pop()
        if self.running is not last:
            self.running.switch()

    def _make_ready(self, threads):
        threads = list(threads)
        _in_random_order(threads, self.random.getrandbits)
        for thread in threads:
            thread.waiting = None
        self.ready += threads

    def wake(self, thread):
        """Let a parked thread go on at some later moment."""
        thread.waiting = None
        self.ready.insert(self.random.randrange(len(self.ready) + 1), thread)

    def park(self, thread, what, site=None):
        """Switch away until woken; ``what`` and ``site``, if it is known, are for the report."""
        thread.waiting = what, site
        self._switch()
        result, thread.result = thread.result, None
        return result

    def pause(self, thread):
        """A preemption point: what follows may run much later."""
        self.wake(thread)
        self._switch()

    def syncthreads(self, thread):
        """The barrier of the whole block."""
        if len(self.live) < len(self.threads):
            self._exited_without(thread, capture(2))
        self._arrive(0, thread, None, "syncthreads")

    def barrier(self, thread, number, count):
        """``bar.sync number, count``: wait until ``count`` threads have arrived."""
        self._arrive(number, thread, count, f"barrier {number} of {count} threads")

    def _arrive(self, number, thread, count, what):
        waiting = self.barriers.setdefault(number, [])
        site = known(waiting[0][1], 3) if waiting else capture(3)
        waiting.append((thread, site))
        self._try_barrier(number, count)
        self.park(thread, what, site)

    def _try_barrier(self, number, count):
        waiting = self.barriers[number]
        whole = count is None
        if len(waiting) < (len(self.live) if whole else count):
            return
        del self.barriers[number]
        if whole and self.options.strict_barrier:
            first = waiting[0][1]
            for _, site in waiting:
                if not same(site, first):
                    raise BarrierDivergence(
                        "threads of one block at different barriers: "
                        f"{show(first)} and {show(site)}"
                    )
        threads = [thread for thread, _ in waiting]
        if self.options.race:
            race.join(threads)
        self.generation += whole
        # the last arrival has yet to park itself: it is woken like the others
        self._make_ready(threads)

    def _exited_without(self, thread, site):
        if self.options.strict_barrier:
            gone = _ranges(set(range(len(self.threads))) - self.live)
            raise BarrierDivergence(
                f"thread {thread.tid} waits at {show(site)} but threads {gone} have left the kernel"
            )

    def collective(self, thread, op, value, mask, group, ordered):
        """Meet the other threads of ``mask``; see :func:`.warp.warp_collective`."""
        number, lane = divmod(thread.tid, group)
        bit = 1 << lane
        if not mask & bit:
            raise SimError(f"lane {lane} calls a collective whose mask {mask:#x} leaves it out")
        key = group, number, mask, op
        meetings = self.collectives.get(key)
        if meetings is None:
            meetings = self.collectives[key] = []
        site = known(meetings[0].site, 2) if meetings else capture(2)
        for meeting in meetings:
            if meeting.site is site or same(meeting.site, site):
                break
        else:
            what = f"{op.__name__.strip('_')} of lanes {mask:#x}"
            meeting = Meeting(what, site, mask & self._live_lanes(number, group), ordered)
            meetings.append(meeting)
        meeting.values[lane] = value
        meeting.missing &= ~bit
        if not meeting.missing:
            self._meet(key, meeting)
        return self.park(thread, meeting.what, site)

    def _live_lanes(self, number, group):
        """A bit for each thread of a group that has not left the kernel."""
        first = number * group
        lanes = range(min(group, len(self.threads) - first))
        if len(self.live) == len(self.threads):
            return (1 << len(lanes)) - 1
        return sum(1 << lane for lane in lanes if first + lane in self.live)

    def _meet(self, key, meeting):
        group, number, mask, op = key
        first, values = number * group, meeting.values
        self.collectives[key].remove(meeting)
        results = op(values, mask)
        threads = []
        for lane in values:
            thread = self.threads[first + lane]
            thread.result = results[lane]
            threads.append(thread)
        if meeting.ordered and self.options.race:
            race.join(threads)
        self._make_ready(threads)

    def _retire(self, thread):
        """A thread has left the kernel: those that wait for everyone may go on."""
        for key, meetings in self.collectives.items():
            if not meetings:
                continue
            number, lane = divmod(thread.tid, key[0])
            if key[1] == number:
                for meeting in list(meetings):
                    meeting.missing &= ~(1 << lane)
                    if not meeting.missing:
                        self._meet(key, meeting)
        waiting = self.barriers.get(0)
        if waiting:
            self._exited_without(*waiting[0])
            self._try_barrier(0, None)

    def _whereabouts(self, finding=""):
        groups = {}
        for thread in (self.threads[tid] for tid in sorted(self.live)):
            what, site = thread.waiting or ("", None)
            site = site or chain_of(thread.gr_frame)
            groups.setdefault((what, place(site)), (site, set()))[1].add(thread.tid)
        lines = [
            f"threads {_ranges(tids)} {'wait for ' + what if what else 'go on'} at {show(site)}"
            for (what, _), (site, tids) in groups.items()
        ]
        return f"block {self.index}: {finding}" + "; ".join(lines)


def _in_random_order(threads, getrandbits):
    """`random.shuffle` with the same numbers, in a third of the time: no call for each of them."""
    for i in range(len(threads) - 1, 0, -1):
        bits = (i + 1).bit_length()
        j = getrandbits(bits)
        while j > i:
            j = getrandbits(bits)
        threads[i], threads[j] = threads[j], threads[i]


def _ranges(tids):
    """``{0, 1, 2, 5}`` as ``0-2, 5``."""
    runs = []
    for tid in sorted(tids):
        if runs and runs[-1][1] == tid - 1:
            runs[-1][1] = tid
        else:
            runs.append([tid, tid])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def _locate(error, thread):
    return f"thread {tuple(thread.threadIdx)} of block {thread.block.index}: {error}"
