"""Barriers of the simulator: what they order, and every way to get one wrong."""

import numpy as np
import pytest
from numba import cuda, float32

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.engine import current

SEEDS = range(8)


def launch(kernel, *args, threads, blocks=1):
    cuda.jit(kernel)[blocks, threads](*args)


def rotate(out, barrier):
    """out[t] = value of thread t + 1, through shared memory."""
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    s = cuda.shared.array(64, float32)
    s[t] = t
    if barrier:
        cuda.syncthreads()
    out[t] = s[(t + 1) % n]


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_makes_writes_visible(seed):
    out = np.zeros(64)
    with sim.options(seed=seed, race=True):
        launch(rotate, out, True, threads=64)
    np.testing.assert_array_equal(out, np.roll(np.arange(64), -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_barrier_gives_nan(seed):
    out = np.zeros(64)
    with sim.options(seed=seed):
        launch(rotate, out, False, threads=64)
    assert np.isnan(out).any()


def test_threads_at_two_barriers_diverge():
    def kernel():
        if cuda.threadIdx.x < 32:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    first = kernel.__code__.co_firstlineno
    pattern = f"different barriers.*test_engine_barriers.py:({first + 2}|{first + 4})"
    with pytest.raises(sim.BarrierDivergence, match=pattern):
        launch(kernel, threads=64)
    with sim.options(strict_barrier=False):
        launch(kernel, threads=64)


def test_two_call_sites_of_a_helper_are_two_barriers():
    def helper():
        cuda.syncthreads()

    def kernel():
        if cuda.threadIdx.x == 0:
            helper()
        else:
            helper()

    with pytest.raises(sim.BarrierDivergence, match="different barriers"):
        launch(kernel, threads=2)


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_skipped_by_half_the_block(seed):
    def skip_one():
        if cuda.threadIdx.x < 32:
            cuda.syncthreads()
        cuda.syncthreads()

    with sim.options(seed=seed), pytest.raises(sim.BarrierDivergence, match="different barriers"):
        launch(skip_one, threads=64)


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_after_half_the_block_has_left(seed):
    def leave_early(out):
        if cuda.threadIdx.x < 32:
            return
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    with (
        sim.options(seed=seed),
        pytest.raises(sim.BarrierDivergence, match=r"threads .* have left the kernel"),
    ):
        launch(leave_early, np.zeros(64), threads=64)
    out = np.zeros(64)
    with sim.options(seed=seed, strict_barrier=False):
        launch(leave_early, out, threads=64)
    assert out.tolist() == [0] * 32 + [1] * 32


def test_loop_trips_of_one_barrier_may_differ_in_nothing():
    def kernel():
        for _ in range(1 + cuda.threadIdx.x // 32):
            cuda.syncthreads()

    with pytest.raises(sim.BarrierDivergence, match="have left the kernel"):
        launch(kernel, threads=64)


def test_deadlock_report_names_threads_line_and_wait():
    def kernel():
        if cuda.threadIdx.x < 16:
            cuda.syncwarp(0xFFFFFFFF)
        else:
            cuda.syncthreads()

    first = kernel.__code__.co_firstlineno
    with pytest.raises(sim.Deadlock) as caught:
        launch(kernel, threads=32)
    report = str(caught.value)
    here = "test_engine_barriers.py"
    assert f"threads 16-31 wait for syncthreads at {here}:{first + 4}" in report
    assert f"threads 0-15 wait for syncwarp of lanes 0xffffffff at {here}:{first + 2}" in report


def test_reducing_barriers():
    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.syncthreads_count(t < 5)
        out[t, 1] = cuda.syncthreads_and(t < 64)
        out[t, 2] = cuda.syncthreads_and(t != 7)
        out[t, 3] = cuda.syncthreads_or(t == 9)
        out[t, 4] = cuda.syncthreads_or(t > 64)

    out = np.zeros((64, 5), int)
    launch(kernel, out, threads=64)
    assert (out == [5, 1, 0, 1, 0]).all()


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_named_barrier_joins_its_threads_only(seed, race):
    """Warps 0 and 1 meet at barrier 1; warp 2 never comes."""

    def kernel(out):
        thread = current()
        t = cuda.threadIdx.x
        s = cuda.shared.array(96, float32)
        s[t] = t
        if t < 64:
            thread.block.barrier(thread, 1, 64)
            out[t] = s[63 - t]

    out = np.zeros(64)
    with sim.options(seed=seed, race=race):
        launch(kernel, out, threads=96)
    assert out.tolist() == list(range(63, -1, -1))


def test_named_barrier_that_is_never_full_deadlocks():
    def kernel():
        thread = current()
        thread.block.barrier(thread, 3, 64)

    with pytest.raises(sim.Deadlock, match="threads 0-31 wait for barrier 3 of 64 threads"):
        launch(kernel, threads=32)


def test_the_seed_decides_the_schedule():
    def kernel(order):
        at = cuda.atomic.add(order, 0, 1)
        order[1 + at] = cuda.threadIdx.x + 10 * cuda.blockIdx.x

    def schedule(seed):
        order = np.zeros(31, int)
        with sim.options(seed=seed):
            launch(kernel, order, threads=10, blocks=3)
        return order[1:].tolist()

    assert schedule(3) == schedule(3)
    assert schedule(3) != schedule(4)
    assert sorted(schedule(4)) == list(range(30))


def test_a_kernel_without_end_is_reported():
    def kernel(flag):
        while cuda.threadIdx.x < 32 and flag[0] == 0:
            cuda.syncwarp()

    first = kernel.__code__.co_firstlineno
    launch(kernel, np.ones(1), threads=64)
    with sim.options(turns=50), pytest.raises(sim.Endless) as caught:
        launch(kernel, np.zeros(1), threads=64)
    report = str(caught.value)
    assert "no end after 50 turns" in report
    assert f" at test_engine_barriers.py:{first + 2}" in report
