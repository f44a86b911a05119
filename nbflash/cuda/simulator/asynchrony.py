"""mbarriers and asynchronous copies, with a GPU's timing: everything late, in any order.

The destination of a copy is poisoned when the copy is *issued* and filled when it
*completes*, at a moment that the schedule chooses. A consumer that does not wait, or a
producer that reuses a stage too early, therefore reads NaN. Waits are real waits, so a
wrong count or parity ends in a deadlock report that names line and barrier.
"""

import numpy as np

from nbflash.cuda.simulator import race
from nbflash.cuda.simulator.engine import current
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.memory import wrap
from nbflash.cuda.simulator.race import ATOMIC, WRITE
from nbflash.cuda.simulator.sites import capture, show
from nbflash.cuda.simulator.storage import POISON
from nbflash.cuda.simulator.window import CHUNK, later, place


class Mbarrier:
    """The state of one mbarrier (PTX ISA, section on mbarrier): a phase completes when all
    arrivals are in and all announced bytes have landed."""

    def __init__(self, name, home, offset, count):
        self.name, self.home, self.offset, self.count = name, home, offset, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.waiters = []
        self.arriving, self.completed = race.Past(), race.Past()
        self.fenced, self.engine = False, None  # of TMA: see hopper.py

    def step(self):
        """Complete the phase if nothing is outstanding, and wake those who waited for it."""
        if self.pending < 0:
            raise SimError(f"{self.name}: more arrivals than its count {self.count}")
        if self.pending or self.bytes:
            return
        self.phase ^= 1
        self.pending = self.count
        self.completed = race.Past(self.arriving.clock)
        woken = [w for w in self.waiters if w[1] != self.phase]
        self.waiters = [w for w in self.waiters if w[1] == self.phase]
        for thread, _ in woken:
            thread.block.wake(thread)

    def arrive(self, nbytes=0):
        """One arrival, and ``nbytes`` that copies will bring. What follows may run much later."""
        thread = current()
        self._note(ATOMIC)
        if thread.block.options.race:
            self.arriving.add(thread)
        self.bytes += int(nbytes)
        self.pending -= 1
        self.step()
        thread.block.pause(thread)

    def wait(self, parity):
        """Wait until the phase of ``parity`` has completed."""
        thread, parity = current(), int(parity)
        self._note(ATOMIC)
        if self.phase == parity:
            self.waiters.append((thread, parity))
            thread.block.park(thread, f"{self.name}, parity {parity}")
        if thread.block.options.race:
            self.completed.acquire(thread)

    def land(self, nbytes, past):
        """``nbytes`` have arrived; ``past`` is the clock of the copy (None: not recorded)."""
        if past is not None:
            self.arriving.join(past)
        self.bytes -= nbytes
        self.step()

    def _note(self, kind):
        """An mbarrier is eight bytes of shared memory; its operations are atomic."""
        if self.home.shadow is not None:
            self.home.shadow.note(self.offset, 8, 8, kind)


def make_mbarrier(home, offset, name, count):
    """``mbarrier.init`` of the eight bytes at ``offset`` of an allocation."""
    key, barriers = ("mbarrier", home, offset), current().block.state
    if key in barriers:
        raise SimError(f"{name} exists already, {barriers[key].name}")
    made = barriers[key] = Mbarrier(
        f"{name} (made at {show(capture(2))})", home, offset, int(count)
    )
    made._note(WRITE)
    return made


def find_mbarrier(home, offset, name):
    """The mbarrier at ``offset`` of an allocation."""
    found = current().block.state.get(("mbarrier", home, offset))
    if found is None:
        raise SimError(f"{name} is used before mbar_init")
    return found


def _offset(bar, i):
    return bar.data.__array_interface__["data"][0] + int(i) * bar.data.strides[0] - bar.home.base


def _mbarrier(bar, i):
    return find_mbarrier(bar.home, _offset(bar, i), f"mbarrier {int(i)}")


def mbar_init(bar, i, count):
    """``mbarrier.init``: element ``i`` of a shared int64 array expects ``count`` arrivals."""
    if not 0 <= i < len(bar):
        raise SimError(f"mbarrier {int(i)} of an array of {len(bar)}")
    make_mbarrier(bar.home, _offset(bar, i), f"mbarrier {int(i)}", count)


def mbar_arrive(bar, i):
    """``mbarrier.arrive``: one arrival. What follows may run much later."""
    _mbarrier(bar, i).arrive()


def mbar_arrive_expect_tx(bar, i, nbytes):
    """``mbarrier.arrive.expect_tx``: one arrival, and ``nbytes`` that copies will bring."""
    _mbarrier(bar, i).arrive(nbytes)


def mbar_wait(bar, i, parity):
    """Wait until the phase of ``parity`` has completed (``mbarrier.try_wait.parity`` loop)."""
    _mbarrier(bar, i).wait(parity)


def bulk_copy_g2s(destination, source, bar, i):
    """``cp.async.bulk.shared.global``: copy, and tell mbarrier ``i`` when the bytes are there.

    Parameters
    ----------
    destination, source : device arrays
        The same number of bytes in both; the source is read at the moment of issue.
    """
    thread, barrier, issued = current(), _mbarrier(bar, i), None
    data, values = destination.data, np.array(source)
    if data.nbytes != values.nbytes:
        raise SimError(f"bulk copy of {values.nbytes} bytes into {data.nbytes}")
    if destination.home.shadow is not None:
        destination.home.shadow.note_view(data, destination.home.base, WRITE)
        issued = race.release(thread)
    data[...] = np.full(data.nbytes, POISON, np.uint8).view(data.dtype).reshape(data.shape)

    def complete():
        data[...] = values.reshape(-1).view(data.dtype).reshape(data.shape)
        barrier.land(data.nbytes, issued)

    thread.block.in_flight.append(complete)


class _Copies:
    """What a thread has sent by ``cp.async``: groups that it has closed, and the open one."""

    def __init__(self):
        self.groups, self.open = [], []


def _copies(thread):
    return thread.block.state.setdefault(("cp.async", thread.tid), _Copies())


def _send(thread, data, values, home):
    """Poison the destination; the values come at a moment that the schedule chooses."""
    landed = []

    def complete():
        if not landed:
            data[...] = values
            landed.append(True)

    _copies(thread).open.append((complete, data, home))
    later(thread.block, complete)


def _landed(copies):
    """Their writes count as the thread's and as made now: an earlier barrier does not order
    them.
    """
    for complete, data, home in copies:
        complete()
        if home.shadow is not None:
            home.shadow.note_view(data, home.base, WRITE)


def cp_async(destination, to, source, at, count):
    """``cp.async.shared.global``: ``count`` elements, there for this thread after its wait.

    Parameters
    ----------
    destination, source : device arrays
        1-D, of elements of one size; ``to`` and ``at`` are the first elements, aligned to the copy.
    """
    if destination.dtype.itemsize != source.dtype.itemsize:
        raise SimError(f"cp.async of {source.dtype} into {destination.dtype}")
    values = np.array(source.load(at, count)).view(destination.dtype)
    destination.store(to, np.full(values.nbytes, POISON, np.uint8).view(values.dtype))
    _send(current(), destination.data[to : to + count], values, destination.home)


def cp_async16(to, source, at, inside):
    """``cp.async`` of 16 bytes to an address of shared memory; zeros unless ``inside``."""
    raw, home = current().block.shared.dynamic
    if to % CHUNK:
        raise SimError(f"cp.async: address {int(to)} is not a multiple of {CHUNK}")
    first, count = place(to, CHUNK, "cp.async"), CHUNK // source.itemsize
    data = wrap(raw[first : first + CHUNK].view(np.uint16), home)
    values = np.array(source.load(at, count)).view(np.uint16) if inside else np.uint16(0)
    data[0 : len(data)] = np.uint16(0x101 * POISON)
    _send(current(), data.data, values, home)


def cp_async_commit():
    """``cp.async.commit_group``: what this thread has sent since the last one is a group."""
    copies = _copies(current())
    copies.groups.append(copies.open)
    copies.open = []


def cp_async_wait(pending):
    """``cp.async.wait_group``: this thread's groups have landed, but the last ``pending``."""
    copies = _copies(current())
    done = max(0, len(copies.groups) - pending)
    for group in copies.groups[:done]:
        _landed(group)
    copies.groups = copies.groups[done:]


def cp_async_wait_all():
    """``cp.async.wait_all``: every copy that this thread issued has landed."""
    copies = _copies(current())
    for group in (*copies.groups, copies.open):
        _landed(group)
    copies.groups, copies.open = [], []
