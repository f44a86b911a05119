"""decode on a GPU: values, storage, streams and graphs, and what a call costs the host."""

import time
from itertools import product

import cupy
import ml_dtypes
import numpy as np
import pytest
from compile_ahead import decode_specs
from decode_cases import (
    DTYPES,
    check,
    check_scored,
    contiguous,
    hide,
    keep_of,
    of_both_caches,
    paged,
    same_bits,
)
from device_runs import poisoned_block

import masks
import nbflash
from nbflash import scores
from nbflash.cuda.availability import capability
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.planning import cache, decode_plan
from nbflash.planning.dispatch import why_not_here

CAPACITY, PAGE = 2048, 16
LENGTHS = np.array([0, 1, 2, 63, 64, 65, 255, 257, 1000, CAPACITY], np.int32)
STORAGE = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}


def kernels(dtype=None, nq=2, heads=(8, 2), head_dim=64, page_size=PAGE, storage=None, **more):
    """For `compile_ahead`: of contiguous and of paged caches."""
    if dtype:
        stored = np.dtype(STORAGE[storage] if storage else DTYPES[dtype]).name
        masked, heads = "name" in more, (1, 1) if more.get("name") == "per-head" else heads
        given = np.dtype(DTYPES[dtype]).name, stored, head_dim, NQ if masked else nq, heads
        for size in (None, page_size):
            yield decode_specs, *given, size, masked


def problem(nq=1, heads=(8, 2), head_dim=64, dtype="f16", lengths=LENGTHS):
    return contiguous(nq, heads, head_dim, DTYPES[dtype], lengths, CAPACITY)


def to_device(x):
    if x.dtype.name.startswith("float8"):  # CuPy takes them as views only
        return cupy.asarray(x.view(np.uint8)).view(x.dtype)
    return cupy.asarray(x)


def on_device(named):
    return {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in named.items()}


def run(q, k, v, lengths, **named):
    """``(out, lse)`` in host memory; what the call allocates is full of NaN."""
    arrays = on_device({"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **named})
    with cupy.cuda.using_allocator(poisoned_block):
        results = nbflash.decode(**arrays, return_lse=True)
        return [x.get() for x in results]


run_both = of_both_caches(run, LENGTHS)
HALF = ("sm90", "sm80") if not why_not_here("sm90") else ("sm80",)
EACH = [(dtype, impl) for dtype in DTYPES for impl in (HALF if "f16" in dtype else ("simt",))]
each = pytest.mark.parametrize(("dtype", "impl"), EACH)
SOME = [pair for pair in EACH if pair[0] in ("bf16", "f32")]


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (6, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("nq", [1, 3, 64])
@each
def test_values(dtype, impl, nq, heads):
    q, k, v = problem(nq, heads, dtype=dtype)
    check(run_both(q, k, v, impl=impl), q, k, v, LENGTHS)


@pytest.mark.parametrize(("dtype", "impl"), SOME)
@pytest.mark.parametrize("head_dim", [40, 72, 128, 192, 256])
def test_head_dims(head_dim, dtype, impl):
    q, k, v = problem(2, head_dim=head_dim, dtype=dtype)
    check(run_both(q, k, v, impl=impl), q, k, v, LENGTHS)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_head_dim_of_no_whole_chunk(dtype):
    q, k, v = problem(2, head_dim=5, dtype=dtype)
    check(run_both(q, k, v), q, k, v, LENGTHS)


@pytest.mark.parametrize(("dtype", "impl"), SOME)
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 128, 256])
def test_page_sizes(page_size, dtype, impl):
    q, k, v = problem(2, dtype=dtype)
    if (
        page_size % {"sm80": 16, "sm90": 8, "simt": 1}[impl]
    ):  # another kernel than that of the contiguous cache may take them
        k_pages, v_pages, table = paged(k, v, lengths=LENGTHS, page_size=page_size)
        check(run(q, k_pages, v_pages, LENGTHS, block_table=table), q, k, v, LENGTHS)
    else:
        check(run_both(q, k, v, page_size=page_size, impl=impl), q, k, v, LENGTHS)


@pytest.mark.parametrize("page_size", [7, 24])
def test_page_sizes_that_do_not_divide_the_capacity(page_size):
    q, k, v = problem(2)
    k_pages, v_pages, table = paged(k, v, lengths=LENGTHS, page_size=page_size)
    check(run(q, k_pages, v_pages, LENGTHS, block_table=table), q, k, v, LENGTHS)


NQ = 5
BY_HEAD = masks.per_head([masks.causal(NQ, CAPACITY), masks.sinks(NQ, 4, 99, nk=CAPACITY)] * 4)
MASKS = {
    "sinks": masks.sinks(NQ, 4, 300, nk=CAPACITY),
    "tree": masks.tree([-1, 0, 0, 1, 2], prefix=CAPACITY - NQ),
    "empty": ~masks.dense(NQ, CAPACITY),
    "scattered": masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    "per-head": BY_HEAD,
    "per-batch": masks.per_batch(
        [masks.window(NQ, CAPACITY, left=99 * i) for i in range(len(LENGTHS))]
    ),
}


@pytest.mark.parametrize(("dtype", "impl"), SOME)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, impl):
    q, k, v = problem(NQ, dtype=dtype)
    dense = np.broadcast_to(MASKS[name].dense(), (len(LENGTHS), 8, NQ, CAPACITY))
    got = run_both(q, k, v, mask=MASKS[name], impl=impl)
    check(got, q, k, v, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


@pytest.mark.parametrize("kind", ["head", "token"])
@pytest.mark.parametrize("storage", STORAGE)
@each
def test_quantised_caches(dtype, impl, storage, kind):
    if impl == "sm80" and storage == "e4m3" and capability(0) < (8, 9):
        impl = "simt"
    q, k, v = problem(2, dtype=dtype)
    real = np.dtype(np.float64 if dtype == "f64" else np.float32)
    (k, k_scale), (v, v_scale) = (quantise(x, STORAGE[storage]) for x in (k, v))
    if kind == "head":
        k_scale, v_scale = (np.array(x, np.float32) for x in ([0.01, 0.5], [2.0, 0.003]))
    got = run(q, k, v, LENGTHS, k_scale=k_scale, v_scale=v_scale, impl=impl)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), LENGTHS)
    *pages, table = paged(k, v, lengths=LENGTHS)
    scales = k_scale, v_scale
    if kind == "token":
        *scales, _ = paged(*scales, lengths=LENGTHS)
    named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    assert same_bits(got, run(q, *pages, LENGTHS, block_table=table, impl=impl, **named))


@pytest.mark.parametrize("window", [(0, 0), (100, None), (63, 2)])
@pytest.mark.parametrize("impl", ["sm80", "simt"])
def test_windows(impl, window):
    """Alone and beside a mask; keys outside are NaN."""
    q, k, v = problem(NQ)
    for mask in (None, MASKS["scattered"], masks.dense(NQ, CAPACITY)):
        keep = keep_of(LENGTHS, NQ, window, mask)
        got = run_both(q, *hide(k, v, LENGTHS, keep), mask=mask, window=window, impl=impl)
        check(got, q, k, v, LENGTHS, keep)


@pytest.mark.parametrize("impl", ["sm80", "simt"])
def test_a_window_over_a_quantised_cache(impl):
    q, k, v = problem(2)
    (k, k_scale), (v, v_scale) = (quantise(np.nan_to_num(x), np.int8) for x in (k, v))
    named = {"k_scale": k_scale, "v_scale": v_scale, "window": (100, None), "impl": impl}
    got, real = run(q, k, v, LENGTHS, **named), np.dtype(np.float32)
    keep = keep_of(LENGTHS, 2, (100, None))
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), LENGTHS, keep)


SCORES = {
    "softcap": lambda n: scores.softcap(2.0),
    "alibi": lambda n: scores.alibi(0.5 / 2 ** np.arange(8)),
    "keys": lambda n: scores.bias(KEYS[..., :n]),
}
KEYS = np.random.default_rng(3).standard_normal((1, 1, 1, 300)).astype(np.float32)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("impl", ["sm80", "simt"])
def test_scores(impl, name):
    lengths = np.array([2, 65, 300], np.int32)
    q, k, v = contiguous(NQ, (8, 2), 64, DTYPES["f16"], lengths, 300)
    mask, score_of = masks.dense(NQ, 300), SCORES[name]
    for given, window in ((None, None), (mask, (40, None))):
        how = {"mask": given, "window": window, "score": score_of(300), "impl": impl}
        keep = keep_of(lengths, NQ, window, given)
        check_scored(run(q, k, v, lengths, **how), q, k, v, lengths, score_of, keep)


def test_out_alone():
    q, k, v = map(cupy.asarray, problem(2))
    lengths = cupy.asarray(LENGTHS)
    out, _ = nbflash.decode(q, k, v, lengths, return_lse=True)
    assert nbflash.decode(q, k, v, lengths).get().tobytes() == out.get().tobytes()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_one_sequence_of_many_keys(dtype):
    """More splits than there are heads."""
    lengths = np.array([CAPACITY - 3], np.int32)
    q, k, v = problem(1, dtype=dtype, lengths=lengths)
    check(run_both(q, k, v, lengths), q, k, v, lengths)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_streams_at_once(dtype):
    """Each has scratch of its own."""
    problems = [problem(2, dtype=dtype, lengths=LENGTHS[i:] if i else LENGTHS) for i in range(3)]
    arrays = [[cupy.asarray(x) for x in (*p, LENGTHS[i:])] for i, p in enumerate(problems)]
    alone = [[x.get() for x in nbflash.decode(*a, return_lse=True)] for a in arrays]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in arrays]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        found = []
        for stream, a in zip(streams, arrays, strict=True):
            with stream:
                found.append(nbflash.decode(*a, return_lse=True))
        for stream, results, want in zip(streams, found, alone, strict=True):
            stream.synchronize()
            assert same_bits([x.get() for x in results], want)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_graph_of_growing_sequences(dtype):
    """Captured once, replayed with other lengths and pages: the results of eager calls."""
    q, k, v = problem(2, dtype=dtype, lengths=np.full(3, CAPACITY, np.int32))
    k_pages, v_pages, table = paged(k, v, lengths=np.full(3, CAPACITY), page_size=PAGE)
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        q, k_pages, v_pages, table = map(cupy.asarray, (q, k_pages, v_pages, table))
        lengths = cupy.asarray(np.array([5, 900, CAPACITY], np.int32))
        inputs = q, k_pages, v_pages, lengths
        for _ in range(2):
            nbflash.decode(*inputs, block_table=table, return_lse=True)
        stream.synchronize()
        stream.begin_capture()
        results = nbflash.decode(*inputs, block_table=table, return_lse=True)
        graph = stream.end_capture()
        other = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(4)]  # what was freed
        for step in range(3):
            lengths += np.int32(-step)
            table[...] = table[::-1].copy()
            for x in results:
                x.fill(np.nan)
            graph.launch(stream)
            eager = nbflash.decode(*inputs, block_table=table, return_lse=True)
            stream.synchronize()
            assert same_bits([x.get() for x in results], [x.get() for x in eager])
        assert all(bool(cupy.isnan(x).all()) for x in other)


JOINING = pytest.mark.parametrize(("impl", "storage"), [*product(HALF, [None, "int8"])])


def call(impl, storage, capacity=CAPACITY):
    """Arguments on the device for kernels whose last blocks join the parts."""
    lengths = np.minimum(LENGTHS, np.int32(capacity))
    q, k, v = contiguous(2, (8, 2), 64, DTYPES["f16"], lengths, capacity)
    named = {"return_lse": True, "impl": impl}
    if storage:
        (k, k_scale), (v, v_scale) = (quantise(x, STORAGE[storage]) for x in (k, v))
        named |= {"k_scale": k_scale, "v_scale": v_scale}
    return on_device({"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **named})


def results(arguments):
    return [x.get() for x in nbflash.decode(**arguments)]


@pytest.fixture
def joined(monkeypatch):
    """``joined()``: what has been bound for the calls of a test; all its counts are back at 0."""
    decoders_of_test = cache.PlanCache(8)
    monkeypatch.setattr(cache, "plans", decoders_of_test)

    def decoders():
        cupy.cuda.Device().synchronize()
        found = [item.value for item in decoders_of_test._items.values()]
        assert all(x._partial.splits > 1 and x._partial.counted for x in found)
        assert not any(x._counts._sets.get().any() for x in found)
        return found

    return decoders


@JOINING
def test_the_last_block_joins_calls_in_turn(impl, storage, joined):
    """Of as many splits as capacities allow: each finds its counts at 0."""
    calls = [call(impl, storage, capacity) for capacity in (256, 1024, CAPACITY)]
    first = [results(arguments) for arguments in calls]
    for _ in range(5):
        for arguments, want in zip(calls, first, strict=True):
            assert same_bits(results(arguments), want)
            assert nbflash.decode(**arguments | {"return_lse": False}).get().tobytes() == (
                want[0].tobytes()
            )
    assert len({x._partial.splits for x in joined()}) == 3


@JOINING
@pytest.mark.parametrize("sets", [32, 2])
def test_the_last_block_joins_on_streams_at_once(impl, storage, sets, joined, monkeypatch):
    """Every stream has counts of its own; beyond those that there are, a call clears some."""
    monkeypatch.setattr(decode_plan, "_SETS", sets)
    arguments = call(impl, storage)
    want = results(arguments)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)] + [cupy.cuda.Stream.ptds]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with stream:
                found.append(nbflash.decode(**arguments))
        for stream, arrays in zip(streams, found, strict=True):
            stream.synchronize()
            assert same_bits([x.get() for x in arrays], want)
    (decoder,) = joined()
    assert len(decoder._counts._of_stream) == min(sets, 4)  # the null stream, and three


@JOINING
@pytest.mark.parametrize("sets", [32, 1])
def test_the_last_block_joins_in_a_graph(impl, storage, sets, joined, monkeypatch):
    """Captured once, replayed on two streams, with other calls beside it: always the same bits.

    Of one set of counts the stream has it, and the graph sets its own to 0.
    """
    monkeypatch.setattr(decode_plan, "_SETS", sets)
    pool = cupy.cuda.MemoryPool()
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with stream, cupy.cuda.using_allocator(pool.malloc):
        arguments = call(impl, storage)
        for _ in range(2):
            nbflash.decode(**arguments)
        stream.synchronize()
        stream.begin_capture()
        captured = nbflash.decode(**arguments)
        graph = stream.end_capture()
        want = results(arguments)
        for where in (stream, stream, other, other, stream):
            for x in captured:
                x.fill(np.nan)
            stream.synchronize()
            graph.launch(where)
            beside = nbflash.decode(**arguments)
            where.synchronize()
            stream.synchronize()
            assert same_bits([x.get() for x in captured], want)
            assert same_bits([x.get() for x in beside], want)
    joined()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_host_time(dtype, capsys):
    """Of a warm call, without waiting; printed and not judged: the machine may be busy."""
    arrays = [cupy.asarray(x) for x in (*problem(1, dtype=dtype), LENGTHS)]
    times = []
    for _ in range(300):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        nbflash.decode(*arrays)
        times.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\ndecode, {dtype}: {1e6 * np.median(times):.1f} µs of host time")
