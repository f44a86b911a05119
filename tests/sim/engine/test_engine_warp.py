"""Warp primitives and collectives of the simulator, against values worked out by hand."""

import numpy as np
import pytest
from numba import cuda, float32

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.warp import over_lanes, warp_collective

FULL = 0xFFFFFFFF
LANES = np.arange(32)


def each_lane(fn, threads=32):
    """The value of ``fn(lane)`` in every thread of one block."""
    out = np.full(threads, np.nan)

    def kernel(out):
        out[cuda.threadIdx.x] = fn(cuda.threadIdx.x % 32)

    cuda.jit(kernel)[1, threads](out)
    return out


SHUFFLES = {
    "idx": (lambda lane: cuda.shfl_sync(FULL, lane * 10, 5), np.full(32, 50)),
    "idx-wraps": (lambda lane: cuda.shfl_sync(FULL, lane, lane + 1), (LANES + 1) % 32),
    "xor-1": (lambda lane: cuda.shfl_xor_sync(FULL, lane, 1), LANES ^ 1),
    "xor-16": (lambda lane: cuda.shfl_xor_sync(FULL, lane, 16), LANES ^ 16),
    "up": (lambda lane: cuda.shfl_up_sync(FULL, lane, 3), np.where(LANES < 3, LANES, LANES - 3)),
    "down": (
        lambda lane: cuda.shfl_down_sync(FULL, lane, 2),
        np.where(LANES > 29, LANES, LANES + 2),
    ),
    "ballot": (lambda lane: cuda.ballot_sync(FULL, lane % 3 == 0), np.full(32, 0x49249249)),
    "any": (lambda lane: cuda.any_sync(FULL, lane == 31), np.ones(32)),
    "any-none": (lambda lane: cuda.any_sync(FULL, lane == 32), np.zeros(32)),
    "all": (lambda lane: cuda.all_sync(FULL, lane < 32), np.ones(32)),
    "all-but-one": (lambda lane: cuda.all_sync(FULL, lane > 0), np.zeros(32)),
    "match_any": (
        lambda lane: cuda.match_any_sync(FULL, lane // 16),
        np.where(LANES < 16, 0xFFFF, 0xFFFF0000),
    ),
    "match_all": (lambda lane: cuda.match_all_sync(FULL, 7)[0], np.full(32, FULL)),
    "match_all-not": (lambda lane: cuda.match_all_sync(FULL, lane)[1], np.zeros(32)),
    "laneid": (lambda lane: cuda.laneid, LANES),
    "activemask": (lambda lane: (cuda.activemask(), cuda.syncwarp())[0], np.full(32, FULL)),
}


@pytest.mark.parametrize(("fn", "expected"), SHUFFLES.values(), ids=SHUFFLES)
def test_primitive(fn, expected):
    np.testing.assert_array_equal(each_lane(fn, 64), np.tile(expected, 2))


def test_partial_mask():
    def kernel(out):
        lane = cuda.laneid
        if lane < 8:
            out[lane] = cuda.shfl_xor_sync(0xFF, lane, 1) + cuda.ballot_sync(0xFF, lane < 2)

    out = np.zeros(32)
    cuda.jit(kernel)[1, 32](out)
    assert out.tolist() == [4, 3, 6, 5, 8, 7, 10, 9] + [0] * 24


def test_lane_outside_its_own_mask():
    with pytest.raises(sim.SimError, match="lane 8 calls a collective whose mask 0xff leaves"):
        each_lane(lambda lane: cuda.shfl_sync(0xFF if lane == 8 else FULL, lane, 0))


def test_lane_of_the_mask_that_does_not_come():
    def kernel(out):
        if cuda.laneid != 3:
            cuda.ballot_sync(FULL, True)
        else:
            cuda.syncthreads()

    with pytest.raises(sim.Deadlock, match="threads 0-2, 4-31 wait for ballot of lanes 0xff"):
        cuda.jit(kernel)[1, 32](np.zeros(1))


def test_lanes_that_have_left_the_kernel_are_not_waited_for():
    def kernel(out):
        if cuda.threadIdx.x >= 4:
            return
        out[cuda.threadIdx.x] = cuda.ballot_sync(FULL, True)

    out = np.zeros(4)
    cuda.jit(kernel)[1, 32](out)
    assert (out == 0xF).all()


def test_lanes_at_two_lines_do_not_meet():
    def kernel():
        if cuda.laneid < 16:
            cuda.any_sync(FULL, True)
        else:
            cuda.any_sync(FULL, True)

    with pytest.raises(sim.Deadlock, match=r"threads 0-15 wait for any .* threads 16-31 wait"):
        cuda.jit(kernel)[1, 32]()


def total(values, mask):
    return dict.fromkeys(values, sum(values.values()))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_collective_of_a_group(group):
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = warp_collective(total, t, group=group)

    out = np.zeros(256)
    cuda.jit(kernel)[1, 256](out)
    expected = np.arange(256).reshape(-1, group).sum(1).repeat(group)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("group", [32, 128])
def test_over_lanes_sees_whole_operands(group):
    @lambda fn: over_lanes(fn, group)
    def rotate_and_sum(a, b):
        return np.roll(a, 1), np.full(group, b.sum())

    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0], out[t, 1] = rotate_and_sum(float32(t), t)

    out = np.zeros((256, 2))
    cuda.jit(kernel)[1, 256](out)
    t = np.arange(256).reshape(-1, group)
    np.testing.assert_array_equal(out[:, 0], np.roll(t, 1, axis=1).ravel())
    np.testing.assert_array_equal(out[:, 1], t.sum(1).repeat(group))


def test_over_lanes_needs_every_lane():
    first = over_lanes(lambda a: a)

    def kernel():
        if cuda.laneid > 1:
            first(1)

    with pytest.raises(sim.SimError, match=r"needs all 32 lanes, missing \[0, 1\]"):
        cuda.jit(kernel)[1, 32]()


@pytest.mark.parametrize("seed", range(8))
def test_butterfly_sum(seed):
    def kernel(x, out):
        value = x[cuda.threadIdx.x]
        lane_mask = 16
        while lane_mask:
            value = value + cuda.shfl_xor_sync(FULL, value, lane_mask)
            lane_mask //= 2
        out[cuda.threadIdx.x] = value

    x, out = np.random.default_rng(seed).integers(0, 99, 64), np.zeros(64)
    with sim.options(seed=seed):
        cuda.jit(kernel)[1, 64](x, out)
    np.testing.assert_array_equal(out, x.reshape(2, 32).sum(1).repeat(32))


def test_interpreter_specialisation_does_not_move_a_call_site():
    """Half the lanes run the helper before, half after the interpreter specialises it."""

    def combined(x, combine):
        for lane_mask in (2, 1):
            x = combine(x, cuda.shfl_xor_sync(FULL, x, lane_mask))
        return x

    def kernel(out):
        t = cuda.threadIdx.x
        sums = tuple(combined(x, lambda a, b: a + b) for x in (t, 2 * t))
        out[t] = sums[1] - sums[0]

    out = np.zeros(32)
    cuda.jit(kernel)[1, 32](out)
    np.testing.assert_array_equal(out, np.arange(32).reshape(-1, 4).sum(1).repeat(4))
