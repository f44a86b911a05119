"""Hopper's instructions in the simulator, by the names that ``nbflash.cuda.ptx`` asks for.

Addresses are those of :mod:`.window`; the products are in :mod:`.wgmma`.
With race detection TMA, through each of its mbarriers, and the wgmma of each
warpgroup are parties of their own: only who has waited for them comes after them. Conflicts are
looked for in one element of every 16 bytes.
"""

from dataclasses import dataclass

import numpy as np

from nbflash.cuda.simulator import bulk, race
from nbflash.cuda.simulator.asynchrony import (
    cp_async_commit,
    cp_async_wait,
    find_mbarrier,
    make_mbarrier,
)
from nbflash.cuda.simulator.bulk import (
    atom_inc,
    bulk_add,
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    global_address,
)
from nbflash.cuda.simulator.engine import WARP, current
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.ldmatrix import ldmatrix
from nbflash.cuda.simulator.memory import wrap
from nbflash.cuda.simulator.mma import mma
from nbflash.cuda.simulator.sites import capture, show
from nbflash.cuda.simulator.storage import POISON
from nbflash.cuda.simulator.warp import warp_collective
from nbflash.cuda.simulator.wgmma import settle, wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.simulator.window import ATOM, CHUNK, START, copied, later, place, proxy_fences

__all__ = [
    "SimTensorMap",
    "atom_inc",
    "bar_arrive",
    "bar_sync",
    "bulk_add",
    "bulk_commit",
    "bulk_load",
    "bulk_wait",
    "bulk_wait_read",
    "cp_async_commit",
    "cp_async_wait",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "global_address",
    "ldmatrix",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_init",
    "mbarrier_wait",
    "mma",
    "setmaxnreg",
    "settle",
    "shared_address",
    "stmatrix4",
    "tma_load_4d",
    "tma_store_4d",
    "wgmma",
    "wgmma_commit",
    "wgmma_fence",
    "wgmma_wait",
]

PANEL = 64  # columns of a box
NAMED_BARRIERS = 16


def shared_address(smem):
    """Address of an array in dynamic shared memory."""
    _, home = current().block.shared.dynamic
    if getattr(smem, "home", None) is not home:
        raise SimError("shared_address: only dynamic shared memory has addresses")
    return START + smem.data.__array_interface__["data"][0] - home.base


def _mbarrier(address, use):
    name = f"mbarrier at {int(address)}"
    if address % 8:
        raise SimError(f"{name}: not a multiple of 8")
    return use(current().block.shared.dynamic[1], place(address, 8, name), name)


def mbarrier_init(address, count):
    """``mbarrier.init``: expects ``count`` arrivals."""
    made = _mbarrier(address, lambda *at: make_mbarrier(*at, count))
    thread = current()
    thread.block.state.setdefault(("mbarrier.init", thread.tid), []).append(made)


def fence_mbarrier_init():
    """``fence.mbarrier_init``: TMA sees what this thread has initialised."""
    thread = current()
    for barrier in thread.block.state.get(("mbarrier.init", thread.tid), ()):
        barrier.fenced = True


def mbarrier_arrive(address):
    """``mbarrier.arrive``: one arrival. What follows may run much later."""
    _mbarrier(address, find_mbarrier).arrive()


def mbarrier_arrive_expect_tx(address, nbytes):
    """``mbarrier.arrive.expect_tx``: one arrival, and ``nbytes`` that copies will bring."""
    _mbarrier(address, find_mbarrier).arrive(nbytes)


def mbarrier_wait(address, parity):
    """Wait until the phase of ``parity`` has completed."""
    _mbarrier(address, find_mbarrier).wait(parity)


def fence_proxy_async():
    """``fence.proxy.async``: the engines see what this thread has stored."""
    thread = current()
    proxy_fences(thread.block).setdefault(thread.tid, []).append(thread.clock)
    thread.clock += 1


class _NamedBarrier:
    """One generation of a named barrier."""

    def __init__(self, threads, site):
        self.threads, self.site = threads, site
        self.arrived, self.waiting, self.past = set(), [], race.Past()


def _arrive(number, threads, waits):
    thread, number, threads = current(), int(number), int(threads)
    block, key, name = thread.block, ("bar", int(number)), f"named barrier {number}"
    if not 0 <= number < NAMED_BARRIERS or threads % WARP or threads < WARP:
        raise SimError(f"{name} of {threads} threads: numbers end at 15, warps have {WARP} threads")
    barrier = block.state.get(key)
    if barrier is None:
        barrier = block.state[key] = _NamedBarrier(threads, capture(2))
        block.checks["named barriers"] = lambda: _check_that_none_is_left(block)
    if barrier.threads != threads:
        raise SimError(
            f"{name} of {threads} threads, but of {barrier.threads} at {show(barrier.site)}"
        )
    if thread.tid in barrier.arrived:
        raise SimError(f"{name}: this thread has arrived already, others have not")
    barrier.arrived.add(thread.tid)
    if block.options.race:
        barrier.past.add(thread)
    if waits:
        barrier.waiting.append(thread)
    if len(barrier.arrived) == threads:
        del block.state[key]
        for waiting in barrier.waiting:
            block.wake(waiting)
    if not waits:
        block.pause(thread)
        return
    block.park(thread, f"{name} of {threads} threads")
    if block.options.race:
        barrier.past.acquire(thread)


def _check_that_none_is_left(block):
    for key, barrier in block.state.items():
        if isinstance(barrier, _NamedBarrier):
            raise SimError(
                f"the block has ended, and of {barrier.threads} threads {len(barrier.arrived)} "
                f"have arrived at named barrier {key[1]}, at {show(barrier.site)}"
            )


def bar_sync(number, threads):
    """``bar.sync``: wait until ``threads`` threads have arrived, with or without waiting."""
    _arrive(number, threads, True)


def bar_arrive(number, threads):
    """``bar.arrive``: arrive and go on."""
    _arrive(number, threads, False)


def _stmatrix4(values, mask):
    """Lane 8 m + r gets row r of matrix m: a word of each lane 4 r to 4 r + 3."""
    rows = {}
    for lane in values:
        matrix, row = divmod(lane, 8)
        rows[lane] = [values[4 * row + quad][matrix] for quad in range(4)]
    return rows


def stmatrix4(address, words):
    """``stmatrix.x4``: four 8 × 8 matrices, whose rows go where the 32 lanes say."""
    row = warp_collective(_stmatrix4, tuple(words))
    raw, home = current().block.shared.dynamic
    if address % CHUNK:
        raise SimError(f"stmatrix: address {int(address)} is not a multiple of 16")
    first = place(address, CHUNK, "stmatrix")
    wrap(raw[first : first + CHUNK].view(np.uint32), home)[0:4] = row


def _setmaxnreg(values, mask):
    if len(values) < 128:
        raise SimError("setmaxnreg: threads of the warpgroup have left the kernel")
    return dict.fromkeys(values)


def setmaxnreg():
    """``setmaxnreg``: all threads of a warpgroup must call it."""
    warp_collective(_setmaxnreg, None, None, 128)


@dataclass(frozen=True, eq=False)
class SimTensorMap:
    """What a tensor map says: boxes of ``rows`` × 64 columns of one head, swizzled.

    Attributes
    ----------
    array : uint16 (batch, n, heads, head_dim)
        The bits of the elements.
    rows : int
        Tokens of a box, at most 256.
    """

    array: np.ndarray
    rows: int

    @classmethod
    def decoded(cls, memory, sizes, steps, box):
        """The map of a geometry, as `nbflash.cuda.tensor_map.geometry` has it, checked.

        Parameters
        ----------
        memory : array
            All memory from the tensor's first element on.
        sizes, steps, box : tuple
            In elements of two bytes, in bytes, in elements; the innermost axis first.

        Raises
        ------
        SimError
            For what the driver rejects, and where the tensor does not lie in the memory.
        """
        words = memory.reshape(-1).view(np.uint16)
        reach = 2 * sizes[0] + sum((n - 1) * s for n, s in zip(sizes[1:], steps, strict=True))
        if not all(1 <= n <= 2**32 for n in sizes):
            raise SimError(f"tensor map: no axis can have the lengths {sizes}")
        if any(s % CHUNK or not 0 <= s < 2**40 for s in steps):
            raise SimError(f"tensor map: strides of {steps} bytes are no multiples of {CHUNK}")
        if not all(1 <= n <= 256 for n in box) or box[0] != PANEL:
            raise SimError(f"tensor map: there is no box of {box} elements")
        if reach > words.nbytes:
            raise SimError(f"tensor map: {reach} bytes of a tensor in memory of {words.nbytes}")
        row, head, batch = steps
        strides = batch, row, head, 2
        shape = sizes[3], sizes[1], sizes[2], sizes[0]
        return cls(np.lib.stride_tricks.as_strided(words, shape, strides), box[1])

    def _inside(self, column, row, head, batch):
        """What a box and the tensor share: views of the tensor, and where it lies in the box."""
        batches, n, heads, head_dim = self.array.shape
        if not (0 <= head < heads and 0 <= batch < batches):
            return self.array[:0, :0, 0, 0], (slice(0), slice(0))
        rows = slice(max(row, 0), max(0, min(row + self.rows, n)))
        columns = slice(max(column, 0), max(0, min(column + PANEL, head_dim)))
        part = self.array[batch, rows, head, columns]
        r, c = max(-row, 0), max(-column, 0)
        return part, (slice(r, r + part.shape[0]), slice(c, c + part.shape[1]))

    def box(self, column, row, head, batch):
        """The bits of one box, zero outside of the tensor."""
        box = np.zeros((self.rows, PANEL), np.uint16)
        part, at = self._inside(column, row, head, batch)
        box[at] = part
        return box

    def store(self, box, column, row, head, batch):
        """Write the part of a box that lies in the tensor."""
        part, at = self._inside(column, row, head, batch)
        part[...] = box[at]


def _engine_mbarrier(address):
    barrier = _mbarrier(address, find_mbarrier)
    if not barrier.fenced:
        raise SimError(f"{barrier.name}: a copy uses it with no fence_mbarrier_init")
    return barrier


def bulk_load(to, source, nbytes, bar):
    """``cp.async.bulk``: bytes of global memory, told to an mbarrier; see :mod:`.bulk`."""
    bulk.bulk_load(to, source, nbytes, _engine_mbarrier(bar))


def tma_load_4d(to, tensor_map, column, row, head, batch, bar):
    """``cp.async.bulk.tensor``: a box of a :class:`SimTensorMap`, its bytes told to an mbarrier.

    The destination is poisoned now and filled at a moment that the schedule chooses.
    """
    thread, past = current(), None
    block, nbytes = thread.block, tensor_map.rows * 2 * PANEL
    barrier = _engine_mbarrier(bar)
    if to % ATOM or not 1 <= tensor_map.rows <= 256:
        raise SimError(f"box of {tensor_map.rows} rows at {int(to)}: not a multiple of {ATOM}")
    first = place(to, nbytes, "tensor copy")
    raw, _ = block.shared.dynamic
    data = raw[first : first + nbytes]
    values = tensor_map.box(*(int(x) for x in (column, row, head, batch)))
    if block.options.race:
        past = copied(barrier, np.arange(int(to), int(to) + nbytes, CHUNK))
    data[:] = POISON

    def complete():
        _chunks(data)[_swizzle(tensor_map.rows)] = values.reshape(-1, 8, CHUNK // 2)
        barrier.land(nbytes, past)

    later(block, complete)


def _chunks(data):
    """A box in shared memory: rows of eight chunks of eight elements."""
    return data.view(np.uint16).reshape(-1, 8, CHUNK // 2)


def _swizzle(rows):
    """Where the chunks of a box lie among those of shared memory."""
    row, chunk = np.ogrid[:rows, :8]
    return row, chunk ^ row % 8


def tma_load_4d_once(to, tensor_map, column, row, head, batch, bar, policy):
    """`tma_load_4d` with a policy of the L2 cache, of which there is none."""
    tma_load_4d(to, tensor_map, column, row, head, batch, bar)


def evict_first():
    """``createpolicy``: a policy of the L2 cache."""
    return 0


def tma_store_4d(tensor_map, column, row, head, batch, source):
    """``cp.async.bulk.tensor`` to global memory, part of this thread's group of bulk copies."""
    at = tuple(int(x) for x in (column, row, head, batch))
    if source % ATOM:
        raise SimError(f"box of {tensor_map.rows} rows at {int(source)}: not a multiple of {ATOM}")

    def store(data):
        box = _chunks(data)[_swizzle(tensor_map.rows)]
        tensor_map.store(box.reshape(-1, PANEL), *at)

    bulk.send(source, tensor_map.rows * 2 * PANEL, "tensor store", store)
