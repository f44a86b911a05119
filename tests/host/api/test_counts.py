"""Counts of decode's row tiles: no two calls that may run at the same time share a set."""

import numpy as np
import pytest
from cuda_arrays import DeviceArray
from hypothesis import given
from hypothesis import strategies as st

from nbflash.cuda import device as cuda_devices
from nbflash.cuda.device import Gpu
from nbflash.inputs.decode_problem import Cache, check_decode, decode_inputs
from nbflash.planning import decode_plan
from nbflash.planning.decode_plan import _PER_THREAD, _SETS, _Counts


class Memory:
    """What a device gives: a number for each row of an array."""

    @staticmethod
    def resident(tables):
        return tables

    @staticmethod
    def rows(x):
        assert not x.any()
        return range(len(x))


@given(st.lists(st.tuples(st.integers(0, _SETS + 3), st.booleans()), max_size=3 * _SETS))
def test_streams_and_graphs_have_sets_of_their_own(calls):
    """A stream keeps the set it found; a graph's set is nobody else's, ever."""
    counts, users, known = _Counts(Memory, 3), {}, {}
    for number, (stream, capturing) in enumerate(calls):
        found = counts.find(stream, capturing)
        if stream == _PER_THREAD and not capturing:
            assert found is None
        if stream in known and not capturing:
            assert found == known[stream]
        if found is not None:
            user = ("graph", number) if capturing else ("stream", stream)
            assert users.setdefault(found, user) == user
            if not capturing:
                known[stream] = found
    assert len(users) <= _SETS


@pytest.mark.parametrize("capturing", [False, True], ids=["streams", "graphs"])
def test_every_set_is_given_out(capturing):
    counts = _Counts(Memory, np.int64(1))
    streams = [s for s in range(_SETS + 2) if s != _PER_THREAD]
    found = [counts.find(s, capturing) for s in streams]
    assert found == [*range(_SETS), None]


def test_sets_on_a_device_lie_one_behind_the_other():
    sets = DeviceArray((3, 5), np.uint32)
    first = sets.data.ptr
    assert list(Gpu.rows(None, sets)) == [first, first + 4 * 5, first + 2 * 4 * 5]


class Recording(Memory):
    """On the default stream of every thread's own; remembers what it is asked for."""

    def __init__(self):
        self.cleared = []

    def scratch(self, shapes, dtype):
        self.shapes, self.dtype = shapes, dtype
        return lambda: ("memory", ("part_o", "part_lse", "lse", "counts"))

    @staticmethod
    def stream():
        return _PER_THREAD, False

    def clear(self, address, nbytes, stream):
        self.cleared.append((address, nbytes, stream))


class Partial:
    """Of the first kernel: five row tiles that are counted."""

    splits, counted = 3, 5

    def __call__(self, q, cache, *given):
        self.given = given


def test_a_call_clears_its_own_counts_and_nothing_else(monkeypatch):
    """Behind them in its scratch memory there may be another call's."""
    device, partial = Recording(), Partial()
    monkeypatch.setattr(cuda_devices, "cuda_device", lambda *which: device)
    q, k = np.zeros((2, 1, 4, 8), np.float32), np.zeros((2, 6, 2, 8), np.float32)
    arrays = decode_inputs(q, Cache(k, k, np.array([3, 6], np.int32)))
    problem = check_decode(*arrays)
    decoder = decode_plan.CudaDecoder(problem, None, *arrays, lambda *given: partial)
    assert device.shapes == ((3, 2, 1, 4, 8), (3, 2, 4, 1), (2, 4, 1), (5,))
    assert device.dtype == "float32"
    decoder.write(*arrays, "out")
    assert device.cleared == [("counts", 4 * 5, _PER_THREAD)]
    assert partial.given == ("part_o", "part_lse", "out", "lse", "counts")
    decoder.write(*arrays, "out", "own lse")
    assert partial.given == ("part_o", "part_lse", "out", "own lse", "counts")
