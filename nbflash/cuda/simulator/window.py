"""The shared window: addresses of dynamic shared memory, the swizzle, who else reads and writes it.

Addresses start at ``START``, so that a kernel that takes its shared memory as aligned to more
than 16 bytes fails. With the swizzle of 128 bytes what belongs at an address lies elsewhere in
its 128 bytes: bits 4 to 6 ^= bits 7 to 9.
"""

from nbflash.cuda.simulator import race
from nbflash.cuda.simulator.engine import current
from nbflash.cuda.simulator.errors import OutOfBounds
from nbflash.cuda.simulator.race import WRITE

START = 16
CHUNK = 16  # bytes that the swizzle moves together
ATOM = 1024  # bytes after which the swizzle repeats


def swizzled(address):
    """Where the swizzle of 128 bytes puts an address (also of an array of addresses)."""
    return address ^ (address >> 7 & 7) << 4


def place(address, nbytes, what):
    """Offset of ``nbytes`` at ``address`` from the start of the block's dynamic shared memory."""
    raw, _ = current().block.shared.dynamic
    offset = int(address) - START
    if not 0 <= offset <= raw.size - nbytes:
        raise OutOfBounds(
            f"{what}: {nbytes} bytes at {int(address)} are not in dynamic shared memory, "
            f"which is at {START} to {START + raw.size}"
        )
    return offset


def proxy_fences(block):
    """Of every thread that called ``fence.proxy.async``: its clock at each."""
    return block.state.setdefault("fence.proxy.async", {})


def engine_access(addresses, kind, engine, clock):
    """Record, with race detection on, what an asynchronous engine will read or write.

    One element of every chunk stands for the whole: ``addresses`` are those of chunks.
    """
    block = current().block
    _, home = block.shared.dynamic
    offsets = (addresses - START).ravel().tolist()
    home.shadow.note_engine(offsets, kind, engine, clock, proxy_fences(block))


def copied(barrier, addresses):
    """Record that copies told to an mbarrier will write ``addresses``; returns their clock."""
    thread = current()
    if barrier.engine is None:
        barrier.engine = race.make_engine(thread.block, f"the copies of {barrier.name}")
        barrier.copies = 0
    barrier.copies += 1
    engine_access(addresses, WRITE, barrier.engine, barrier.copies)
    past = race.release(thread)
    past[barrier.engine] = barrier.copies
    return past


def later(block, action):
    """Call ``action`` at a moment that the schedule chooses: soon, late, or as late as can be."""
    patience = block.random.choice((0, 0, 16, 1 << 30))

    def attempt():
        nonlocal patience
        if patience and block.ready:
            patience -= 1
            block.in_flight.append(attempt)
        else:
            action()

    block.in_flight.append(attempt)
