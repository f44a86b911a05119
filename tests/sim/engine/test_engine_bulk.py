"""Bulk copies to global memory, and matrices of a warp: what they do and what they refuse."""

import numpy as np
import pytest
from hopper_runs import BASE, image, launched, memory, races, rejected
from numba import cuda

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.hopper import (
    SimTensorMap,
    bulk_add,
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    fence_proxy_async,
    global_address,
    stmatrix4,
    tma_store_4d,
)
from nbflash.cuda.tile.wgmma.store_shared import make_store_fragment, matrix_row

ROWS, COLUMNS = 64, 128


def matrix(seed=0):
    return np.random.default_rng(seed).integers(1, 60000, (ROWS, COLUMNS)).astype(np.uint16)


def fragment(x, thread):
    """The packed words of a thread: of each 16 columns rows r, r + 8, then 8 columns on."""
    row, quad, words = thread // 32 * 16 + thread % 32 // 4, thread % 4, []
    for j in range(COLUMNS // 8):
        for r in (row, row + 8):
            pair = x[r, 8 * j + 2 * quad : 8 * j + 2 * quad + 2]
            words.append(np.uint32(int(pair[0]) | int(pair[1]) << 16))
    return tuple(words)


def test_fragments_become_swizzled_panels():
    x, out = matrix(), np.zeros(ROWS * COLUMNS, np.uint16)
    store = make_store_fragment(COLUMNS, ROWS)

    def kernel(out):
        s, t = memory(), cuda.threadIdx.x
        store(matrix_row(np.uint32(BASE), t), fragment(x, t))
        cuda.syncthreads()
        if t == 0:
            out[:] = np.array(s[: out.size])

    launched(kernel, out, threads=128)
    np.testing.assert_array_equal(out, image(x))


def stored(array, at, *, seed=0, race=False, fence=True, wait=True, spoil=False):
    """Store one box of 64 × 64 from shared memory; whoever does, waits."""
    x = matrix()[:, :64]
    words, tensor = image(x), SimTensorMap(array, ROWS)

    def kernel():
        s, t = memory(), cuda.threadIdx.x
        if t == 0:
            for i, word in enumerate(words):
                s[i] = word
            if fence:
                fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            tma_store_4d(tensor, *at, BASE)
            bulk_commit()
            if wait:
                bulk_wait_read()
            if spoil:
                s[7] = np.uint16(s[7] ^ 1)

    with sim.options(seed=seed, race=race):
        launched(kernel, threads=32)
    return x


@races
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "at", [(0, 0, 0, 0), (64, 0, 1, 1), (0, 32, 2, 0), (64, 60, 0, 1), (0, 99, 0, 0), (0, 0, 3, 0)]
)
def test_a_box_is_written_as_far_as_the_tensor_goes(at, seed, race):
    shape = 2, 70, 3, 104
    array = np.zeros(shape, np.uint16)
    x = stored(array, at, seed=seed, race=race)
    column, row, head, batch = at
    expected = np.zeros(shape, np.uint16)
    if head < shape[2]:
        part = expected[batch, row : row + ROWS, head, column : column + 64]
        part[...] = x[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(array, expected)


def test_a_source_must_last_until_it_is_read():
    array = np.zeros((1, 64, 1, 64), np.uint16)
    stored(array, (0, 0, 0, 0), spoil=True)
    found = []
    for seed in range(10):
        try:
            stored(array, (0, 0, 0, 0), seed=seed, wait=False, spoil=True)
        except sim.SimError as error:
            found.append(str(error))
    assert found
    assert all("changed between its issue and its end" in text for text in found)


def test_a_store_without_a_fence_is_a_race():
    with pytest.raises(sim.Race, match="no fence_proxy_async between"):
        stored(np.zeros((1, 64, 1, 64), np.uint16), (0, 0, 0, 0), race=True, fence=False)


@races
@pytest.mark.parametrize("seed", range(4))
def test_bulk_additions_add_up(seed, race):
    sums = np.zeros(32, np.float32)

    def kernel(sums):
        s, t = memory(), cuda.threadIdx.x
        if t < 2:
            mine = s[64 * t : 64 * t + 64].view(np.float32)
            for i in range(32):
                mine[i] = np.float32(i + t)
            fence_proxy_async()
        cuda.syncthreads()
        if t < 2:
            bulk_add(global_address(sums, 0), BASE + 128 * t, 128)
            bulk_commit()
            bulk_wait()

    with sim.options(seed=seed, race=race):
        launched(kernel, sums, threads=32)
    np.testing.assert_array_equal(sums, 2 * np.arange(32) + 1)


def test_what_is_not_aligned_is_refused():
    array = np.zeros((1, 64, 1, 64), np.uint16)
    words = (np.uint32(0),) * 4
    rejected(
        lambda: tma_store_4d(SimTensorMap(array, 64), 0, 0, 0, 0, BASE + 16),
        "not a multiple of 1024",
        threads=1,
    )
    rejected(lambda: stmatrix4(BASE + 8, words), "not a multiple of 16")
