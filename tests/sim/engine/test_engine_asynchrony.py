"""Asynchronous copies in a pipeline of two stages and between barriers, right and wrong.

Bulk copies: warp 0 copies rows into two stages and signals ``full[s]``; warp 1 multiplies and
signals ``empty[s]``. ``cp.async``: every thread sends four elements and reads another's. Each
fault is caught under every seed, by a wrong result or by a report.
"""

import numpy as np
import pytest
from mutants import Mutant, rebuilt, without_barrier
from numba import cuda, float32, int64

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.asynchrony import (
    bulk_copy_g2s,
    cp_async,
    cp_async_wait_all,
    mbar_arrive,
    mbar_arrive_expect_tx,
    mbar_init,
    mbar_wait,
)

SEEDS = range(10)
ROWS = 7


def pipeline(x, out, n):
    stages = cuda.shared.array((2, 32), float32)
    full = cuda.shared.array(2, int64)
    empty = cuda.shared.array(2, int64)
    lane, warp = cuda.laneid, cuda.threadIdx.x // 32
    if cuda.threadIdx.x == 0:
        for s in range(2):
            mbar_init(full, s, 1)
            mbar_init(empty, s, 32)
    cuda.syncthreads()
    if warp == 0:
        if lane == 0:
            for j in range(n):
                s, phase = j % 2, j // 2 % 2
                mbar_wait(empty, s, phase ^ 1)
                mbar_arrive_expect_tx(full, s, 128)
                bulk_copy_g2s(stages[s], x[j], full, s)
    else:
        acc = float32(0)
        for j in range(n):
            s, phase = j % 2, j // 2 % 2
            mbar_wait(full, s, phase)
            acc += stages[s, lane] * stages[s, 31 - lane]
            mbar_arrive(empty, s)
        out[lane] = acc


FAULTS = [
    Mutant("consumer does not wait", "            mbar_wait(full, s, phase)\n", ""),
    Mutant("producer does not wait", "                mbar_wait(empty, s, phase ^ 1)\n", ""),
    Mutant("phase never flips", "mbar_wait(full, s, phase)", "mbar_wait(full, s, 0)"),
    Mutant(
        "release before the last read",
        """            acc += stages[s, lane] * stages[s, 31 - lane]
            mbar_arrive(empty, s)
""",
        """            mbar_arrive(empty, s)
            acc += stages[s, lane] * stages[s, 31 - lane]
""",
    ),
    Mutant("empty counts one arrival", "mbar_init(empty, s, 32)", "mbar_init(empty, s, 1)"),
    Mutant("expects twice the bytes", "full, s, 128", "full, s, 256"),
    Mutant("no barrier after init", "    cuda.syncthreads()\n", ""),
    Mutant("consumer never releases", "            mbar_arrive(empty, s)\n", ""),
    Mutant("copies into the other stage", "bulk_copy_g2s(stages[s]", "bulk_copy_g2s(stages[1 - s]"),
]


def outcome(kernel, seed, *, race):
    """``"right"``, ``"wrong"`` or the name of the error."""
    x = np.random.default_rng(seed).integers(-4, 5, (ROWS, 32)).astype(np.float32)
    out = np.full(32, np.nan, np.float32)
    with sim.options(seed=seed, race=race):
        try:
            cuda.jit(kernel)[1, 64](x, out, ROWS)
        except sim.SimError as error:
            return type(error).__name__
    return "right" if np.array_equal(out, (x * x[:, ::-1]).sum(0)) else "wrong"


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("seed", SEEDS)
def test_correct_pipeline(seed, race):
    assert outcome(pipeline, seed, race=race) == "right"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_fault_is_caught(fault, seed):
    assert outcome(rebuilt(pipeline, fault), seed, race=True) != "right"


@pytest.mark.parametrize("fault", [f for f in FAULTS if "no barrier" not in f.name], ids=str)
def test_some_schedule_shows_the_fault_without_race_detection(fault):
    kernel = rebuilt(pipeline, fault)
    assert {outcome(kernel, seed, race=False) for seed in SEEDS} != {"right"}


def test_deadlock_names_the_mbarrier():
    kernel = rebuilt(pipeline, FAULTS[5])
    with pytest.raises(
        sim.Deadlock,
        match=r"threads 32-63 wait for mbarrier 0 \(made at .*:8\), parity 0 at .*:22",
    ):
        cuda.jit(kernel)[1, 64](np.zeros((ROWS, 32), np.float32), np.zeros(32), ROWS)


def test_mbarrier_before_init():
    def kernel():
        mbar_wait(cuda.shared.array(2, int64), 1, 0)

    with pytest.raises(sim.SimError, match="mbarrier 1 is used before mbar_init"):
        cuda.jit(kernel)[1, 1]()


def test_mbarrier_with_too_many_arrivals():
    """Three bytes are outstanding, so the phase cannot complete between the arrivals."""

    def kernel():
        bar = cuda.shared.array(1, int64)
        mbar_init(bar, 0, 1)
        mbar_arrive_expect_tx(bar, 0, 3)
        mbar_arrive(bar, 0)

    with pytest.raises(sim.SimError, match="more arrivals than its count 1"):
        cuda.jit(kernel)[1, 1]()


def test_copy_of_another_size():
    def kernel(x):
        bar, s = cuda.shared.array(1, int64), cuda.shared.array(8, float32)
        mbar_init(bar, 0, 1)
        bulk_copy_g2s(s, x, bar, 0)

    with pytest.raises(sim.SimError, match="bulk copy of 16 bytes into 32"):
        cuda.jit(kernel)[1, 1](np.zeros(4, np.float32))


THREADS = 48


def relay(x, out, n):
    s = cuda.shared.array(4 * THREADS, float32)
    t = cuda.threadIdx.x
    for j in range(n):
        cuda.syncthreads()  # every thread has read the last row
        cp_async(s, 4 * t, x, 4 * (j * THREADS + t), 4)
        cuda.syncthreads()  # all copies are on their way
        cp_async_wait_all()
        cuda.syncthreads()  # the row is in place
        for i in range(4):
            out[j, 4 * t + i] = s[4 * (THREADS - 1 - t) + i]


RELAY_FAULTS = [
    Mutant("no wait", "        cp_async_wait_all()\n", ""),
    Mutant("one thread waits", "cp_async_wait_all()", "t == 0 and cp_async_wait_all()"),
    without_barrier("the row is in place"),
    without_barrier("every thread has read the last row"),
    Mutant("half of the elements", "+ t), 4)", "+ t), 2)"),
]


def relayed(kernel, seed, *, race):
    """``"right"``, ``"wrong"`` or the name of the error."""
    x = np.random.default_rng(seed).standard_normal((ROWS, THREADS, 4)).astype(np.float32)
    out = np.full((ROWS, 4 * THREADS), np.nan, np.float32)
    with sim.options(seed=seed, race=race):
        try:
            cuda.jit(kernel)[1, THREADS](x.reshape(-1), out, ROWS)
        except sim.SimError as error:
            return type(error).__name__
    return "right" if np.array_equal(out, x[:, ::-1].reshape(out.shape)) else "wrong"


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_there_after_wait_and_barrier(seed, race):
    assert relayed(relay, seed, race=race) == "right"


@pytest.mark.parametrize("fault", RELAY_FAULTS, ids=str)
@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_relay_fault_is_caught(fault, race):
    kernel = rebuilt(relay, fault)
    assert "right" not in {relayed(kernel, seed, race=race) for seed in SEEDS}


def test_a_barrier_before_the_wait_orders_nothing():
    kernel = rebuilt(relay, without_barrier("the row is in place"))
    assert {relayed(kernel, seed, race=True) for seed in SEEDS} == {"Race"}


def sent(to, at, n=8, dtype=np.float32, barriers=0, wait=False):
    """What one thread finds after sending four elements of ``n``."""

    def kernel(x, out):
        s = cuda.shared.array(8, float32)
        cp_async(s, to, x, at, 4)
        for _ in range(barriers):
            cuda.syncthreads()
        if wait:
            cp_async_wait_all()
        for i in range(4):
            out[i] = s[to + i]

    out = np.zeros(4, np.float32)
    cuda.jit(kernel)[1, 1](np.arange(n, dtype=dtype), out)
    return out.tolist()


def test_own_copy_is_there_after_the_wait():
    assert sent(4, 0, wait=True) == [0, 1, 2, 3]
    assert sent(0, 4, wait=True, barriers=9) == [4, 5, 6, 7]


def test_own_copy_is_not_there_before_the_wait():
    assert np.isnan(sent(4, 0)).all()


def test_the_schedule_chooses_when_a_copy_lands():
    early = set()
    for seed in range(20):
        with sim.options(seed=seed):
            early.add(str(sent(4, 0, barriers=12)))
    assert early == {str([0.0, 1.0, 2.0, 3.0]), str([np.nan] * 4)}


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"to": 2, "at": 0}, sim.SimError, "element 2 is not aligned to a vector of 16 bytes"),
        ({"to": 0, "at": 3}, sim.SimError, "element 3 is not aligned to a vector of 16 bytes"),
        ({"to": 8, "at": 0}, sim.OutOfBounds, "slice 8:12 is out of bounds"),
        ({"to": -4, "at": 0}, sim.OutOfBounds, "slice -4:0 is out of bounds"),
        ({"to": 0, "at": 4, "n": 7}, sim.OutOfBounds, "slice 4:8 is out of bounds"),
        ({"to": 0, "at": 0, "dtype": np.float64}, sim.SimError, "cp.async of float64 into float32"),
    ],
    ids=["to", "from", "to-past", "to-before", "from-past", "dtype"],
)
def test_copies_that_a_gpu_would_trap(arguments, error, match, race):
    with sim.options(race=race), pytest.raises(error, match=match):
        sent(**arguments, wait=True)
