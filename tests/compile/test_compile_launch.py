"""What a bound kernel passes to the driver, without one."""

import ctypes
import sys
import threading
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import cuda.bindings
import pytest
from numba.cuda.core.targetconfig import TargetConfig
from numba.cuda.flags import Flags

from nbflash.cuda import launch, side_by_side
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.kinds import float32, int32, pointer, uint64
from nbflash.cuda.ptx._asm import compiling_for

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
    run = launch.bind(SPEC, 3, (-5, 0.5), 0, (9, 0), lambda: stream.ptr)
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
    monkeypatch.setattr(cuda.bindings, "driver", driver)
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


def test_options_of_a_compilation_are_those_of_numba():
    """With defaults, in the same order; Numba's own function is back when nothing compiles."""
    plain, chosen = Flags(), Flags()
    chosen.forceinline, chosen.enable_ssa = True, False
    expected = [list(flags.values().items()) for flags in (plain, chosen)]
    of_numba = TargetConfig.values
    with compiling_for((9, 0)):
        assert TargetConfig.values is not of_numba
        assert [list(flags.values().items()) for flags in (plain, chosen)] == expected
        assert plain != chosen
        assert plain == Flags()
    assert TargetConfig.values is of_numba
