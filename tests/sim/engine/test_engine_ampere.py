"""ldmatrix, and cp.async of 16 bytes in groups: what they do, and what they refuse."""

import numpy as np
import pytest
from hopper_runs import launched, rejected
from mutants import Mutant, rebuilt, without_barrier
from numba import cuda, types

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.asynchrony import cp_async16, cp_async_commit, cp_async_wait
from nbflash.cuda.simulator.hopper import shared_address
from nbflash.cuda.simulator.ldmatrix import ldmatrix

STAGES = 3
TILES = 5


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed):
    """Lane 8 m + r has the address of row r of matrix m; all get words by the manual's formula."""
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    got = np.zeros((32, count), np.uint32)

    def kernel():
        smem, lane = cuda.shared.array(0, types.uint16), cuda.threadIdx.x
        for i in range(8):
            smem[8 * (31 - lane) + i] = matrices.reshape(32, 8)[lane, i]
        cuda.syncwarp()
        got[lane] = ldmatrix(shared_address(smem) + 16 * (31 - lane), count, transposed)

    launched(kernel, threads=32, nbytes=512)
    wanted = matrices.swapaxes(1, 2) if transposed else matrices
    pairs = np.ascontiguousarray(wanted[:count]).reshape(count, 8, 4, 2)
    for lane in range(32):
        words = [pairs[m, lane // 4, lane % 4].view(np.uint32)[0] for m in range(count)]
        np.testing.assert_array_equal(got[lane], words)


def test_ldmatrix_of_a_row_that_is_no_chunk():
    def kernel():
        ldmatrix(shared_address(cuda.shared.array(0, types.uint16)) + 8, 4, False)

    rejected(kernel, "not a multiple of 16")


def test_ldmatrix_takes_all_lanes():
    def kernel():
        if cuda.threadIdx.x != 9:
            ldmatrix(shared_address(cuda.shared.array(0, types.uint16)), 1, False)

    rejected(kernel, "needs all 32 lanes")


def pipeline(x, out):
    """Every thread sends a chunk of each tile, two tiles ahead, and reads another thread's."""
    smem, t = cuda.shared.array(0, types.uint16), cuda.threadIdx.x
    base = shared_address(smem)
    for i in range(STAGES - 1):
        cp_async16(base + (i * 32 + t) * 16, x, (i * 32 + t) * 8, i < TILES)
        cp_async_commit()
    for i in range(TILES):
        cp_async_wait(STAGES - 2)
        cuda.syncthreads()  # the tile is there, the last one read
        ahead = i + STAGES - 1
        cp_async16(
            base + (ahead % STAGES * 32 + t) * 16, x, ahead % TILES * 256 + t * 8, ahead < TILES
        )
        cp_async_commit()
        for e in range(8):
            out[i * 256 + t * 8 + e] = smem[(i % STAGES * 32 + 31 - t) * 8 + e]


FAULTS = [
    Mutant("no wait", "        cp_async_wait(STAGES - 2)\n", ""),
    Mutant("wait for one group too few", "cp_async_wait(STAGES - 2)", "cp_async_wait(STAGES - 1)"),
    without_barrier("the tile is there, the last one read"),
    Mutant("one stage too early", "(ahead % STAGES * 32", "((ahead - 1) % STAGES * 32"),
    Mutant("no group ahead", "        cp_async_commit()\n        for e", "        for e"),
    Mutant("zeros instead", "i < TILES)", "i > TILES)"),
    Mutant("stage that is not there yet", "smem[(i % STAGES", "smem[((i + 1) % STAGES"),
]


def outcome(kernel, seed, *, race):
    """``"right"``, ``"wrong"`` or the name of the error."""
    x = np.arange(TILES * 256, dtype=np.uint16)
    out = np.zeros_like(x)
    with sim.options(seed=seed, race=race):
        try:
            cuda.jit(kernel)[1, 32, 0, STAGES * 512](x, out)
        except sim.SimError as error:
            return type(error).__name__
    wanted = x.reshape(TILES, 32, 8)[:, ::-1].reshape(-1)
    return "right" if np.array_equal(out, wanted) else "wrong"


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_pipeline(seed, race):
    assert outcome(pipeline, seed, race=race) == "right"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_seen_under_every_seed(fault):
    outcomes = {outcome(rebuilt(pipeline, fault), seed, race=True) for seed in range(10)}
    assert "right" not in outcomes


def test_past_the_end_come_zeros():
    got = np.ones(8, np.uint16)

    def kernel(x):
        smem = cuda.shared.array(0, types.uint16)
        cp_async16(shared_address(smem), x, 10**6, False)
        cp_async_commit()
        cp_async_wait(0)
        for e in range(8):
            got[e] = smem[e]

    cuda.jit(kernel)[1, 1, 0, 16](np.arange(8, dtype=np.uint16))
    assert not got.any()
