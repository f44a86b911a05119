"""What a bound kernel passes to the driver, without one."""

import ctypes
import itertools
import struct
import sys
import threading
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nbflash.cuda import launch, side_by_side
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.kinds import float32, float64, int32, int64, pointer, several, uint8, uint64

CONFIG = namedtuple("Config", "threads smem_bytes")(64, 1024)
SIGNATURE = uint64, uint64, pointer(int32), int32, float32
SPEC = KernelSpec("kernel", None, CONFIG, SIGNATURE, maps=2)
WORDS = [launch.MAP_WORDS] * SPEC.maps + [1] * (len(SIGNATURE) - SPEC.maps)


def test_maps_words_and_what_is_bound(monkeypatch):
    """A layout is written when it is another than before, an address always."""
    found = []

    def launched(*arguments):
        *geometry, stream, pointers, _ = arguments
        places = (ctypes.c_void_p * len(WORDS)).from_address(pointers)
        read = [(ctypes.c_uint64 * n).from_address(at) for at, n in zip(places, WORDS, strict=True)]
        found.append((geometry, stream, [list(words) for words in read]))

    stream = SimpleNamespace(ptr=7)
    driver = SimpleNamespace(launchKernel=launched)
    cuda = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    loads = []
    monkeypatch.setattr(launch, "load", lambda *given: loads.append(given) or 99)
    run = launch.bind(SPEC, 3, (-5, 0.5), 0, (9, 0), lambda: stream.ptr, late=1)
    assert loads == []  # until it runs
    first, second, third = ([10 * n + i for i in range(launch.MAP_WORDS - 1)] for n in (1, 2, 3))
    behind = [[2**64 - 5], [0x3F000000]]
    for address, layouts in enumerate([(first, second), (first, second), (third, second)]):
        maps = list(zip((address, 1000 + address), layouts, strict=True))
        stream.ptr = address
        run([512 + address], maps)
        words = [[at, *layout] for at, layout in maps]
        assert found.pop() == (
            [99, 3, 1, 1, 64, 1, 1, 1024],
            address,
            [*words, [512 + address], *behind],
        )
    run([515], maps, [77])  # the last one anew
    assert found.pop()[2] == [*words, [515], behind[0], [77]]
    assert loads == [(SPEC, 0, (9, 0))]


def test_a_kernel_is_loaded_with_its_shared_memory(monkeypatch):
    calls, code = [], {"cuKernelSetAttribute": 0}

    def call(name, *found):
        def answer(*given):
            calls.append((name, given))
            return code.get(name, 0), *found

        return answer

    attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most bytes")
    answers = {"cuLibraryLoadData": ["library"], "cuLibraryGetKernel": [99]}
    answers["cuKernelSetAttribute"] = []
    driver = SimpleNamespace(**{name: call(name, *x) for name, x in answers.items()})
    driver.CUfunction_attribute = attribute
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(side_by_side, "cubin_of", lambda *which: which)
    load = launch.load.__wrapped__
    assert load(SPEC, 3, (9, 0)) == 99
    assert [name for name, _ in calls] == list(answers)
    assert calls[0][1][0] == (SPEC, (9, 0))
    assert calls[1][1] == ("library", b"kernel")
    assert calls[2][1] == ("most bytes", 1024, 99, 3)
    code["cuKernelSetAttribute"] = 1
    with pytest.raises(RuntimeError, match="1024 bytes of shared memory for kernel: 1"):
        load(SPEC, 3, (9, 0))


def test_another_thread_waits_until_the_words_are_taken(monkeypatch):
    """The driver copies them when it launches: until then no other call writes to them."""
    found, others = [], []

    def launched(*arguments):
        if not others:
            others.append(threading.Thread(target=run, args=([2, 2, 2],)))
            others[0].start()
            others[0].join(0.2)
        (first,) = (ctypes.c_void_p * 1).from_address(arguments[-2])
        found.append(ctypes.c_uint64.from_address(first).value)

    driver = SimpleNamespace(launchKernel=launched)
    cuda = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "load", lambda *given: 99)
    run = launch.bind(replace(SPEC, maps=0), 1, (-5, 0.5), 0, (9, 0), lambda: 7)
    run([1, 1, 1])
    others[0].join()
    assert found == [1, 2]


@pytest.mark.parametrize("status", [launch.INVALID_CONTEXT, 700])
def test_a_thread_without_a_context_gets_that_of_the_device(status, monkeypatch):
    """The driver finds none in a thread in which nothing of the runtime has run."""
    calls = []

    class Failure(RuntimeError):
        def __init__(self):
            self.status = status

    def launched(*arguments):
        calls.append("launch")
        if calls.count("set") == 0:
            raise Failure

    driver = SimpleNamespace(launchKernel=launched, CUDADriverError=Failure)
    runtime = SimpleNamespace(setDevice=lambda n: calls.append("set") or calls.append(n))
    cuda = SimpleNamespace(driver=driver, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "load", lambda *given: 99)
    run = launch.bind(replace(SPEC, maps=0), 1, (-5, 0.5), 3, (9, 0), lambda: 7)
    if status == launch.INVALID_CONTEXT:
        run([1, 1, 1])
        assert calls == ["launch", "set", 3, "launch"]
    else:
        with pytest.raises(Failure):
            run([1, 1, 1])
        assert calls == ["launch"]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_words_lie_one_behind_the_other(late, monkeypatch):
    """Those of a call, those that are bound, and in their place those that a call gives anew."""
    found, kinds = [], (pointer(int32), several((int64, float32)), uint8, int64, int64, float64)
    count = 7

    def launched(*arguments):
        places = (ctypes.c_void_p * count).from_address(arguments[-2])
        assert [b - a for a, b in itertools.pairwise(places)] == [8] * (count - 1)
        found.append([ctypes.c_uint64.from_address(at).value for at in places])

    driver = SimpleNamespace(launchKernel=launched)
    cuda = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "load", lambda *given: 99)
    spec = KernelSpec("kernel", None, CONFIG, kinds)
    run = launch.bind(spec, 1, (7, -1, 9, 0.5), 0, (9, 0), lambda: 7, late or 0)
    half = int.from_bytes(struct.pack("<d", 0.5), "little")
    expected = [10, 20, 30, 7, 2**64 - 1, 9, half]
    run([10, 20, 30])
    assert found.pop() == expected
    if late is not None:
        run([11, 21, 31], (), [5, 6])
        at = 3 + late
        assert found.pop() == [11, 21, 31, *expected[3:at], 5, 6, *expected[at + 2 :]]


def test_a_kernel_is_cold_until_it_has_run(monkeypatch):
    driver = SimpleNamespace(launchKernel=lambda *_: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(launch, "load", lambda *given: 99)
    asked = []
    monkeypatch.setattr(launch, "is_cold", lambda *which: asked.append(which) or True)
    run = launch.bind(replace(SPEC, maps=0), 1, (), 0, (9, 0), lambda: 7)
    assert run.is_cold() is True
    assert asked == [(replace(SPEC, maps=0), (9, 0))]
    run([1, 1, 1, 1, 1])
    assert run.is_cold() is False


@pytest.mark.parametrize("capability", [*launch._RUNS_TOO, (9, 0), (12, 0)])
def test_cubins_of_older_devices_run_within_a_generation(capability, monkeypatch):
    """A cubin runs on devices of the same major version and a minor that is no less."""
    asked = []
    monkeypatch.setattr(launch.kernel_key, "of", lambda spec, which: which)
    monkeypatch.setattr(launch.bundled, "find", lambda which: asked.append(which))
    assert launch._at_hand(SPEC, None, capability) is None
    assert asked == []
    assert launch._bundled(SPEC, capability) is None
    assert asked[0] == capability
    assert asked == sorted(set(asked), reverse=True)
    assert {major for major, _ in asked} == {capability[0]}
    older = {(8, 6): [(8, 0)], (8, 9): [(8, 6), (8, 0)]}
    assert asked[1:] == older.get(capability, [])


def test_a_cubin_is_kept_if_its_key_is_the_same_when_it_is_there(monkeypatch):
    """A function that was changed meanwhile is not kept; what is at hand is not compiled."""
    kept, keys, compiled = [], ["a", "a"], []
    monkeypatch.setattr(launch.kernel_key, "of", lambda *_: keys.pop(0))
    monkeypatch.setattr(launch, "_path", lambda spec, key: f"place of {key}")
    monkeypatch.setattr(launch, "_bundled", lambda *_: None)
    monkeypatch.setattr(launch.sealed, "read", lambda path: None)
    monkeypatch.setattr(launch.sealed, "write_private", lambda *given: kept.append(given))
    monkeypatch.setattr(launch, "compile_cubin", lambda *which: compiled.append(which) or b"code")
    assert launch.cached_cubin(SPEC, (9, 0)) == b"code"
    assert kept == [("place of a", b"code")]
    for changed in (["a", "b"], [None, None], [None]):
        keys[:] = changed
        assert launch.cached_cubin(SPEC, (9, 0)) == b"code"
    assert (len(kept), compiled) == (1, [(SPEC, (9, 0))] * 4)
    monkeypatch.setattr(launch.sealed, "read", lambda path: b"on disk")
    keys[:] = "aa"
    assert launch.cached_cubin(SPEC, (9, 0)) == b"on disk"
    assert launch.is_cold(SPEC, (9, 0)) is False
    monkeypatch.setattr(launch, "_bundled", lambda *_: b"bundled")
    keys[:] = "a"
    assert launch.cached_cubin(SPEC, (9, 0)) == b"bundled"
    keys[:] = [None]
    assert launch.is_cold(SPEC, (9, 0)) is True
    assert len(compiled) == 4


def test_a_cubin_that_cannot_be_kept_is_a_warning(monkeypatch):
    def full(path, content):
        raise OSError("no room")

    monkeypatch.setattr(launch.sealed, "write_private", full)
    with pytest.warns(UserWarning, match="not cached, set NBFLASH_CACHE_DIR: no room"):
        launch._keep("place", b"code")
