"""Streams, CUDA graphs, threads and the lifetime of memory."""

import functools
import gc
import threading
from dataclasses import dataclass

import cupy
import numpy as np
import pytest
from device_runs import ON_HOPPER, ON_TENSOR_CORES, bits, by_mode, gallery, make_qkv, poisoned_block
from device_runs import run as run_impl

import nbflash

SPIN = cupy.RawKernel(
    """
    extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }
    """,
    "spin",
)
CYCLES = 100_000_000
pytestmark = pytest.mark.usefixtures("one_pass")


@dataclass(frozen=True)
class Case:
    """What runs: all but the mask."""

    impl: str
    dtype: str
    head_dim: int

    def inputs(self, seed=0):
        return make_qkv(2, 300, 300, 4, 2, self.head_dim, self.dtype, seed)


CASES = (
    pytest.param(Case("simt", "float32", 64), id="simt"),
    pytest.param(Case("sm80", "float16", 64), id="sm80", marks=ON_TENSOR_CORES),
    pytest.param(Case("sm90", "float16", 64), id="sm90", marks=ON_HOPPER),
    pytest.param(Case("sm90", "float16", 192), id="sm90-wide", marks=ON_HOPPER),
)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def run(case):
    """Forward and backward by the implementation of the case."""
    return functools.partial(run_impl, impl=case.impl)


@pytest.fixture(scope="module")
def mask():
    return gallery(300, 300)["causal"]


@pytest.fixture(scope="module")
def inputs(case):
    return case.inputs()


@pytest.fixture(scope="module")
def whole(inputs, mask, run):
    """The results on the default stream."""
    return bits(run(inputs, mask, deterministic=True))


STREAMS = {
    "blocking": lambda: cupy.cuda.Stream(),
    "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    "per-thread": lambda: cupy.cuda.Stream.ptds,
    "null": lambda: cupy.cuda.Stream.null,
}


@pytest.mark.parametrize("kind", STREAMS)
def test_the_current_stream_is_used(kind, inputs, mask, whole, run):
    cupy.cuda.Device().synchronize()
    with STREAMS[kind]() as stream:
        results = run(inputs, mask, deterministic=True)
        stream.synchronize()
        assert bits(results) == whole


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does-not-wait"])
def test_a_slow_producer_on_another_stream(waits, inputs, mask, whole, run):
    """Q is written late on one stream and read on another: it is there after its event only.

    The second case shows that the kernels run on the stream that is current and nothing else
    holds them back.
    """
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    q, k, v, dout = inputs
    late, ready = cupy.zeros_like(q), cupy.cuda.Event()
    with consumer:
        run((late, k, v, dout), mask, deterministic=True)  # plans and blocks are there
    cupy.cuda.Device().synchronize()
    with producer:
        SPIN((1,), (1,), (np.int64(CYCLES),))
        late[...] = q
        ready.record()
    with consumer:
        if waits:
            consumer.wait_event(ready)
        results = run((late, k, v, dout), mask, deterministic=True)
        consumer.synchronize()
        assert (bits(results) == whole) is waits
    cupy.cuda.Device().synchronize()


def test_two_streams_at_once(inputs, mask, whole, run):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    results = []
    for i in range(40):
        with streams[i % 4]:
            results.append(run(inputs, mask, deterministic=True))
    cupy.cuda.Device().synchronize()
    assert all(bits(r) == whole for r in results)


def test_threads_share_a_plan(inputs, mask, whole, run):
    """One bound kernel, many threads: arguments of one call never reach another's launch."""
    others = [x[::-1].copy() for x in inputs]
    expected = {0: whole, 1: bits(run(others, mask, deterministic=True))}
    wrong, device = [], cupy.cuda.Device().id

    def work(i):
        mine = (inputs, others)[i % 2]
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            stream.synchronize()
            for _ in range(25):
                results = run(mine, mask, deterministic=True)
                stream.synchronize()
                if bits(results) != expected[i % 2]:
                    wrong.append(i)

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@by_mode
def test_graph_capture_and_replay(deterministic, case, inputs, mask, run):
    """Captured once, replayed on new contents: the results of eager calls."""
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    q, k, v, dout = (x.copy() for x in inputs)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            run((q, k, v, dout), mask, deterministic=deterministic)
        stream.synchronize()
        stream.begin_capture()
        results = run((q, k, v, dout), mask, deterministic=deterministic)
        graph = stream.end_capture()
        for seed in range(3):
            fresh = case.inputs(seed)
            for x, y in zip((q, k, v, dout), fresh, strict=True):
                x[...] = y
            for x in results:
                x.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            with cupy.cuda.using_allocator(poisoned_block):
                eager = run((q, k, v, dout), mask, deterministic=deterministic)
            stream.synchronize()
            differ = [a != b for a, b in zip(bits(results), bits(eager), strict=True)]
            assert not any(differ[i] for i in range(5) if deterministic or i != 2)
            assert not any(bool(cupy.isnan(x).any()) for x in results)


def test_a_graph_outlives_the_cache_and_leaves_other_memory_alone(inputs, mask, run):
    """Its plans are forgotten, and what its calls allocated is asked for again, on its stream."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        run(inputs, mask)
        stream.synchronize()
        stream.begin_capture()
        results = run(inputs, mask)
        graph = stream.end_capture()
        graph.launch(stream)
        expected = bits(results[:2])
        nbflash.clear_cache()
        gc.collect()
        sizes = [2**i for i in range(9, 21)]
        others = [cupy.zeros(n, np.uint8) for n in sizes for _ in range(20)]
        for x in results:
            x.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
        assert bits(results[:2]) == expected
        assert not any(bool(x.any()) for x in others)


def test_inputs_that_are_freed_at_once(inputs, mask, whole, run):
    """Their memory is reused on the same stream while the kernels may still be waiting."""
    for _ in range(20):
        copies = [x.copy() for x in inputs]
        SPIN((1,), (1,), (np.int64(CYCLES // 50),))
        results = run(copies, mask, deterministic=True)
        del copies
        junk = [cupy.full(x.shape, np.nan, x.dtype) for x in inputs * 2]
        assert bits(results) == whole
        del junk


def test_plans_that_are_forgotten_while_they_run(inputs, mask, whole, run):
    """The tables of a schedule live until the kernels that read them are done, on any stream.

    The memory pool would hand them on at once to the stream on which the plan was made.
    """
    nbflash.clear_cache()
    run(inputs, mask, deterministic=True)  # made on the null stream
    beside = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with beside:
        SPIN((1,), (1,), (np.int64(CYCLES),))
        results = run(inputs, mask, deterministic=True)
    nbflash.clear_cache()
    gc.collect()
    junk = [cupy.zeros(n, np.int32) for n in (1, 16, 64, 256, 1024, 4096) for _ in range(50)]
    beside.synchronize()
    assert bits(results) == whole
    del junk


@pytest.mark.parametrize("last", range(4))
def test_an_error_leaves_everything_usable(last, case, inputs, mask, whole, run):
    """Out of memory in the middle of a backward pass, then the same call again."""
    q, k, v, dout = inputs
    out, lse = nbflash.attention(q, k, v, mask, impl=case.impl, return_lse=True)
    calls = 0

    def failing(size):
        nonlocal calls
        calls += 1
        if calls > last:
            raise cupy.cuda.memory.OutOfMemoryError(size, 0)
        return poisoned_block(size)

    with (
        cupy.cuda.using_allocator(failing),
        pytest.raises(cupy.cuda.memory.OutOfMemoryError),
    ):
        nbflash.attention_backward(dout, q, k, v, out, lse, mask, impl=case.impl)
    assert bits(run(inputs, mask, deterministic=True)) == whole
