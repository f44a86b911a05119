"""Shared, local and global memory of the simulator: poison, bounds, aliasing, limits."""

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float16, float32, float64, int32, int64, uint16, uint32

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.storage import STATIC_SHARED_LIMIT


def run(kernel, *args, threads=1, dynamic=0):
    cuda.jit(kernel)[1, threads, 0, dynamic](*args)


@pytest.mark.parametrize("dtype", [float16, float32, float64], ids=str)
@pytest.mark.parametrize("space", ["static", "dynamic", "local"])
def test_uninitialised_memory_reads_nan(space, dtype):
    def kernel(out):
        if space == "static":
            a = cuda.shared.array(4, dtype)
        elif space == "dynamic":
            a = cuda.shared.array(0, dtype)
        else:
            a = cuda.local.array(4, dtype)
        out[0] = a[3]

    out = np.zeros(1)
    run(kernel, out, dynamic=32)
    assert np.isnan(out[0])


def test_uninitialised_integers_are_no_index():
    def kernel(out):
        a = cuda.shared.array(4, int32)
        out[a[0]] = 1

    with pytest.raises(sim.OutOfBounds, match="negative index -1"):
        run(kernel, np.zeros(4))


def test_poison_can_be_turned_off():
    def kernel(out):
        out[0] = cuda.shared.array(4, float32)[0] + cuda.local.array(4, float32)[0]

    out = np.full(1, np.nan)
    with sim.options(poison=False):
        run(kernel, out)
    assert out[0] == 0


def shared_1d(i):
    cuda.shared.array(8, float32)[i] = 1


def shared_2d(i):
    cuda.shared.array((3, 8), float32)[1, i] = 1


def shared_3d(i):
    cuda.shared.array((2, 3, 8), float32)[1, 1, i] = 1


def local_1d(i):
    cuda.local.array(8, float32)[i] = 1


def read_1d(i):
    return cuda.shared.array(8, float32)[i]


def read_2d(i):
    return cuda.shared.array((3, 8), float32)[1, i]


def read_3d(i):
    return cuda.shared.array((2, 3, 8), float32)[1, 1, i]


def add_1d(i):
    cuda.atomic.add(cuda.shared.array(8, float32), i, float32(1))


def vector_of_four(i):
    return tuple(cuda.shared.array(8, float32)[i : i + 4])


def store_of_four(i):
    cuda.shared.array(8, float32)[i : i + 4] = (1, 2, 3, 4)


def vector_in_a_row(i):
    return tuple(cuda.shared.array((3, 8), float32)[1, i : i + 4])


def vector_as_one_access(i):
    return cuda.shared.array(8, float32).vector(i, 4)


ELEMENT = [shared_1d, shared_2d, shared_3d, local_1d, read_1d, read_2d, read_3d, add_1d]
VECTOR = [vector_of_four, vector_as_one_access, store_of_four, vector_in_a_row]


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("index", [-1, -8, 8, 100, np.int32(-1), np.int64(8)], ids=repr)
@pytest.mark.parametrize("access", ELEMENT, ids=lambda f: f.__name__)
def test_element_outside_its_array_raises(access, index, race):
    with (
        sim.options(race=race),
        pytest.raises(sim.OutOfBounds, match=r"thread \(0, 0, 0\) of block \(0, 0, 0\): .*index"),
    ):
        run(access, index)


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("index", [-1, -4, 5, 8, np.int32(6)], ids=repr)
@pytest.mark.parametrize("access", VECTOR, ids=lambda f: f.__name__)
def test_vector_past_the_end_raises(access, index, race):
    with (
        sim.options(race=race),
        pytest.raises(sim.OutOfBounds, match=f"slice {index}:{index + 4} is out of bounds"),
    ):
        run(access, index)


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("access", ELEMENT + VECTOR, ids=lambda f: f.__name__)
def test_access_inside_its_array_is_silent(access, race):
    with sim.options(race=race):
        run(access, 0)
        run(access, 4)


@pytest.mark.parametrize("index", [(0, -1), (2, 0), (0, 4)], ids=str)
def test_global_array_is_checked(index):
    def kernel(x):
        x[index] = 1

    x = np.zeros((2, 4), np.float32)
    with pytest.raises(sim.OutOfBounds, match="index"):
        run(kernel, x)
    assert not x.any()


def test_strided_slice_is_not_device_code():
    def kernel(x):
        x[0:4:2] = 1

    with pytest.raises(sim.SimError, match="slice step 2"):
        run(kernel, np.zeros(8))


def test_a_vector_holds_the_elements_in_order():
    def kernel(x, out):
        a, b, c, d = tuple(x[2:6])
        out[1:5] = (d, c, b, a)
        out[5:8] = x.vector(1, 3)

    for race in (False, True):
        x, out = np.arange(8, dtype=np.float32), np.full(8, -1.0, np.float32)
        with sim.options(race=race):
            run(kernel, x, out)
        assert out.tolist() == [-1, 5, 4, 3, 2, 1, 2, 3]


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_vector_access_needs_its_alignment(race):
    def kernel(x, index, count):
        x.store(index, tuple(2 * value for value in x.load(index, count)))

    x = np.arange(12, dtype=np.float32)
    with sim.options(race=race):
        run(kernel, x, 4, 4)
        run(kernel, x, 10, 2)
        for index, count in ((1, 4), (2, 4), (5, 2)):
            with pytest.raises(sim.SimError, match=f"element {index} is not aligned to a vector"):
                run(kernel, x, index, count)
        with pytest.raises(sim.SimError, match="not aligned"):
            run(kernel, x[1:], 0, 4)
        with pytest.raises(sim.SimError, match="not aligned"):
            run(kernel, x[::2], 0, 4)
        with pytest.raises(sim.OutOfBounds, match="slice 12:16"):
            run(kernel, x, 12, 4)
    assert x.tolist() == [0, 1, 2, 3, 8, 10, 12, 14, 8, 9, 20, 22]


def test_dynamic_shared_memory_is_one_buffer_of_any_type():
    def kernel(out):
        words, halves = cuda.shared.array(0, uint32), cuda.shared.array(0, uint16)
        tail = cuda.shared.array(0, float32)[2:]
        words[0] = 0x00020001
        tail[1] = 3.5
        out[0], out[1], out[2], out[3] = halves[0], halves[1], len(words), tail[1]

    out = np.zeros(4)
    run(kernel, out, dynamic=18)
    assert out.tolist() == [1, 2, 4, 3.5]


def test_threads_share_static_arrays_but_two_on_a_line_are_two():
    def kernel(out):
        t = cuda.threadIdx.x
        a, b = cuda.shared.array(4, float32), cuda.shared.array(4, float32)
        a[t], b[t] = t, 10 * t
        cuda.syncthreads()
        out[t] = a[3 - t] + b[3 - t]

    out = np.zeros(4)
    run(kernel, out, threads=4)
    assert out.tolist() == [33, 22, 11, 0]


def test_a_helper_called_twice_has_two_shared_arrays():
    def helper(value):
        a = cuda.shared.array(1, float32, alignment=128)
        a[0] = value
        return a

    def kernel(out):
        first = helper(1)
        second = helper(2)
        out[0], out[1] = first[0], second[0]

    out = np.zeros(2)
    run(kernel, out)
    assert out.tolist() == [1, 2]


def test_local_arrays_are_private_and_take_an_alignment():
    def kernel(out):
        t = cuda.threadIdx.x
        a = cuda.local.array(2, float32, alignment=16)
        a[0] = t
        cuda.syncthreads()
        out[t] = a[0]

    out = np.zeros(4)
    run(kernel, out, threads=4)
    assert out.tolist() == [0, 1, 2, 3]


def test_shared_memory_does_not_survive_its_block():
    def kernel(out):
        a = cuda.shared.array(1, float32)
        out[cuda.blockIdx.x] = a[0]
        a[0] = 1

    out = np.zeros(8)
    cuda.jit(kernel)[8, 1](out)
    assert np.isnan(out).all()


def test_shared_memory_limits():
    def static():
        cuda.shared.array(STATIC_SHARED_LIMIT // 8 + 1, int64)

    with pytest.raises(sim.SimError, match="49160 bytes of static shared memory"):
        run(static)
    with pytest.raises(sim.SimError, match="232449 bytes of dynamic shared memory"):
        run(lambda: None, dynamic=227 * 1024 + 1)
    run(lambda: None, dynamic=227 * 1024)


def test_bfloat16_is_carried_as_bits():
    from numba.cuda import types

    with pytest.raises(sim.SimError, match="bfloat16 as uint16"):
        run(lambda: cuda.shared.array(1, types.bfloat16))


def test_constants_are_read_only():
    table = np.array([3.0, 4.0])

    def read(out):
        out[0] = cuda.const.array_like(table)[1]

    def write():
        cuda.const.array_like(table)[1] = 0

    out = np.zeros(1)
    run(read, out)
    assert out[0] == 4
    with pytest.raises(ValueError, match="read-only"):
        run(write)
