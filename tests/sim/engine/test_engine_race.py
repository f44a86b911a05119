"""The race detector: every conflict is named with both lines, ordered accesses are silent."""

import re

import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.hopper import atom_inc, global_address

SEEDS = range(6)


@pytest.fixture(params=SEEDS, autouse=True)
def seed(request):
    with sim.options(seed=request.param, race=True):
        yield request.param


def launch(kernel, *args, threads=64, blocks=1, dynamic=0):
    cuda.jit(kernel)[blocks, threads, 0, dynamic](*args)


def lines_of(kernel, *offsets):
    """A pattern for a report that names these lines of a kernel, in any order."""
    first = kernel.__code__.co_firstlineno
    here = [rf"test_engine_race\.py:{first + offset}\b" for offset in offsets]
    return re.compile("|".join((".*".join(here), ".*".join(reversed(here)))), re.DOTALL)


def test_missing_barrier_between_write_and_read():
    def kernel(out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = t
        out[t] = s[t ^ 1]

    with pytest.raises(sim.Race, match="with no barrier between") as caught:
        launch(kernel, np.zeros(64))
    assert lines_of(kernel, 3, 4).search(str(caught.value))


def test_missing_barrier_between_read_and_the_next_write():
    def kernel(out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        for trip in range(3):
            s[t] = t + trip
            cuda.syncthreads()
            out[t] += s[63 - t]

    with pytest.raises(sim.Race) as caught:
        launch(kernel, np.zeros(64))
    assert lines_of(kernel, 4, 6).search(str(caught.value))


def test_two_writers():
    def kernel():
        cuda.shared.array(1, float32)[0] = 1

    with pytest.raises(sim.Race, match=r"write by thread .* and write by thread"):
        launch(kernel)


def test_vectors_that_overlap():
    def kernel(out):
        s = cuda.shared.array(260, float32)
        t = cuda.threadIdx.x
        s[4 * t : 4 * t + 4] = (1, 2, 3, 4)
        cuda.syncthreads()
        s[4 * t] = 0
        out[t] = sum(tuple(s[4 * t + 1 : 4 * t + 5]))

    with pytest.raises(sim.Race) as caught:
        launch(kernel, np.zeros(64))
    assert lines_of(kernel, 5, 6).search(str(caught.value))


def test_two_types_of_one_buffer():
    def kernel(read_half):
        words, halves = cuda.shared.array(0, uint32), cuda.shared.array(0, uint16)
        t = cuda.threadIdx.x
        if t == 0:
            words[1] = 7
        if t == 1:
            halves[read_half]

    launch(kernel, 1, dynamic=64)
    launch(kernel, 4, dynamic=64)
    for half in (2, 3):
        with pytest.raises(sim.Race):
            launch(kernel, half, dynamic=64)


def test_neighbours_in_one_word_do_not_conflict():
    def kernel():
        s = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        s[t % 32] if t >= 32 else None
        cuda.syncthreads()
        s.view(uint16)[t] = t

    launch(kernel)


def test_a_loop_with_both_barriers_is_silent():
    def kernel(out):
        s = cuda.shared.array((8, 8), float32)
        t = cuda.threadIdx.x
        row, column = t // 8, t % 8
        for trip in range(3):
            cuda.syncthreads()
            s[row, column] = t + trip
            cuda.syncthreads()
            out[row, column] += s[column, row]

    out = np.zeros((8, 8))
    launch(kernel, out)
    np.testing.assert_array_equal(out, 3 * np.arange(64).reshape(8, 8).T + 3)


def exchange_in_warp(out, barrier):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = t
    if barrier:
        cuda.syncwarp()
    else:
        cuda.shfl_sync(0xFFFFFFFF, t, 0)
    out[t] = s[t ^ 31]


def test_syncwarp_orders_memory():
    out = np.zeros(64)
    launch(exchange_in_warp, out, True)
    np.testing.assert_array_equal(out, np.arange(64) ^ 31)


def test_shuffle_does_not_order_memory():
    with pytest.raises(sim.Race) as caught:
        launch(exchange_in_warp, np.zeros(64), False)
    assert lines_of(exchange_in_warp, 3, 8).search(str(caught.value))


def test_syncwarp_does_not_reach_other_warps():
    def kernel(out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.syncwarp()
        out[t] = s[63 - t]

    with pytest.raises(sim.Race):
        launch(kernel, np.zeros(64))


def test_syncwarp_of_half_a_warp_orders_that_half():
    def kernel(out, distance):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.syncwarp(0xFFFF if t < 16 else 0xFFFF0000)
        out[t] = s[t ^ distance]

    launch(kernel, np.zeros(32), 15, threads=32)
    with pytest.raises(sim.Race):
        launch(kernel, np.zeros(32), 16, threads=32)


def test_order_is_transitive():
    """Warp 0 writes, the block meets, a second syncwarp follows: still ordered."""

    def kernel(out):
        s = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.syncthreads()
        cuda.syncwarp()
        out[t] = s[63 - t]

    launch(kernel, np.zeros(64))


def test_global_memory_of_one_block():
    def kernel(x, out):
        t = cuda.threadIdx.x
        x[t] = t
        out[t] = x[t ^ 1]

    with pytest.raises(sim.Race) as caught:
        launch(kernel, np.zeros(64), np.zeros(64))
    assert lines_of(kernel, 2, 3).search(str(caught.value))


def test_two_arguments_that_are_the_same_memory():
    def kernel(x, y):
        t = cuda.threadIdx.x
        x[t] = t
        y[63 - t]

    x = np.zeros(64)
    with pytest.raises(sim.Race):
        launch(kernel, x, x)
    launch(kernel, x, x.copy())


def test_blocks_that_write_one_element():
    def kernel(x):
        x[0] = cuda.blockIdx.x

    with pytest.raises(sim.Race, match="in different blocks"):
        launch(kernel, np.zeros(1), threads=1, blocks=2)


def test_a_block_that_reads_what_another_writes():
    def kernel(x):
        b = cuda.blockIdx.x
        if b == 0:
            x[0] = 1
        elif b == 1:
            x[0] + x[1]

    with pytest.raises(sim.Race, match="in different blocks"):
        launch(kernel, np.zeros(2), threads=1, blocks=3)


def test_a_third_block_still_sees_the_first():
    """Blocks 0 to 3 read, one of them writes afterwards."""

    def kernel(x):
        x[0]
        if cuda.blockIdx.x == 2:
            x[0] = 1

    with pytest.raises(sim.Race, match="in different blocks"):
        launch(kernel, np.zeros(1), threads=1, blocks=4)


def test_barriers_inside_a_block_do_not_hide_it_from_others():
    def kernel(x):
        if cuda.threadIdx.x == 0:
            x[cuda.blockIdx.x // 2] = 1
        cuda.syncthreads()
        cuda.syncthreads()

    with pytest.raises(sim.Race, match="in different blocks"):
        launch(kernel, np.zeros(2), threads=2, blocks=4)


def test_atomics_do_not_race_with_each_other():
    def kernel(total):
        cuda.atomic.add(total, 0, float32(1))

    total = np.zeros(1, np.float32)
    launch(kernel, total, blocks=3)
    assert total[0] == 3 * 64


def test_atomic_and_plain_access_race():
    def kernel(total):
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(total, 0, 1)
        else:
            total[0]

    with pytest.raises(sim.Race, match=r"(atomic.*read|read.*atomic)"):
        launch(kernel, np.zeros(1), threads=2)


def test_plain_add_instead_of_atomic():
    """Greenlets never interleave inside ``+=``, so the sum is right: only the race shows."""

    def kernel(total):
        total[0] += 1

    with pytest.raises(sim.Race):
        launch(kernel, np.zeros(1), threads=2)
    with pytest.raises(sim.Race, match="in different blocks"):
        launch(kernel, np.zeros(1), threads=1, blocks=2)


def test_shared_memory_of_two_blocks_is_not_the_same():
    def kernel():
        cuda.shared.array(1, float32)[0] = 1

    launch(kernel, threads=1, blocks=4)


def counted(parts, out, counts, fault):
    """Every block writes its part, and the one that is counted last adds up those of all."""
    last = cuda.shared.array(1, uint32)
    b, t, blocks = cuda.blockIdx.x, cuda.threadIdx.x, cuda.gridDim.x
    parts[b, t] = b + 1
    if fault != "before all have written":
        cuda.syncthreads()
    if t == 0:
        if fault == "an atomic that orders nothing":
            before = cuda.atomic.add(counts, 0, 1)
        else:
            before = atom_inc(global_address(counts, b * (fault == "one's own")), blocks - 1)
        last[0] = before == blocks - 1 or fault == "one's own"
    if fault == "written once more":
        parts[b, t] = b + 1
    if fault != "not waited for":
        cuda.syncthreads()
    if last[0]:
        for i in range(blocks):
            out[t] += parts[i, t ^ 1]


def joined(fault=""):
    out, counts = np.zeros(64), np.zeros(3, np.uint32)
    launch(counted, np.zeros((3, 64)), out, counts, fault, blocks=3)
    return out, counts


def test_a_count_orders_blocks():
    out, counts = joined()
    assert (out == 6).all()
    assert not counts.any()


FAULTS = (
    "before all have written",
    "an atomic that orders nothing",
    "written once more",
    "one's own",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_count_that_does_not_order_blocks(fault):
    with pytest.raises(sim.Race, match="in different blocks"):
        joined(fault)


def test_a_count_that_a_block_does_not_wait_for():
    with pytest.raises(sim.Race, match="with no barrier between"):
        joined("not waited for")


@pytest.mark.parametrize("seed", range(8))
def test_a_count_of_one_thread_orders_no_other(seed):
    """Two threads of each block read; a count that comes after one of them hides neither."""

    def kernel(x, out, counts, met):
        last, t = cuda.shared.array(1, uint32), cuda.threadIdx.x
        if t in (0, 40):
            out[cuda.blockIdx.x, t] = x[0]
        if met:
            cuda.syncthreads()
        if t == 0:
            last[0] = atom_inc(global_address(counts, 0), 1)
        cuda.syncthreads()
        if last[0] == 1 and t == 0:
            x[0] = 7

    def run(met):
        with sim.options(race=True, seed=seed):
            arrays = np.zeros(1), np.zeros((2, 64)), np.zeros(1, np.uint32)
            cuda.jit(kernel)[2, 64](*arrays, met)

    run(True)
    with pytest.raises(sim.Race, match="in different blocks"):
        run(False)


def test_counts_order_blocks_one_after_the_other():
    """What a block has seen of others is handed on with what it did itself, not without."""

    def kernel(x, counts, skipped):
        turn, t = cuda.shared.array(1, uint32), cuda.threadIdx.x
        if t == 0:
            turn[0] = cuda.atomic.add(counts, 4, 1)
            if turn[0] not in (0, skipped):
                atom_inc(global_address(counts, int(turn[0]) - 1), 9)
        cuda.syncthreads()
        b = int(turn[0])
        for i in range(b):
            x[i, t ^ 1]
        x[b, t] = 1
        cuda.syncthreads()
        if t == 1:
            atom_inc(global_address(counts, b), 9)

    launch(kernel, np.zeros((4, 64)), np.zeros(5, np.uint32), 0, blocks=4)
    for skipped in (1, 2, 3):
        with pytest.raises(sim.Race, match="in different blocks"):
            launch(kernel, np.zeros((4, 64)), np.zeros(5, np.uint32), skipped, blocks=4)


def test_a_count_goes_on_from_0():
    def kernel(out, counts):
        out[cuda.threadIdx.x] = atom_inc(global_address(counts, 1), 2)

    out, counts = np.zeros(64), np.array([7, 1], np.uint32)
    launch(kernel, out, counts)
    assert np.bincount(out.astype(int)).tolist() == [21, 22, 21]
    assert counts.tolist() == [7, 2]
