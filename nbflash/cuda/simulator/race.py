"""Happens-before race detection with vector clocks, on shared and on global memory.

A thread has a ``clock`` (its own time) and ``seen`` (for every thread of the block, the
latest time that is ordered before now). Synchronisation joins the clocks; an access by
thread ``t`` at time ``c`` happens before thread ``u``'s present if ``u.seen[t] >= c``. What
works asynchronously, TMA or wgmma, has a place in ``seen`` like a thread.

Flanagan and Freund, FastTrack, PLDI 2009, section 2. A barrier of the whole block makes
all earlier accesses unreachable at once, so ``block.generation`` counts those and a cell of
an older generation is simply forgotten.

Blocks of one launch are ordered by counts alone (:func:`hand_over`): in global memory an access
conflicts with every access of another block that a count has not put before it, unless both are
reads or both are atomic.
"""

import bisect
import functools

from greenlet import getcurrent

from nbflash.cuda.simulator.errors import Race, SimError
from nbflash.cuda.simulator.sites import capture, show

READ, WRITE, ATOMIC = "read", "write", "atomic"
ENGINES = 64  # in one block


class Engine(int):
    """Something that works beside the threads: its place in their clocks, and its name."""

    def __new__(cls, number, name):
        engine = super().__new__(cls, number)
        engine.name = name
        return engine


def make_engine(block, name):
    """Another engine of a block."""
    number = block.state.get("engines", 0)
    if number == ENGINES:
        raise SimError(f"more than {ENGINES} mbarriers and warpgroups in one block")
    block.state["engines"] = number + 1
    return Engine(len(block.threads) + number, name)


class Clock(list):
    """Of every thread and engine of a block the latest time that is ordered before now.

    ``after`` has the clocks of other blocks, by index, up to which they are.
    """

    __slots__ = ("after",)

    def __init__(self, times, after=None):
        super().__init__(times)
        self.after = {} if after is None else after


class Cell:
    """The accesses to a few bytes that a later access can conflict with.

    ``reads`` holds the last one of each thread of ``block`` in its present ``generation``,
    ``writes`` or ``atomics`` its last change: atomics, of which all threads may have one on an
    mbarrier, need not be looked at for another one. ``earlier`` holds, for each kind, accesses of
    two different blocks at most, by block and thread: enough to conflict with any third.
    """

    __slots__ = ("atomics", "block", "earlier", "generation", "reads", "writes")

    def __init__(self, block, generation):
        self.block, self.generation = block, generation
        self.reads, self.writes, self.atomics, self.earlier = {}, {}, None, None

    def copy(self):
        other = Cell(self.block, self.generation)
        other.reads, other.writes = dict(self.reads), dict(self.writes)
        other.atomics = self.atomics and dict(self.atomics)
        if self.earlier is not None:
            other.earlier = {
                kind: {block: dict(accesses) for block, accesses in blocks.items()}
                for kind, blocks in self.earlier.items()
            }
        return other

    def change(self, tid, kind, access):
        """Keep a thread's last change in the place of the one before it."""
        if kind is WRITE:
            self.writes[tid] = access
            if self.atomics:
                self.atomics.pop(tid, None)
            return
        if self.atomics is None:
            self.atomics = {}
        self.atomics[tid] = access
        self.writes.pop(tid, None)


class Shadow:
    """The cells of one memory: a shared allocation, or all global arrays of a launch."""

    def __init__(self, granule, *, across_blocks):
        self.granule = granule
        self.across_blocks = across_blocks
        self.cells, self.handed_over = {}, {}

    def note(self, offset, nbytes, itemsize, kind):
        """Record an access of the running thread; raise :class:`Race` on a conflict.

        Parameters
        ----------
        offset, nbytes : int
            The bytes touched, from the start of the memory.
        itemsize : int
            Size of one element in bytes. The cells are as large as the smallest seen, but
            for accesses to whole cells.
        kind : {READ, WRITE, ATOMIC}
        """
        if itemsize < self.granule and (offset | nbytes) % self.granule:
            self._refine(itemsize)
        thread = getcurrent()
        access = (thread.tid, thread.clock, kind, capture(3, 4), thread.block.index)
        first = offset // self.granule
        self._record(range(first, first + nbytes // self.granule), access, thread, thread.tid)

    def note_engine(self, offsets, kind, engine, clock, fences):
        """Record accesses that the running thread has ordered from an asynchronous engine.

        They come after what the thread has seen, and before what acquires ``clock`` of the engine.
        What ordinary stores wrote must have been fenced by the thread that wrote it, and the
        running thread must have seen that fence.

        Parameters
        ----------
        offsets : iterable of int
            Of one element each.
        kind : {READ, WRITE}
        engine : Engine
        clock : int
        fences : dict of int to list of int
            Threads and their clocks at every ``fence.proxy.async``.
        """
        thread = getcurrent()
        access = (engine, clock, kind, capture(2, 4), thread.block.index)
        addresses = [offset // self.granule for offset in offsets]
        for address in addresses:
            cell = self.cells.get(address)
            for other in (*cell.writes.values(), *(cell.atomics or {}).values()) if cell else ():
                if type(other[0]) is int and not _fenced(fences.get(other[0], ()), other, thread):
                    raise Race(
                        f"{_who(other)} at {show(other[3])} and {_who(access)} at "
                        f"{show(access[3])} with no fence_proxy_async between"
                    )
        self._record(addresses, access, thread, None)

    def _record(self, addresses, access, thread, own):
        """Accesses to the cells ``addresses``, in order after earlier ones of thread ``own``."""
        tid, kind, block = access[0], access[2], thread.block
        seen, index, generation = thread.seen, block.index, block.generation
        cells, across_blocks = self.cells, self.across_blocks
        for address in addresses:
            cell = cells.get(address)
            if cell is None:
                cell = cells[address] = Cell(index, generation)
            elif cell.generation != generation or cell.block is not index:
                cell.block, cell.generation = index, generation
                if cell.reads:
                    cell.reads = {}
                if cell.writes:
                    cell.writes = {}
                cell.atomics = None
            if cell.writes:
                for other in cell.writes.values():
                    if seen[other[0]] < other[1] and other[0] != own:
                        _report(other, access)
            if cell.atomics and kind is not ATOMIC:
                for other in cell.atomics.values():
                    if seen[other[0]] < other[1] and other[0] != own:
                        _report(other, access)
            if kind is READ:
                cell.reads[tid] = access
            else:
                if cell.reads:
                    for other in cell.reads.values():
                        if seen[other[0]] < other[1] and other[0] != own:
                            _report(other, access)
                cell.change(tid, kind, access)
            if across_blocks:
                _check_blocks(cell, access, seen)

    def note_view(self, view, base, kind):
        """Record an access to every element of a NumPy view into this memory."""
        if view.flags.c_contiguous:
            at = view.__array_interface__["data"][0] - base
            self.note(at, view.nbytes, view.itemsize, kind)
        else:
            for index in range(len(view)):
                self.note_view(
                    view[index : index + 1] if view.ndim == 1 else view[index], base, kind
                )

    def _refine(self, granule):
        parts, cells = self.granule // granule, self.cells.items()
        self.cells = {a * parts + i: cell.copy() for a, cell in cells for i in range(parts)}
        self.granule = granule


def _fenced(clocks, access, thread):
    """Whether a thread's fence came after its access, and is known to the running ``thread``."""
    first = bisect.bisect_left(clocks, access[1])
    known = thread.clock if access[0] == thread.tid else thread.seen[access[0]]
    return first < len(clocks) and clocks[first] <= known


def _check_blocks(cell, access, seen):
    """Conflicts with other blocks: ``earlier`` keeps up to two blocks' accesses a kind.

    They are the last ones of all threads; those of another block that a count has put before an
    access go: what comes before an access conflicts with nothing that it does not.
    """
    kind, block, earlier = access[2], access[4], cell.earlier
    if earlier is None:
        cell.earlier = {kind: {block: {access[0]: access}}}
        return
    for other_kind, blocks in earlier.items():
        if kind is other_kind and kind is not WRITE:
            continue
        for other_block, accesses in blocks.items():
            if other_block != block:
                for other in accesses.values():
                    if not _before(other, seen):
                        _report(other, access)
    kept = earlier.get(kind)
    if kept is None:
        kept = earlier[kind] = {}
    elif seen.after:
        for other_block in [x for x in kept if x != block]:
            accesses = kept[other_block]
            for tid in [tid for tid, other in accesses.items() if _before(other, seen)]:
                del accesses[tid]
            if not accesses:
                del kept[other_block]
    own = kept.get(block)
    if own is not None:
        own[access[0]] = access
    elif len(kept) < 2:
        kept[block] = {access[0]: access}


def _before(other, seen):
    """Whether an access of another block is before a thread's present, which ``seen`` tells."""
    clock = seen.after.get(other[4])
    return clock is not None and clock[other[0]] >= other[1]


def _report(a, b):
    where = "in different blocks" if a[4] != b[4] else "with no barrier between"
    raise Race(f"{_who(a)} at {show(a[3])} and {_who(b)} at {show(b[3])} {where}")


def _who(access):
    who = access[0].name if isinstance(access[0], Engine) else f"thread {access[0]}"
    return f"{access[2]} by {who} of block {access[4]}"


def join(threads):
    """Order everything that ``threads`` did before everything that they do next."""
    clocks = {id(t.seen): t.seen for t in threads}
    joined = functools.reduce(merge, clocks.values())
    seen = Clock(joined, joined.after)
    for t in threads:
        seen[t.tid] = t.clock
    for t in threads:
        t.seen = seen
        t.clock += 1


def hand_over(shadow, offset, thread):
    """A count of release and acquire at ``offset`` of global memory: what those that have counted
    there did before comes before what this thread does next.
    """
    after = _both(thread.seen.after, shadow.handed_over.get(offset, {}))
    thread.seen = Clock(thread.seen, after)
    shadow.handed_over[offset] = _both(after, {thread.block.index: release(thread)})


def release(thread):
    """The thread's past as a clock that another may :func:`acquire`; its time moves on."""
    past = Clock(thread.seen, thread.seen.after)
    past[thread.tid] = thread.clock
    thread.clock += 1
    return past


def merge(a, b):
    """The join of two clocks: one of them, where it has all of the other; None is the empty one."""
    if a is None or b is None or a is b:
        return a or b
    joined, after = [x if x > y else y for x, y in zip(a, b, strict=True)], _both(a.after, b.after)
    for clock in (b, a):
        if joined == clock and after == clock.after:
            return clock
    return Clock(joined, after)


class Past:
    """What threads and copies did, for others to :meth:`acquire`.

    Joining two clocks takes longer than most accesses, so that threads with one clock, as they are
    behind a barrier, are joined in one step, and acquire the result in one step too.
    """

    __slots__ = ("_acquired", "_clock", "_released")

    def __init__(self, clock=None):
        self._clock, self._released, self._acquired = clock, {}, {}

    def add(self, thread):
        """Release the past of a thread; its time moves on."""
        seen = thread.seen
        self._released.setdefault(id(seen), (seen, []))[1].append((thread.tid, thread.clock))
        thread.clock += 1

    def join(self, clock):
        """Release a clock; None is the empty one."""
        self._clock, self._acquired = merge(self.clock, clock), {}

    @property
    def clock(self):
        """All that was released; None if nothing was."""
        for seen, times in self._released.values():
            past = Clock(seen, seen.after)
            for tid, time in times:
                past[tid] = time
            self._clock, self._acquired = merge(self._clock, past), {}
        self._released = {}
        return self._clock

    def acquire(self, thread):
        """Order what was released before what ``thread`` does next."""
        clock, seen = self.clock, thread.seen
        if clock is None:
            return
        if id(seen) not in self._acquired:
            # With the clock itself, so that its id stays its own.
            self._acquired[id(seen)] = seen, merge(seen, clock)
        thread.seen = self._acquired[id(seen)][1]


def _both(a, b):
    """The clocks of other blocks in either of two dicts, where they are in both, joined."""
    if a is b or not b:
        return a
    return {block: merge(a.get(block), b.get(block)) for block in a | b}
