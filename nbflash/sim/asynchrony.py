"""mbarriers and asynchronous copies, with a GPU's timing: everything late, in any order.

The destination of a copy is poisoned when the copy is *issued* and filled when it
*completes*, at a moment that the schedule chooses. A consumer that does not wait, or a
producer that reuses a stage too early, therefore reads NaN. Waits are real waits, so a
wrong count or parity ends in a deadlock report that names line and barrier.
"""

import numpy as np

from nbflash.sim import race
from nbflash.sim.engine import current
from nbflash.sim.errors import SimError
from nbflash.sim.race import WRITE
from nbflash.sim.sites import capture, show
from nbflash.sim.storage import POISON


class Mbarrier:
    """The state of one mbarrier (PTX ISA, section on mbarrier): a phase completes when all
    arrivals are in and all announced bytes have landed."""

    def __init__(self, name, count):
        self.name, self.count = name, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.waiters = []
        self.arriving = self.completed = None

    def step(self):
        """Complete the phase if nothing is outstanding, and wake those who waited for it."""
        if self.pending < 0:
            raise SimError(f"{self.name}: more arrivals than its count {self.count}")
        if self.pending or self.bytes:
            return
        self.phase ^= 1
        self.pending = self.count
        self.completed = self.arriving
        woken = [w for w in self.waiters if w[1] != self.phase]
        self.waiters = [w for w in self.waiters if w[1] == self.phase]
        for thread, _ in woken:
            thread.block.wake(thread)


def _key(bar, i):
    data = bar.data
    address = data.__array_interface__["data"][0] + int(i) * data.strides[0]
    return "mbarrier", bar.home, address - bar.home.base


def _mbarrier(thread, bar, i):
    found = thread.block.state.get(_key(bar, i))
    if found is None:
        raise SimError(f"mbarrier {int(i)} is used before mbar_init")
    return found


def mbar_init(bar, i, count):
    """``mbarrier.init``: element ``i`` of a shared int64 array expects ``count`` arrivals."""
    if not 0 <= i < len(bar):
        raise SimError(f"mbarrier {int(i)} of an array of {len(bar)}")
    name = f"mbarrier {int(i)} (made at {show(capture())})"
    current().block.state[_key(bar, i)] = Mbarrier(name, int(count))


def _arrive(bar, i, nbytes):
    thread = current()
    barrier = _mbarrier(thread, bar, i)
    if thread.block.options.race:
        barrier.arriving = race.merge(barrier.arriving, race.release(thread))
    barrier.bytes += int(nbytes)
    barrier.pending -= 1
    barrier.step()
    thread.block.pause(thread)


def mbar_arrive(bar, i):
    """``mbarrier.arrive``: one arrival. What follows may run much later."""
    _arrive(bar, i, 0)


def mbar_arrive_expect_tx(bar, i, nbytes):
    """``mbarrier.arrive.expect_tx``: one arrival, and ``nbytes`` that copies will bring."""
    _arrive(bar, i, nbytes)


def mbar_wait(bar, i, parity):
    """Wait until the phase of ``parity`` has completed (``mbarrier.try_wait.parity`` loop)."""
    thread = current()
    barrier = _mbarrier(thread, bar, i)
    if barrier.phase == int(parity):
        barrier.waiters.append((thread, int(parity)))
        thread.block.park(thread, f"{barrier.name}, parity {int(parity)}")
    if thread.block.options.race and barrier.completed is not None:
        race.acquire(thread, barrier.completed)


def bulk_copy_g2s(destination, source, bar, i):
    """``cp.async.bulk.shared.global``: copy, and tell mbarrier ``i`` when the bytes are there.

    Parameters
    ----------
    destination, source : device arrays
        The same number of bytes in both; the source is read at the moment of issue.
    """
    thread = current()
    barrier = _mbarrier(thread, bar, i)
    data, values = destination.data, np.array(source)
    if data.nbytes != values.nbytes:
        raise SimError(f"bulk copy of {values.nbytes} bytes into {data.nbytes}")
    if destination.home.shadow is not None:
        destination.home.shadow.note_view(data, destination.home.base, WRITE)
        issued = race.release(thread)
    data[...] = np.full(data.nbytes, POISON, np.uint8).view(data.dtype).reshape(data.shape)

    def complete():
        data[...] = values.reshape(-1).view(data.dtype).reshape(data.shape)
        if destination.home.shadow is not None:
            barrier.arriving = race.merge(barrier.arriving, issued)
        barrier.bytes -= data.nbytes
        barrier.step()

    thread.block.in_flight.append(complete)


def _issued(thread):
    return thread.block.state.setdefault(("cp.async", thread.tid), [])


def cp_async(destination, to, source, at, count):
    """``cp.async.shared.global``: ``count`` elements, there for this thread after its wait.

    Parameters
    ----------
    destination, source : device arrays
        1-D and of one dtype; ``to`` and ``at`` are the first elements, aligned to the copy.
    """
    thread = current()
    if destination.dtype != source.dtype:
        raise SimError(f"cp.async of {source.dtype} into {destination.dtype}")
    values = np.array(source.load(at, count))
    destination.store(to, np.full(values.nbytes, POISON, np.uint8).view(values.dtype))
    data, landed = destination.data[to : to + count], []

    def complete():
        if not landed:
            data[...] = values
            landed.append(True)

    _issued(thread).append((complete, data, destination.home))
    thread.block.in_flight.append(complete)


def cp_async_wait_all():
    """``cp.async.wait_all``: every copy that this thread issued has landed.

    Its writes count as this thread's and as made now: an earlier barrier does not order them.
    """
    issued = _issued(current())
    for complete, data, home in issued:
        complete()
        if home.shadow is not None:
            home.shadow.note_view(data, home.base, WRITE)
    issued.clear()
