"""What a CUDA graph records: it keeps plans and their memory, with a CuPy that is not there."""

import contextlib
import sys
import types

import pytest
from cuda_arrays import LSE_SHAPE, DeviceArray, device_arrays

import nbflash
from nbflash.cuda import graphs
from nbflash.distributed.call import device_of_call


class _Graphs:
    """Stands for CuPy while a CUDA graph records the current stream, number 1, or does not."""

    UnownedMemory = types.SimpleNamespace

    def __init__(self, cupy, monkeypatch):
        self.records, self.allocate = True, lambda nbytes: types.SimpleNamespace(mem=nbytes)
        parts = {
            "get_current_stream": lambda: types.SimpleNamespace(ptr=1, synchronize=lambda: None),
            "runtime": types.SimpleNamespace(streamIsCapturing=lambda stream: self.records),
            "get_allocator": lambda: self.allocate,
            "using_allocator": self.using_allocator,
            "UnownedMemory": self.UnownedMemory,
        }
        for name, part in parts.items():
            monkeypatch.setattr(cupy.cuda, name, part, raising=False)
        monkeypatch.setattr(graphs, "_owners", {})
        monkeypatch.setattr(graphs, "_memory", [])

    @contextlib.contextmanager
    def using_allocator(self, allocator):
        before, self.allocate = self.allocate, allocator
        yield
        self.allocate = before


@pytest.mark.parametrize("records", [True, False])
def test_a_graph_keeps_the_plan_and_what_a_call_allocates(records, cupy, executor, monkeypatch):
    """It may be replayed when the cache has forgotten the one, and the pool has the other again."""
    machine = _Graphs(cupy, monkeypatch)
    machine.records = records
    executor.forward = lambda *operands: machine.allocate(100)
    executor.backward = lambda *operands: machine.allocate(200)
    q, k, v, dout, out = device_arrays(5)
    lse = DeviceArray(LSE_SHAPE)
    plan = nbflash.plan(q, k, v, impl="simt")
    plan(q, k, v, out)
    plan.backward(dout, q, k, v, out, lse)
    kept = [memory.mem for memory in graphs._memory]
    assert kept == ([100, 200] if records else [])
    assert list(graphs._owners.values()) == ([plan] if records else [])


@pytest.mark.parametrize("records", [True, False])
def test_a_graph_keeps_what_a_call_over_ranks_allocates(records, cupy, executor, monkeypatch):
    """And its communicator; on the device of its arrays."""
    machine = _Graphs(cupy, monkeypatch)
    machine.records = records
    owners = object(), object()
    with device_of_call(device_arrays(1)[0], *owners):
        machine.allocate(300)
    machine.allocate(400)
    assert {memory.mem for memory in graphs._memory} == ({300} if records else set())
    assert list(graphs._owners.values()) == (list(owners) if records else [])


def test_a_graph_keeps_every_plan_that_it_records(cupy, executor, monkeypatch):
    _Graphs(cupy, monkeypatch)
    q, k, v = device_arrays(3)
    plans = [nbflash.plan(q, k, v, impl="simt", scale=scale) for scale in (0.5, 0.25)]
    for plan in plans:
        plan(q, k, v)
    assert list(graphs._owners.values()) == plans


@pytest.mark.parametrize("stream", [0, 1])
def test_a_graph_of_torch_keeps_every_plan_that_it_records(stream, cupy, monkeypatch):
    """Of one stream, too; nothing is recorded on the legacy one."""
    _Graphs(cupy, monkeypatch)
    current = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device_id: stream)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(_C=current))
    plans = [object(), object()]
    for plan in plans:
        with graphs.recorded_by_torch(0, plan):
            pass
    assert list(graphs._owners.values()) == (plans if stream else [])


def test_a_graph_has_memory_of_other_libraries_already(cupy, executor, monkeypatch):
    machine = _Graphs(cupy, monkeypatch)
    machine.allocate = lambda nbytes: types.SimpleNamespace(mem=machine.UnownedMemory())
    executor.forward = lambda *operands: machine.allocate(100)
    nbflash.attention(*device_arrays(3), impl="simt")
    assert graphs._memory == []
    assert len(graphs._owners) == 1
