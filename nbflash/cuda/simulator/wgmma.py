"""wgmma in the simulator: products of a warpgroup from shared memory, late and in any schedule.

The operands are read through their descriptors when the first thread issues an instruction and
again when its group completes; if they differ, something was early or late, which is reported.
A group completes after all 128 threads have committed it, in the order of the groups, at
moments that the schedule chooses. Its result is a :class:`Pending` fragment, which cannot be
read before the wait and :func:`settle`.

What the threads of a warpgroup did before they committed comes before what any of them does
after its wait: CUTLASS too lets one thread release a stage for its warpgroup.

Fragments and operands are laid out as :mod:`nbflash.cuda.ptx.wgmma` says. Products are exact, sums
in float32. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

import functools

import numpy as np

from nbflash.cuda.simulator import race
from nbflash.cuda.simulator.engine import current
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.race import READ
from nbflash.cuda.simulator.sites import capture, show
from nbflash.cuda.simulator.window import ATOM, engine_access, later, place, swizzled

THREADS = 128
ROWS, DEPTH = 64, 16  # of A
_START, _LEADING, _STRIDE = 0, 16, 32  # first bits of a descriptor's fields, of 14 bits each
_FIELD = (1 << 14) - 1
_SWIZZLE_128 = 1 << 62


def _descriptor(halves):
    """``(start, leading, stride)`` in bytes, of an operand with the swizzle of 128 bytes."""
    word = int(halves[1]) << 32 | int(halves[0])
    fields = [(word >> at & _FIELD) << 4 for at in (_START, _LEADING, _STRIDE)]
    known = sum(_FIELD << at for at in (_START, _LEADING, _STRIDE))
    if word & ~known != _SWIZZLE_128:
        raise SimError(f"descriptor {word:#018x}: not the swizzle of 128 bytes, or stray bits")
    if fields[0] % ATOM >= 128:
        raise SimError(f"descriptor {word:#018x}: starts between the rows of a swizzle atom")
    return fields


@functools.lru_cache(4096)
def _k_major(start, stride, rows):
    """Addresses of an operand of ``rows`` rows of 16 elements along the contraction."""
    row, column = np.ogrid[:rows, :DEPTH]
    return swizzled(start + row // 8 * stride + row % 8 * 128 + 2 * column)


@functools.lru_cache(4096)
def _mn_major(start, leading, stride, columns):
    """Addresses of an operand of 16 rows along the contraction, in panels of 64 columns."""
    row, column = np.ogrid[:DEPTH, :columns]
    at = start + column // 64 * leading + row // 8 * stride
    return swizzled(at + row % 8 * 128 + column % 64 * 2)


def floats(words, dtype):
    """float32 values of the bits of float16 or bfloat16."""
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _matrix(fragments):
    """(64, n) from the fragments (128, n / 2) of the threads."""
    parts = fragments.reshape(4, 8, 4, -1, 2, 2)  # warp, row, quad, column, row, column
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, -1)


def _fragments(matrix):
    """The inverse of :func:`_matrix`."""
    parts = matrix.reshape(4, 2, 8, -1, 4, 2)
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(THREADS, -1)


class Operand:
    """A matrix in shared memory, by the addresses of its elements."""

    def __init__(self, addresses, name):
        self.addresses, self.name = addresses, name
        raw, _ = current().block.shared.dynamic
        low, high = int(addresses.min()), int(addresses.max())
        first = place(low, high + 2 - low, name)
        self.memory = raw[first : first + high + 2 - low].view(np.uint16)
        self.index = (addresses - low) >> 1
        self.issued = self.memory[self.index]

    def read(self):
        """The elements' bits at the end of the instruction."""
        words = self.memory[self.index]
        if not np.array_equal(words, self.issued):
            at = self.addresses[words != self.issued]
            raise SimError(
                f"{self.name}: {at.size} elements at {at.min()} to {at.max()} changed between "
                "its issue and its end"
            )
        return words


class Instruction:
    """One ``wgmma.mma_async`` of a warpgroup, as its threads issue it one after the other."""

    def __init__(self, group, what):
        self.group, self.what, self.site = group, what, capture(2)
        self.dtype, self.columns, a, b, self.accumulate, self.transpose_b, self.negate_a = what[:7]
        self.transpose_a = what[7]
        name = f"wgmma at {show(self.site)}"
        self.a = self.registers = None
        if a is None:
            self.registers = np.zeros((THREADS, 4), np.uint32)
        else:
            start, leading, stride = _descriptor(a)
            if self.transpose_a:
                addresses = _mn_major(start, leading, stride, ROWS)
            else:
                addresses = _k_major(start, stride, ROWS)
            self.a = Operand(addresses, f"A of {name}")
        start, leading, stride = _descriptor(b)
        if self.transpose_b:
            addresses = _mn_major(start, leading, stride, self.columns)
        else:
            addresses = _k_major(start, stride, self.columns)
        self.b = Operand(addresses, f"B of {name}")
        self.start = np.zeros((THREADS, self.columns // 2), np.float32) if self.accumulate else None
        self.issued, self.matrix, self.fragments, self.continued = 0, None, None, None

    def chunks(self):
        """Addresses of the 16-byte chunks that the operands take."""
        operands = [x.addresses[:, ::8].ravel() for x in (self.a, self.b) if x is not None]
        return np.concatenate(operands)

    def issue(self, lane, acc, a):
        """Take the operands of one thread that are in registers."""
        self.issued += 1
        if self.registers is not None:
            self.registers[lane] = a
        if isinstance(acc, Pending):
            acc.instruction.follow(self, lane, acc)
        elif self.accumulate:
            self.start[lane] = acc

    def follow(self, other, lane, acc):
        """``other`` goes on with this one's accumulators."""
        if self.continued not in (None, other) or acc.lane != lane:
            raise SimError("wgmma: these accumulators have been passed on already")
        self.continued = other
        if other.accumulate:
            other.start = self

    def execute(self):
        """Multiply, once the operands in registers of all threads are here."""
        a = _matrix(self.registers.view(np.uint16)) if self.a is None else self.a.read()
        a = a.T if self.transpose_a else a
        a, b = floats(a, self.dtype), floats(self.b.read(), self.dtype)
        with np.errstate(all="ignore"):
            product = (-a if self.negate_a else a) @ (b if self.transpose_b else b.T)
            if isinstance(self.start, Instruction):
                product += self.start.matrix
            elif self.accumulate:
                product += _matrix(self.start)
        self.matrix, self.start = product, None

    def fragment(self, lane):
        """The accumulators of one thread."""
        if self.fragments is None:
            self.fragments = _fragments(self.matrix)
        return tuple(self.fragments[lane])


class Pending:
    """Accumulators that a wgmma is to write: nothing may read them before :func:`settle`."""

    def __init__(self, instruction, lane):
        self.instruction, self.lane = instruction, lane

    def __len__(self):
        return self.instruction.columns // 2

    def __getitem__(self, index):
        raise SimError(f"accumulators of wgmma at {show(self.instruction.site)} are not settled")

    def __iter__(self):
        return self[0]


class Group:
    """What was issued between two commits, and the joined clocks of those who committed."""

    def __init__(self):
        self.instructions, self.committed, self.past = [], 0, race.Past()


class Warpgroup:
    """The wgmmas of 128 threads; per thread how far it has come."""

    def __init__(self, block, number):
        self.block = block
        self.engine = None
        if block.options.race:
            self.engine = race.make_engine(block, f"wgmma of warpgroup {number}")
        self.instructions, self.groups, self.done, self.waiters = {}, {}, 0, []
        self.issued, self.committed, self.waited = ([0] * THREADS for _ in range(3))
        self.fenced = [False] * THREADS

    def instruction(self, lane, what):
        """The next instruction of a thread, the same for all that issue it."""
        number, group = self.issued[lane], self.committed[lane]
        self.issued[lane] += 1
        found = self.instructions.get(number)
        if found is None:
            found = self.instructions[number] = Instruction(group, what)
            self.groups.setdefault(group, Group()).instructions.append(found)
            if self.engine is not None:
                engine_access(found.chunks(), READ, self.engine, group + 1)
        elif (found.group, found.what) != (group, what):
            raise SimError(
                f"threads of one warpgroup issue different wgmmas: group {found.group}, "
                f"{found.what} and group {group}, {what}"
            )
        if found.issued == THREADS - 1:
            del self.instructions[number]
        return found

    def commit(self, thread, lane):
        """One thread's ``wgmma.commit_group``; the last one sets the group off."""
        number = self.committed[lane]
        self.committed[lane] += 1
        group = self.groups.setdefault(number, Group())
        if self.engine is not None:
            group.past.add(thread)
        group.committed += 1
        if group.committed == THREADS:
            later(self.block, lambda: self.complete(number))

    def complete(self, number):
        """The groups up to ``number`` are done."""
        while self.done <= number:
            group = self.groups[self.done]
            for instruction in group.instructions:
                instruction.execute()
            group.instructions.clear()
            if self.engine is not None:
                earlier = self.groups.pop(self.done - 1, group)
                group.past.join(earlier.past.clock)
                clock = race.Clock(group.past.clock, group.past.clock.after)
                clock[self.engine] = self.done + 1
                group.past = race.Past(clock)
            self.done += 1
        for thread, count in self.waiters:
            if count <= self.done:
                self.block.wake(thread)
        self.waiters = [w for w in self.waiters if w[1] > self.done]

    def wait(self, thread, lane, count):
        """Wait until ``count`` groups are done."""
        if self.done < count:
            self.waiters.append((thread, count))
            self.block.park(thread, f"wgmma group {count - 1}")
        self.waited[lane] = max(self.waited[lane], count)
        if self.engine is not None and count:
            self.groups[self.done - 1].past.acquire(thread)


def _mine():
    """The running thread, its warpgroup and its number there."""
    thread = current()
    number, lane = divmod(thread.tid, THREADS)
    key, state = ("wgmma", number), thread.block.state
    if key not in state:
        state[key] = Warpgroup(thread.block, number)
    return thread, state[key], lane


def wgmma_fence():
    """``wgmma.fence``: what this thread put in registers may now be used by wgmma."""
    _, warpgroup, lane = _mine()
    warpgroup.fenced[lane] = True


def wgmma_commit():
    """``wgmma.commit_group``."""
    thread, warpgroup, lane = _mine()
    warpgroup.commit(thread, lane)


def wgmma_wait(pending):
    """``wgmma.wait_group``: at most ``pending`` of this thread's groups are in flight."""
    thread, warpgroup, lane = _mine()
    warpgroup.wait(thread, lane, max(0, warpgroup.committed[lane] - pending))


def wgmma(dtype, acc, a, b, accumulate, transpose_b, negate_a, transpose_a=False):
    """``wgmma.mma_async``: see :func:`nbflash.cuda.ptx.wgmma.wgmma`."""
    _, warpgroup, lane = _mine()
    if not warpgroup.fenced[lane]:
        raise SimError("wgmma without wgmma_fence after the last access to its registers")
    n = 2 * len(acc)
    if n % 8 or not 8 <= n <= 256:
        raise SimError(f"wgmma of {n} columns: a multiple of 8 up to 256 is needed")
    first = None if len(a) == 4 else (int(a[0]), int(a[1]))
    second = int(b[0]), int(b[1])
    what = dtype, n, first, second, accumulate, transpose_b, negate_a, transpose_a
    found = warpgroup.instruction(lane, what)
    found.issue(lane, acc, a)
    return Pending(found, lane)


def settle(acc):
    """The fragment of a :class:`Pending` whose group has been waited for."""
    if not isinstance(acc, Pending):
        return acc
    _, warpgroup, lane = _mine()
    instruction = acc.instruction
    if lane != acc.lane or warpgroup.waited[lane] <= instruction.group:
        raise SimError(f"settle before the wait for wgmma at {show(instruction.site)}")
    if instruction.continued is not None:
        raise SimError("settle: these accumulators have been passed on to another wgmma")
    warpgroup.fenced[lane] = False
    return instruction.fragment(lane)
