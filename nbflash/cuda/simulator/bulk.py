"""Bulk copies in the simulator: bytes to shared memory; float32 added, and boxes, to global memory.

A copy to shared memory poisons its destination and fills it later, like a tensor copy. What goes
to global memory is read when the copy is issued and again when it completes: a source that has
changed in between was released too early, which is reported.

`atom_inc` is here for its address, which is that of a copy; it orders blocks (`race.hand_over`).
"""

from typing import NamedTuple

import numpy as np

from nbflash.cuda.simulator import race
from nbflash.cuda.simulator.engine import current
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.memory import DeviceArray
from nbflash.cuda.simulator.race import ATOMIC, READ
from nbflash.cuda.simulator.storage import POISON
from nbflash.cuda.simulator.window import CHUNK, copied, engine_access, later, place


class GlobalPlace(NamedTuple):
    """An address in global memory."""

    array: DeviceArray
    index: int

    def take(self, nbytes, what):
        """The elements of ``nbytes`` from here on."""
        start = self.array.data.__array_interface__["data"][0]
        size = self.array.data.itemsize
        if nbytes % CHUNK or nbytes <= 0 or (start + self.index * size) % CHUNK:
            raise SimError(f"{what}: {nbytes} bytes at element {self.index}, not multiples of 16")
        count = nbytes // size
        view = self.array.data[self.index : self.index + count]
        if self.index < 0 or len(view) < count:
            raise SimError(f"{what}: elements {self.index} to {self.index + count} are outside")
        return view


def global_address(memory, at):
    """Address of element ``at`` of a global array."""
    return GlobalPlace(memory, int(at))


def atom_inc(place, limit):
    """Count at an address, from ``limit`` on again from 0; returns what was there before."""
    thread, (array, index) = current(), place
    old = array.update(index, lambda old: 0 if old >= limit else old + 1)
    if thread.block.options.race:
        race.hand_over(array.home.shadow, array.offset + index * array.itemsize, thread)
    return old


def _shared(address, nbytes, what):
    if address % CHUNK:
        raise SimError(f"{what}: shared address {int(address)} is not a multiple of 16")
    first = place(address, nbytes, what)
    raw, _ = current().block.shared.dynamic
    return raw[first : first + nbytes]


def bulk_load(to, source, nbytes, barrier):
    """Fill shared memory from global memory, its bytes told to an mbarrier (an object)."""
    thread, nbytes, past = current(), int(nbytes), None
    block = thread.block
    view = source.take(nbytes, "bulk copy")
    data, values = _shared(to, nbytes, "bulk copy"), view.tobytes()
    if block.options.race:
        source.array.home.shadow.note_view(view, source.array.home.base, READ)
        past = copied(barrier, np.arange(int(to), int(to) + nbytes, CHUNK))
    data[:] = POISON

    def complete():
        data[:] = np.frombuffer(values, np.uint8)
        barrier.land(nbytes, past)

    later(block, complete)


class _Sender:
    """The copies of one thread to global memory: what was issued, committed and is done."""

    def __init__(self, thread):
        self.issued, self.committed, self.done, self.waits = [], 0, 0, False
        self.past = race.Past()
        self.engine = None
        if thread.block.options.race:
            self.engine = race.make_engine(thread.block, f"the bulk copies of thread {thread.tid}")


def _sender():
    thread = current()
    key, state = ("bulk", thread.tid), thread.block.state
    if key not in state:
        state[key] = _Sender(thread)
    return thread, state[key]


def bulk_add(target, source, nbytes):
    """Add float32 of shared memory to global memory, atomically element by element."""
    view = target.take(int(nbytes), "bulk addition")
    if current().block.options.race:
        target.array.home.shadow.note_view(view, target.array.home.base, ATOMIC)

    def add(data):
        with np.errstate(all="ignore"):
            np.add(view, data.view(np.float32), out=view)

    send(source, int(nbytes), "bulk addition", add)


def send(source, nbytes, what, action):
    """``action(bytes)`` on shared memory at the end of this thread's group of bulk copies."""
    thread, sender = _sender()
    data = _shared(source, nbytes, what)
    if thread.block.options.race:
        addresses = np.arange(int(source), int(source) + nbytes, CHUNK)
        engine_access(addresses, READ, sender.engine, sender.committed + 1)
    sender.issued.append((what, action, data, data.copy()))


def bulk_commit():
    """``cp.async.bulk.commit_group``."""
    thread, sender = _sender()
    sender.committed += 1
    work, sender.issued = sender.issued, []
    past = None
    if sender.engine is not None:
        past = race.release(thread)
        past[sender.engine] = sender.committed

    def complete():
        for what, action, data, before in work:
            if not np.array_equal(data, before):
                raise SimError(f"{what}: its source changed between its issue and its end")
            action(before)
        sender.done += 1
        sender.past.join(past)
        if sender.waits and sender.done == sender.committed:
            thread.block.wake(thread)

    later(thread.block, complete)


def _wait():
    thread, sender = _sender()
    if sender.done < sender.committed:
        sender.waits = True
        thread.block.park(thread, "bulk copies to global memory")
        sender.waits = False
    if sender.engine is not None:
        sender.past.acquire(thread)


def bulk_wait_read():
    """``cp.async.bulk.wait_group.read 0``."""
    _wait()


def bulk_wait():
    """``cp.async.bulk.wait_group 0``."""
    _wait()
