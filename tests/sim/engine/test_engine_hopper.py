"""The bodies of Hopper's instructions: copies and barriers, and what each must refuse."""

import re
from pathlib import Path

import numpy as np
import pytest
from hopper_runs import BASE, BYTES, SEEDS, image, launched, memory, races, rejected
from numba import cuda, int32

import nbflash.cuda.ptx
from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator import hopper
from nbflash.cuda.simulator.hopper import (
    SimTensorMap,
    bar_arrive,
    bar_sync,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg,
    shared_address,
    tma_load_4d,
)

# ---- the window ----


def test_every_instruction_of_the_seam_has_a_body():
    text = "".join(path.read_text() for path in Path(nbflash.cuda.ptx.__path__[0]).glob("*.py"))
    names = re.findall(r'instruction\(\s*"(\w+)"', text) + re.findall(r"hopper\(\)\.(\w+)\(", text)
    assert {"tma_load_4d", "wgmma_commit", "setmaxnreg", "settle"} <= set(names)
    assert all(callable(getattr(hopper, name)) for name in names)


def test_shared_memory_is_aligned_to_16_bytes_and_no_more():
    out = np.zeros(2, np.int64)

    def kernel(out):
        smem = cuda.shared.array(0, int32)
        out[0], out[1] = shared_address(smem), shared_address(smem[3:])

    launched(kernel, out, threads=1)
    assert out[0] % 32 == 16
    assert out[1] == out[0] + 12


def test_static_shared_memory_has_no_address():
    rejected(lambda: shared_address(cuda.shared.array(4, int32)), "only dynamic shared memory")


# ---- copies ----


def copied(tensor_map, at, *, seed=0, race=False, wait=True, to=BASE, nbytes=None):
    """The words of one box in shared memory, as another thread finds them."""
    words = tensor_map.rows * 64
    out = np.zeros(words, np.uint16)
    nbytes = 2 * words if nbytes is None else nbytes

    def kernel(out):
        s, t = memory(), cuda.threadIdx.x
        if t == 0:
            mbarrier_init(BASE - 64, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect_tx(BASE - 64, nbytes)
            tma_load_4d(to, tensor_map, *at, BASE - 64)
        if t == 1:
            if wait:
                mbarrier_wait(BASE - 64, 0)
            out[:] = np.array(s[(to - BASE) // 2 : (to - BASE) // 2 + words])

    with sim.options(seed=seed, race=race):
        launched(kernel, out, threads=2)
    return out


def tensor(batch=2, n=21, heads=3, head_dim=72, seed=0):
    shape = batch, n, heads, head_dim
    return np.random.default_rng(seed).integers(1, 60000, shape).astype(np.uint16)


@races
@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize(("column", "row"), [(0, 0), (64, 0), (0, 8), (64, 16), (0, 24), (0, -3)])
def test_box_is_swizzled_and_zero_outside_of_the_tensor(column, row, seed, race):
    x, expected = tensor(), np.zeros((16, 64), np.uint16)
    for r in range(16):
        for c in range(64):
            if 0 <= row + r < 21 and column + c < 72:
                expected[r, c] = x[1, row + r, 2, column + c]
    got = copied(SimTensorMap(x, 16), (column, row, 2, 1), seed=seed, race=race, to=BASE + 2048)
    np.testing.assert_array_equal(got, image(expected))


@pytest.mark.parametrize("at", [(0, 0, 3, 0), (0, 0, 0, 2), (0, 0, -1, 0)])
def test_heads_and_batches_that_are_not_there_are_zero(at):
    assert not copied(SimTensorMap(tensor(), 8), at).any()


def test_box_is_poison_until_it_lands():
    found = set()
    for seed in range(20):
        got = copied(SimTensorMap(tensor(), 8), (0, 0, 0, 0), wait=False, seed=seed)
        found.add("poison" if (got == 0xFFFF).all() else "there")
        assert found <= {"poison", "there"}
    assert "poison" in found


def test_box_without_a_wait_is_a_race():
    box = SimTensorMap(tensor(), 8)
    for seed in SEEDS:
        with pytest.raises(sim.Race, match="the copies of mbarrier at 960"):
            copied(box, (0, 0, 0, 0), wait=False, seed=seed, race=True)


@pytest.mark.parametrize("nbytes", [1000, 1048, 2048])
def test_wrong_number_of_bytes_is_a_deadlock(nbytes):
    match = r"threads 1 wait for mbarrier at 960 \(made at .*\), parity 0"
    with pytest.raises(sim.Deadlock, match=match):
        copied(SimTensorMap(tensor(), 8), (0, 0, 0, 0), nbytes=nbytes)


@pytest.mark.parametrize(
    ("to", "rows", "match"),
    [
        (BASE + 128, 8, "not a multiple of 1024"),
        (BASE * 40, 8, "are not in dynamic shared memory"),
        (0, 8, "are not in dynamic shared memory"),
        (BASE, 257, "box of 257 rows"),
    ],
)
def test_boxes_that_the_copy_engine_does_not_take(to, rows, match):
    with pytest.raises(sim.SimError, match=match):
        copied(SimTensorMap(tensor(), rows), (0, 0, 0, 0), to=to)


def test_copy_engine_needs_a_fence_after_mbarrier_init():
    def kernel():
        mbarrier_init(BASE, 1)
        tma_load_4d(2 * BASE, SimTensorMap(tensor(), 8), 0, 0, 0, 0, BASE)

    rejected(kernel, "a copy uses it with no fence_mbarrier_init", threads=1)


# ---- barriers ----


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda: mbarrier_wait(BASE, 0), "mbarrier at 1024 is used before mbar_init"),
        (lambda: mbarrier_init(BASE + 4, 1), "mbarrier at 1028: not a multiple of 8"),
        (lambda: mbarrier_init(8, 1), "are not in dynamic shared memory"),
        (lambda: mbarrier_init(BYTES + 16, 1), "are not in dynamic shared memory"),
        (lambda: mbarrier_init(BASE, 1) or mbarrier_init(BASE, 2), "1024 exists already"),
    ],
    ids=["before-init", "unaligned", "below", "above", "twice"],
)
def test_mbarriers_that_cannot_be(use, match):
    rejected(use, match, threads=1)


def test_mbarrier_under_a_tile_is_a_race():
    def kernel():
        s, t = memory(), cuda.threadIdx.x
        if t == 0:
            mbarrier_init(BASE, 1)
        if t == 1:
            s[3] = 7

    with sim.options(race=True):
        rejected(kernel, "with no barrier between", sim.Race, threads=2)


def relay(number, n, out):
    """Warps 0 and 1 write, warp 2 reads what both have written; warp 3 is not concerned."""
    s, t = memory(), cuda.threadIdx.x
    for i in range(n):
        if t < 64:
            s[t] = t + i
            bar_arrive(number, 96)
            bar_sync(number + 1, 96)
        elif t < 96:
            bar_sync(number, 96)
            out[i, t - 64] = s[t - 64] + s[127 - t]
            bar_arrive(number + 1, 96)


@races
@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_order_memory(seed, race):
    out = np.zeros((3, 32), np.int64)
    with sim.options(seed=seed, race=race):
        launched(relay, 14, 3, out)
    np.testing.assert_array_equal(out, np.repeat([[63], [65], [67]], 32, axis=1))


def test_bar_arrive_orders_nothing_for_who_arrives():
    def kernel():
        s, t = memory(), cuda.threadIdx.x
        if t == 32:
            s[0] = 1
        bar_arrive(1, 64)
        if t == 0:
            s[0] = 2

    with sim.options(race=True):
        rejected(kernel, "with no barrier between", sim.Race, threads=64)


@pytest.mark.parametrize(
    ("number", "threads", "match"),
    [(16, 32, "named barrier 16 of 32"), (-1, 32, "named barrier -1"), (1, 40, "1 of 40 threads")],
)
def test_named_barriers_that_cannot_be(number, threads, match):
    rejected(lambda: bar_sync(number, threads), match)


def test_named_barrier_of_two_sizes():
    def kernel():
        bar_sync(3, 64 if cuda.threadIdx.x < 32 else 96)

    rejected(kernel, r"named barrier 3 of (64|96) threads, but of (96|64) at", threads=64)


def test_named_barrier_deadlock_names_it():
    match = (
        r"threads 0-31 wait for named barrier 5 of 64 threads at .*; threads 32-63 wait for named"
    )
    rejected(lambda: bar_sync(5 + cuda.threadIdx.x // 32, 64), match, sim.Deadlock, threads=64)


def test_arriving_twice():
    rejected(lambda: bar_arrive(1, 64) or bar_arrive(1, 64), "has arrived already")


def test_setmaxnreg_wants_the_whole_warpgroup():
    launched(setmaxnreg)

    def some():
        if cuda.threadIdx.x != 77:
            setmaxnreg()
        else:
            cuda.syncthreads()

    with sim.options(strict_barrier=False):
        rejected(some, "threads 0-76, 78-127 wait for setmaxnreg", sim.Deadlock, threads=128)
        rejected(setmaxnreg, "threads of the warpgroup have left", threads=96)


def test_mbarrier_arrivals_by_address_wake_who_waits():
    out = np.zeros(2, np.int64)

    def kernel(out):
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(BASE, 1)
        cuda.syncthreads()
        if t == 0:
            out[0] = 1
            mbarrier_arrive(BASE)
        if t == 1:
            mbarrier_wait(BASE, 0)
            out[1] = out[0]

    for seed in SEEDS:
        with sim.options(seed=seed, race=True):
            launched(kernel, out, threads=2)
        assert out[1] == 1
