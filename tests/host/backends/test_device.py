"""A device on a CuPy that is not there: memory, words, tensor maps and bound kernels."""

import gc
import itertools
import math
import struct
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_arrays import DeviceArray

from nbflash.cuda import kinds, launch, tensor_map
from nbflash.cuda.device import SHARED_MEMORY, Gpu, Recording, Simulated, TorchGpu
from nbflash.cuda.dropout_state import DropoutState
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.inputs.positions import Positions


class Chip:
    """What CuPy says of a GPU."""

    def __init__(self, number, capability="86"):
        self.attributes = {"MaxSharedMemoryPerBlockOptin": 101376, "MultiProcessorCount": 84}
        self.number, self.compute_capability, self.current = number, capability, False

    def __enter__(self):
        self.current = True

    def __exit__(self, *_):
        self.current = False


@pytest.fixture
def machine(cupy, monkeypatch):
    """CuPy's side: what is asked of it is noted."""
    found = SimpleNamespace(cleared=[], allocated=[], stream=0, capturing=False, capability="86")
    found.resident = []

    def alloc(nbytes):
        found.allocated.append(nbytes)
        return SimpleNamespace(ptr=1 << 30)

    def resident(tables):
        found.resident.append([np.asarray(x).copy() for x in tables])
        return [DeviceArray(x.shape, x.dtype) for x in tables]

    cupy.cuda.alloc = alloc
    cupy.cuda.Device = lambda n: Chip(n, found.capability)
    cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=found.stream)
    cupy.cuda.runtime = SimpleNamespace(
        streamIsCapturing=lambda stream: found.capturing,
        memsetAsync=lambda *given: found.cleared.append(given),
    )
    monkeypatch.setattr("nbflash.inputs.arrays.resident", resident)
    return found


@pytest.mark.parametrize(
    ("capability", "pair", "red", "copies"),
    [
        ("75", (7, 5), False, False),
        ("80", (8, 0), False, True),
        ("89", (8, 9), False, True),
        ("90", (9, 0), True, True),
        ("120", (12, 0), True, True),
    ],
)
def test_what_a_device_has(machine, capability, pair, red, copies):
    machine.capability = capability
    device = Gpu(3)
    assert device.capability == pair
    assert (device.vector_red, device.cp_async) == (red, copies)
    assert (device.smem_limit, device.multiprocessors) == (101376, 84)
    recording = Recording(pair)
    assert (recording.vector_red, recording.cp_async) == (red, copies)
    ((zeros,),) = machine.resident
    assert (zeros.tolist(), zeros.dtype) == ([0, 0], np.uint64)


def test_shared_memory_by_compute_capability():
    """CUDA programming guide, technical specifications: KB that a block may have."""
    by_capability = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}
    by_capability |= {(10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}
    assert {which: 1024 * n for which, n in by_capability.items()} == SHARED_MEMORY
    assert (Simulated.smem_limit, Simulated.capability) == (227 * 1024, (9, 0))
    assert Recording.multiprocessors == 132


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64, np.uint8])
def test_temporary_arrays_are_aligned_and_apart(machine, dtype):
    shapes = [(3, 5), (1,), (4, 4, 2), (7,), (16,)]
    memory, starts = Gpu(0).scratch(shapes, dtype)()
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
    assert memory.ptr == starts[0] == 1 << 30
    assert all(start % 16 == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    gaps = [b - a for a, b in zip(ends, starts[1:], strict=False)]
    assert all(0 <= gap < 16 for gap in gaps)
    (total,) = machine.allocated
    assert 0 <= starts[0] + total - ends[-1] < 16


def test_streams_words_and_rows(machine):
    device = Gpu(0)
    for stream, capturing in itertools.product((0, 7), (False, True)):
        machine.stream, machine.capturing = stream, capturing
        assert device.stream() == (stream, bool(stream) and capturing)
    device.clear(4096, 100, 7)
    assert machine.cleared == [(4096, 0, 100, 7)]
    x, y = DeviceArray((3, 5), np.float16), DeviceArray((2,), np.int32)
    a, b = x.data.ptr, y.data.ptr
    assert device.words((x, y, 77), (1, 2), [3]) == [a, b, 77, 1, 2, 3]
    assert device.places([x, y]) == [a, 3, 5, b, 2]
    assert [*device.rows(x)] == [a, a + 10, a + 20]
    assert [(z.shape, z.dtype) for z in device.integers((3, 1))] == [((3,), "i4"), ((1,), "i4")]
    assert device.state((5, 6)) == (5, 6, device._zeros.data.ptr)
    assert device.state(x) == (0, 0, a)
    for dropout, expected in ((0.0, ()), (0.5, (5, 6, device._zeros.data.ptr))):
        spec = SimpleNamespace(dropout=dropout, positions=None)
        assert DropoutState(device, spec)((5, 6)) == expected


def test_places_of_tokens_lie_behind_dropouts_state(machine):
    """By 64 tokens: what is added to the number of a query, and of a key."""
    device, tokens = Gpu(0), np.r_[128:192, 0:64]
    spec = SimpleNamespace(dropout=0.5, positions=Positions(tokens, tokens[64:]))
    state = DropoutState(device, spec)
    given = machine.resident[-1]
    assert [x[:2].tolist() for x in given] == [[128, 2**32 - 64], [0, 0]]
    assert state((5, 6))[:3] == (5, 6, device._zeros.data.ptr)
    assert len({*state((5, 6))[3:]}) == 2
    assert state((5, 6)) == state((5, 6))


class Table:
    """In the memory of a device as long as it is there."""


def test_places_of_tokens_stay_in_memory():
    made = weakref.WeakSet()

    def resident(tables):
        found = [Table() for _ in tables]
        made.update(found)
        return found

    device = SimpleNamespace(resident=resident, address=id)
    spec = SimpleNamespace(dropout=0.5, positions=Positions(np.arange(64), np.arange(64)))
    state = DropoutState(device, spec)
    gc.collect()
    assert len(made) == 2
    assert set(map(id, made)) == set(state._addresses)


def test_memory_and_streams_of_torch(machine, monkeypatch):
    asked = []
    torch = SimpleNamespace(
        uint8="uint8",
        device=lambda *which: which,
        empty=lambda n, **how: SimpleNamespace(data_ptr=lambda: 2048, n=n, how=how),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda n: asked.append(n) or 5),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = TorchGpu(2)
    memory, starts = device.scratch([(3,), (4,)], np.float32)()
    assert (memory.n, memory.how) == (32, {"dtype": "uint8", "device": ("cuda", 2)})
    assert starts == [2048, 2064]
    machine.capturing = True
    assert device.stream() == (5, True)
    assert asked == [2]


CONFIG = SimpleNamespace(threads=64, min_blocks=1, smem_bytes=512)
NUMBERS = kinds.pointer(kinds.int32)


def _bound(monkeypatch, launched):
    """`launch.bind` that notes trailing words and launches."""

    def bind(spec, blocks, trailing, *how):
        def run(leading, maps=(), words=()):
            launched.append((blocks, [*leading], [*maps], [*words]))

        run.trailing, run.how = [*trailing], how
        run.is_cold = lambda: "cold"
        return run

    monkeypatch.setattr(launch, "bind", bind)


def test_bound_words_are_constants_tables_and_what_is_more(machine, monkeypatch):
    launched, device = [], Gpu(1)
    _bound(monkeypatch, launched)
    table, parameter = np.arange(6, dtype=np.int32), DeviceArray((2, 3), np.float32)
    run = device.bind("spec", 9, (1, (2, 3)), [table], ((4, parameter), 5))
    of_parameter = [0, 0, 6, 4, parameter.data.ptr, 2, 3, 12, 4]
    (held,), more = run.tables
    assert run.trailing == [1, 2, 3, held.data.ptr, 4, *of_parameter, 5]
    assert more == ((4, parameter), 5)
    number, capability, stream = run.how
    assert (number, capability, stream()) == (1, (8, 6), 0)
    np.testing.assert_array_equal(machine.resident[-1][0], table)


def test_tables_of_a_call_take_the_place_of_zeros(machine, monkeypatch):
    launched, device = [], Gpu(1)
    _bound(monkeypatch, launched)

    def tables(indices, counts):
        return [indices, counts, 30], "memory"

    by_lists = type("Tables", (), {"count": 3, "__call__": lambda self, x: tables(*x)})()
    run = device.bind("spec", 9, (1, (2, 3)), by_lists, ((4,), 5))
    assert run.is_cold() == "cold"
    run([8], ["map"], (10, 20))
    assert launched == [(9, [8], ["map"], [10, 20, 30])]
    bound = []
    monkeypatch.setattr(launch, "bind", lambda *given: bound.append(given))
    device.bind("spec", 9, (1, (2, 3)), by_lists, ((4,), 5))
    ((_, _, trailing, *_, late),) = bound
    assert [*trailing] == [1, 2, 3, 0, 0, 0, 4, 5]
    assert late == 3


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (kinds.int32, -5, "<i"),
        (kinds.int64, -5, "<q"),
        (kinds.uint32, 2**32 - 1, "<I"),
        (kinds.uint64, 2**64 - 1, "<Q"),
        (kinds.float32, 0.375, "<f"),
        (kinds.float64, -0.1, "<d"),
        (NUMBERS, 2**48 + 16, "<Q"),
    ],
)
def test_a_word_begins_with_the_value(kind, value, read):
    word = launch._bits(kind, value).to_bytes(8, "little")
    assert struct.unpack_from(read, word) == (value,)


def test_words_of_arguments():
    """Numba's arrays: two of its own, elements, their bytes, address, shape, strides."""
    array = kinds.array(kinds.float64, 2)
    several = kinds.several((kinds.int32, kinds.several((array, kinds.float32))))
    expected = [kinds.int32, *[kinds.int64] * 9, kinds.float32]
    assert launch._words_of(several) == expected
    assert launch._words_of(NUMBERS) == [NUMBERS]
    x = DeviceArray((3, 4), np.float64)
    own = [0, 0, 12, 8, x.data.ptr, 3, 4, 32, 8]
    assert launch.flattened((7, (x, 0.5))) == [7, *own, 0.5]
    assert launch.numbers((7, (x, 0.5))) == [7, x, 0.5]
    for what, sizes in (("int", (8, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64))):
        named = [getattr(kinds, f"{what}{n}") for n in sizes]
        assert [kind.name for kind in named] == [f"{what}{n}" for n in sizes]
        assert [kind.bitwidth for kind in named] == [*sizes]
    spec = KernelSpec("kernel", None, CONFIG, ())
    assert (spec.launch_bounds, spec.maps, spec.whole_program) == ((64, 1), 0, False)


SHAPES = [(3, 50, 4, 64), (1, 50, 4, 64), (3, 1, 4, 72), (3, 50, 1, 64), (1, 1, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strides", [(16000, 264, 72), (8, 16000, 4096)])
def test_a_tensor_map_finds_every_element(shape, strides):
    """The innermost axis first; the step of an axis of one is any multiple of 16 bytes."""
    sizes, steps, box = tensor_map.geometry(shape, strides, 112)
    assert sizes == (shape[3], shape[1], shape[2], shape[0])
    assert box == (64, 112, 1, 1)
    assert all(step > 0 and step % 16 == 0 for step in steps)
    last = [n - 1 for n in (shape[1], shape[2], shape[0])]
    by_map = sum(i * step for i, step in zip(last, steps, strict=True))
    batch, row, head = ((n - 1) * step for n, step in zip(shape, strides, strict=False))
    assert by_map == 2 * (batch + row + head)


class Driver:
    """cuTensorMapEncodeTiled and its constants, which are their own names."""

    def __init__(self):
        self.given, self.status, self.first = [], 0, None

    def __getattr__(self, name):
        if name.startswith("cuuint"):
            return lambda x: (name, x)
        return type(name, (), {"__getattr__": lambda self, leaf: leaf})()

    def cuTensorMapEncodeTiled(self, kind, rank, address, *given):
        self.given.append((kind, rank, address, *given))
        words = [address if self.first is None else self.first, *range(1, 16)]
        return self.status, SimpleNamespace(opaque=words)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fetched", [128, 256])
def test_what_the_driver_is_told_of_a_map(dtype, fetched, monkeypatch):
    driver, shape, strides = Driver(), (3, 50, 4, 72), (16000, 264, 72)
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    x = SimpleNamespace(shape=shape, strides=tuple(2 * s for s in (*strides, 1)), itemsize=2)
    x.data, x.dtype = SimpleNamespace(ptr=4096), np.dtype(np.float16)
    maps = tensor_map.Maps(dtype, fetched)
    assert maps(x, 112) == (4096, [*range(1, 16)])
    maps(x, 112)
    sizes, steps, box = tensor_map.geometry(shape, strides, 112)
    expected = (
        f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}",
        4,
        1 << 20,
        [("cuuint64_t", n) for n in sizes],
        [("cuuint64_t", n) for n in steps],
        [("cuuint32_t", n) for n in box],
        [("cuuint32_t", 1)] * 4,
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetched}B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )
    assert driver.given == [expected]
    driver.first = 8
    with pytest.raises(RuntimeError, match="do not begin with the address"):
        maps(x, 64)
    driver.status = 1
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled: 1 for shape=\(3, 50, 4, 72\)"):
        maps(x, 32)


def test_addresses_of_the_simulator_reach_the_last_element():
    base = np.arange(60.0).reshape(5, 12)
    for x in (base, base[1:4, 2:9:3], base[::2], base[2:3], base.T[3:]):
        reached = Simulated.address(x)
        assert (reached[0], reached[-1], reached.ndim) == (x.flat[0], x[-1, -1], 1)
        assert reached.size == 1 + int(x[-1, -1] - x.flat[0])
    assert Simulated.address(base[:0]).size == 0
    with pytest.raises(ValueError, match=r"no negative strides, got \(-96, 8\)"):
        Simulated.address(base[::-1])
    device = Simulated()
    device.clear(device.address(base), 8 * 7, 0)
    assert [np.count_nonzero(base), base[0, 7]] == [53, 7]
    assert (np.isnan(device.empty((2, 3), "f4")).sum(), device.stream()) == (6, (0, False))
    assert device.rows(base) is device.params(base) is base
    _, (one, two) = device.scratch([(2, 3), (4,)], np.float32)()
    assert (one.shape, two.shape, one.dtype) == ((2, 3), (4,), np.float32)
    assert [(x.size, x.dtype, *set(x)) for x in device.integers((3, 1))] == [
        (3, np.int32, -0x5A5A5A5B),
        (1, np.int32, -0x5A5A5A5B),
    ]
    (table,) = device.resident([base.T])
    assert table.flags.c_contiguous
    assert device.state((5, 6))[2].tolist() == [0, 0]
    address, layout = device.maps("float16")(base.reshape(1, 5, 3, 4), 64)
    assert address.size == 60
    assert layout == ((4, 5, 3, 1), (24, 8, 16), (64, 64, 1, 1))
    assert (device.vector_red, device.cp_async, device.multiprocessors) == (True, True, 4)


def test_a_device_that_is_not_there_notes_kernels():
    device = Recording((8, 0))
    device.bind("one", 3, (), ())
    device.bind("two", 3)
    assert list(device.specs) == ["one", "two"]
    assert device.resident([1, 2]) == [None, None]
    assert device.address(7) is device.scratch([(3,)], "f4") is None
    assert device.params(7) == 7
    assert device.maps("float16").layout(1, 2, 3) is None
