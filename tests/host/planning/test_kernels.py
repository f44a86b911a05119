"""Which kernels calls need, without a device; and that wheels carry those of common calls."""

import itertools
import runpy
import subprocess
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
from cuda_arrays import LSE_SHAPE, SHAPE, DeviceArray

import masks
from nbflash import scores
from nbflash.backends.block_selection import host as block_selection
from nbflash.backends.merging import host as merge_host
from nbflash.backends.registry import prepare
from nbflash.backends.simt.executor import SimtLaunches
from nbflash.cuda import device, kernel_key, launch
from nbflash.cuda.collector import collector_off
from nbflash.cuda.device import SHARED_MEMORY, Recording
from nbflash.cuda.pause import pause_spec
from nbflash.cuda.sources import definitions_of
from nbflash.definitions.constants import HALF_PRECISION
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import BlockLayout
from nbflash.planning import bundle
from nbflash.planning.kernels import (
    PATTERNS,
    backend_for,
    common_decode_kernels,
    common_kernels,
    cuda_problem,
    decode_problem,
    kernels_of,
    kernels_of_decode,
)

# What users of a wheel call most, at lengths and widths that are not those of PATTERNS.
CALLS = {
    "dense": masks.dense,
    "dense-ragged": lambda n: masks.dense(n, n + 77),
    "causal": masks.causal,
    "causal-longer": lambda n: masks.causal(n, 2 * n + 1),
    "window": lambda n: masks.window(n, left=1000, right=0),
    "window-both": lambda n: masks.window(n, left=100, right=100),
    "documents": lambda n: masks.documents([1, n // 2, n - n // 2 - 1]),
    "documents-causal": lambda n: masks.documents([n // 2, n - n // 2], causal=True),
    "padding": lambda n: masks.padding([n // 2], n),
    "block-32": lambda n: masks.butterfly(n, 32),
    "block-256": lambda n: masks.butterfly(n, 256),
    "bigbird": lambda n: masks.bigbird(n, 64),
    "block-causal": lambda n: masks.local(n, 128, 2, causal=True),
}
LENGTHS = 1, 65, 384, 1000, 4096
NAMED = "dense", "causal", "window", "documents", "block", "small-block"  # to `precompile`


@pytest.mark.parametrize("capability", bundle.CAPABILITIES)
def test_wheels_carry_the_kernels_of_common_calls(capability):
    for head_dim in bundle.HEAD_DIMS:
        carried = set(common_kernels("float16", head_dim, capability))
        for name, n in itertools.product(CALLS, LENGTHS):
            mask = CALLS[name](n)
            spec = AttentionSpec(cuda_problem("float16", head_dim, *mask.shape), mask)
            assert set(kernels_of(spec, capability)) <= carried, (name, n, head_dim)


@pytest.mark.parametrize(("impl", "capability"), [("sm90", (9, 0)), ("sm80", (8, 0))])
@pytest.mark.parametrize("pattern", NAMED)
def test_a_pattern_has_all_kernels_of_any_length(pattern, impl, capability):
    """As they are compiled ahead, one pattern at a time."""
    carried = set(common_kernels("float16", 128, capability, patterns=[pattern], impl=impl))
    for n in (64, 128, 320, 448, 1600, 2112, 4288):
        spec = AttentionSpec(cuda_problem("float16", 128, n, n), PATTERNS[pattern](n))
        assert set(kernels_of(spec, capability, impl=impl)) <= carried, n


class Asked:
    """A device in the place of a GPU: which kernels are bound."""

    def __init__(self):
        self.specs, self.empty = set(), np.empty

    def words(self, *_):
        return []

    def bind(self, spec, *_):
        self.specs.add(spec)
        return lambda words: None


@pytest.mark.parametrize("head_dim", bundle.HEAD_DIMS)
def test_wheels_carry_what_merges_and_averages(head_dim, monkeypatch):
    """Of arrays as an allocator makes them; of rows that follow each other, and of others."""
    device, lse = Asked(), np.zeros((1, 2, 9), "f4")
    half, wide = (np.zeros((1, 9, 2, head_dim), dtype) for dtype in ("f2", "f4"))
    for host in (merge_host, block_selection):
        monkeypatch.setattr(host, "cuda_device", lambda _: device)
    merge_host._bound.cache_clear()
    for places in (None, np.arange(9, dtype=np.int32)):
        for x in (half, wide):
            merge_host.merge((x, lse), (half, lse), (x, lse), places)
            for part in (half, wide):
                merge_host.add(x, part, places)
    merge_host._bound.cache_clear()
    block_selection.block_means(half, 4)
    for name, value in {
        "CAPABILITIES": [(9, 0)],
        "HALF_PRECISION": ["float16"],
        "HEAD_DIMS": [head_dim],
    }.items():
        monkeypatch.setattr(bundle, name, value)
    carried, _ = bundle.packs()[f"sm_90a-float16-{head_dim}"]
    others = common_kernels("float16", head_dim, (9, 0))
    others += common_decode_kernels("float16", head_dim, (9, 0), (None, "int8", "float8_e4m3fn"))
    assert device.specs == set(carried) - set(others)


# Tokens, query heads of a key head, page size; sequences, key heads and keys.
DECODE_CALLS = [
    ((nq, group, page), {"batch": batch, "heads_kv": heads, "capacity": keys})
    for nq, group, page in [
        *((1, 1, None), (1, 16, 16), (4, 8, None), (2, 7, 32), (64, 8, 128)),
        *((1, 8, 64), (8, 1, 64), (1, 4, 256)),
    ]
    for batch, heads, keys in ((1, 1, 131072), (1, 8, 2048), (3, 2, 30000), (64, 8, 256))
]


@pytest.mark.parametrize("capability", bundle.CAPABILITIES)
@pytest.mark.parametrize("cache_dtype", bundle.CACHE_DTYPES)
def test_wheels_carry_the_kernels_of_decode(cache_dtype, capability):
    if capability < bundle.CACHE_DTYPES[cache_dtype]:
        return
    for head_dim in bundle.HEAD_DIMS:
        carried = common_decode_kernels("bfloat16", head_dim, capability, [cache_dtype])
        for sizes, more in DECODE_CALLS:
            stored = cache_dtype or "bfloat16"
            problem = decode_problem("bfloat16", head_dim, stored, *sizes, **more)
            assert set(kernels_of_decode(problem, capability)) <= set(carried), problem
        assert len(carried) == len(set(carried))
        assert type(carried) is list


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "sizes", "capability", "expected"),
    [
        ("float16", None, (1, 8, None), (8, 0), "sm80"),
        ("float16", "float8_e4m3fn", (1, 8, None), (8, 6), "simt"),
        ("float16", "float8_e4m3fn", (1, 8, None), (10, 0), "sm80"),
        ("float16", None, (1, 8, 8), (8, 0), "simt"),
        ("float16", None, (1, 16, 16), (9, 0), "sm80"),
        ("float16", None, (3, 8, 16), (9, 0), "sm90"),
        ("float16", "int8", (1, 1, None), (9, 0), "sm90"),
        ("float32", None, (1, 8, None), (9, 0), "simt"),
    ],
)
def test_decode_is_compiled_for_what_auto_takes(dtype, cache_dtype, sizes, capability, expected):
    problem = decode_problem(dtype, 64, cache_dtype or dtype, *sizes)
    first, *_ = kernels_of_decode(problem, capability)
    assert first.name == f"nbflash_decode_{expected}"


@pytest.mark.parametrize(("capacity", "joined"), [(60, 0), (4096, 0), (131072, 1)])
def test_a_second_kernel_joins_parts_where_the_last_block_does_not(capacity, joined):
    problem = decode_problem("float16", 64, "int8", 1, 1, None, capacity=capacity)
    names = [spec.name for spec in kernels_of_decode(problem, (9, 0))]
    assert names == ["nbflash_decode_sm90", "nbflash_combine_simt"][: 1 + joined]


def test_wheels_carry_what_selects_blocks(monkeypatch):
    """Products and weights of means, and the best blocks of short rows and of the longest."""
    device, given = Asked(), np.zeros((1, 2, 8, 4), np.float32)
    device.integers = lambda sizes: [np.empty(n, np.int32) for n in sizes]
    monkeypatch.setattr(block_selection, "cuda_device", lambda _: device)
    block_selection.block_products(given, given)
    weights, scores = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 2, 8, 2), np.float32)
    block_selection.block_weights(scores, weights, 0, 0, 1.0, (4, 4), 2, 4)
    for columns in (3, 65, block_selection.MOST_COLUMNS):
        rows = np.zeros((1, 1, 2, columns), np.float32)
        block_selection.best_blocks(rows, bytes(8), 2, 0, 0)
    monkeypatch.setattr(bundle, "HEAD_DIMS", [])
    carried, _ = bundle.packs()["sm_90a-selection"]
    assert len(device.specs) == 6
    assert device.specs <= set(carried)


def test_packs_are_of_every_dtype_and_architecture():
    found = {}
    for capability, dtype in itertools.product(bundle.CAPABILITIES, HALF_PRECISION):
        specs = common_kernels(dtype, 64, capability)
        assert {spec.config.dtype for spec in specs} == {dtype}
        found[capability] = {spec.name for spec in specs}
    assert "nbflash_fwd_sm90" in found.pop((9, 0))
    assert all("nbflash_fwd_sm80" in names for names in found.values())


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_backend_of_a_device(capability):
    half, single = (
        AttentionSpec(cuda_problem(dtype, 64, 8, 8), masks.dense(8))
        for dtype in ("float16", "float32")
    )
    assert (half.problem.batch, half.problem.heads) == (1, 1)
    expected = "sm90" if capability == (9, 0) else "sm80" if capability >= (8, 0) else "simt"
    assert backend_for(half, capability).name == expected
    assert backend_for(single, capability).name == "simt"
    assert backend_for(half, capability, "simt").name == "simt"
    assert kernels_of(half, capability, passes=("forward",))[0].name == f"nbflash_fwd_{expected}"


def test_a_problem_of_one_head_in_memory_that_comes_from_an_allocator():
    problem = cuda_problem("float16", 64, 8, 9)
    assert (problem.q_shape, problem.kv_shape) == ((1, 8, 1, 64), (1, 9, 1, 64))
    assert (problem.scale, cuda_problem("float16", 64, 8, 9, 0.5).scale) == (0.125, 0.5)
    assert (problem.device, problem.device_id, problem.alignment) == ("cuda", 0, 16)
    assert problem.strides == ((0, 0, 0, 1),) * 3


@pytest.mark.parametrize(("name", "n"), list(itertools.product(PATTERNS, (100, 512))))
def test_patterns_have_the_length_asked_for(name, n):
    assert PATTERNS[name](n).shape == (n, n)


def test_what_no_device_runs():
    spec = AttentionSpec(cuda_problem("float16", 64, 8, 8), masks.dense(8))
    assert backend_for(spec, (8, 0), "sm90") is None
    assert backend_for(spec, (8, 0), "cpu") is None
    with pytest.raises(
        ValueError, match=r"impl='sm90' has no kernels of compute capability \(8, 0\)"
    ):
        kernels_of(spec, (8, 0), impl="sm90")


def test_kernels_are_those_of_both_passes_each_once():
    spec = AttentionSpec(cuda_problem("float16", 64, 256, 256), masks.causal(256))
    forward, backward = (kernels_of(spec, (8, 0), passes=(x,)) for x in ("forward", "backward"))
    both = kernels_of(spec, (8, 0))
    assert len(set(both)) == len(both)
    assert set(both) == {*forward, *backward}
    assert set(both) <= set(common_kernels("float16", 64, (8, 0), ["causal"]))
    empty = AttentionSpec(cuda_problem("float16", 64, 0, 256), masks.causal(0, 256))
    assert kernels_of(empty, (8, 0)) == []


def test_the_passes_have_their_kernels():
    spec = AttentionSpec(cuda_problem("bfloat16", 128, 4096, 4096), masks.dense(4096))
    names = {
        passes: [kernel.name for kernel in kernels_of(spec, (9, 0), passes=(passes,))]
        for passes in ("forward", "backward", "deterministic")
    }
    assert names == {
        "forward": ["nbflash_fwd_sm90"],
        "backward": ["nbflash_bwd_sm90", "nbflash_statistics_sm90", "nbflash_convert_dq_sm90"],
        "deterministic": ["nbflash_bwd_sm90", "nbflash_bwd_sm90_dq"],
    }


def test_block_maps_take_the_kernels_that_plan_them():
    """By rows and, backward, by columns; nothing of their contents is known."""
    n = 512
    layout = BlockLayout((n, n), (64, 64), (1, 1), 3, masks.causal(n), 1)
    spec = AttentionSpec(cuda_problem("bfloat16", 128, n, n), layout)
    names = {
        which: [kernel.name for kernel in kernels_of(spec, (9, 0), passes=(which,))]
        for which in ("forward", "backward")
    }
    by_rows = ["count_tiles", "list_tiles", "running_sum", "work_order", "overflow"]
    assert {f"nbflash_{name}" for name in (*by_rows, "fwd_sm90")} == set(names["forward"])
    by_columns = {"nbflash_count_columns", "nbflash_transpose_lists", "nbflash_bwd_sm90"}
    assert by_columns < set(names["backward"])


@pytest.mark.parametrize("impl", ["sm90", "sm80", "simt"])
def test_executors_end_without_the_collector(impl):
    """And with them the tables of their kernels: CUDA memory is nothing to Python's collector."""
    spec = AttentionSpec(cuda_problem("bfloat16", 64, 256, 256), masks.causal(256))
    with collector_off():
        executor = prepare(impl, spec, Recording((9, 0)))
        executor.bind_forward()
        for deterministic in (False, True):
            executor.bind_backward(deterministic)
        held = [weakref.ref(executor), weakref.ref(getattr(executor, "_launches", executor))]
        del executor
        assert [x() for x in held] == [None, None]


def test_nothing_to_compute_needs_no_kernel():
    spec = AttentionSpec(cuda_problem("bfloat16", 64, 0, 9), masks.dense(0, 9))
    assert kernels_of(spec, (9, 0)) == []


def test_bound_kernels_end_without_the_collector(monkeypatch):
    launched = []
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        driver=types.SimpleNamespace(launchKernel=lambda *what: launched.append(what[0])),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launch, "load", lambda *which: 7)
    spec = AttentionSpec(cuda_problem("float32", 64, 64, 64), masks.dense(64))
    kernel_spec, *_ = kernels_of(spec, (9, 0), passes=["forward"])
    with collector_off():
        run = launch.bind(kernel_spec, 1, (), 0, (9, 0), lambda: 0)
        run([])
        assert launched == [7]
        found = weakref.ref(run)
        del run
        assert found() is None


@pytest.mark.parametrize("impl", ["simt", "sm90"])
def test_device_tests_name_their_kernels(impl, monkeypatch):
    """What is compiled before they run, without a device."""
    monkeypatch.setattr(device, "cuda_device", lambda number: Recording((9, 0)))
    path = Path(__file__).parents[2] / "device" / "compile_ahead.py"
    ahead = types.SimpleNamespace(**runpy.run_path(path))
    monkeypatch.setitem(ahead.sm90_specs.__globals__, "_not_hopper", list)
    problem, mask = ahead.problem_of("bfloat16", 64, sizes=(2, 63, 129, 4)), masks.dense(63, 129)
    score = scores.bias(np.zeros((63, 129), np.float32))
    spec = AttentionSpec(problem, mask, score)
    passes = "forward", "backward", "deterministic"
    of = {"simt": ahead.simt_specs, "sm90": ahead.sm90_specs}[impl]
    named = {each.name for each in of(problem, score, 0.0, mask)}
    assert named >= {each.name for each in kernels_of(spec, (9, 0), impl=impl, passes=passes)}
    learned = {each.name for each in ahead.score_specs(problem, score, mask, impl)}
    around = {"nbflash_delta_simt", "nbflash_convert_dq_simt"}
    assert learned == around | {f"nbflash_fwd_{impl}", "nbflash_dscore_simt"}
    decode = ahead.decode_specs("bfloat16", "int8", 64, 2, (4, 2))
    assert [each.name for each in decode] == ["nbflash_decode_sm80", "nbflash_decode_sm90"]


def test_scratch_arrays_begin_at_whole_vectors():
    """Of 16 bytes, in the memory of one allocation."""
    gpu = object.__new__(device.Gpu)
    gpu._alloc = lambda nbytes: types.SimpleNamespace(ptr=4096, size=nbytes)
    memory, starts = gpu.scratch([(3, 2), (1,), (5,)], np.float32)()
    assert starts == [4096, 4128, 4144]
    assert memory.size == 80


@pytest.mark.parametrize("least", [4, 16])
def test_vectors_are_read_where_the_gradient_allows_it_too(least):
    launches = object.__new__(SimtLaunches)
    launches.problem = types.SimpleNamespace(dtype="float32", head_dim=8, alignment=16)
    assert launches.vectors_with(DeviceArray(SHAPE, address=2**40 + least)) is (least == 16)


@pytest.mark.parametrize("which", [0, 2, 4])
def test_parts_are_merged_in_vectors_where_all_allow_it(which, monkeypatch):
    """Of part a, of part b and of the result."""
    found = []
    run = (lambda words: None), types.SimpleNamespace(words=list)

    def bound(device_id, shape, layout, how):
        found.append(how[0])
        return run

    monkeypatch.setattr(merge_host, "_bound", bound)
    tensors = [np.zeros((LSE_SHAPE if i % 2 else SHAPE), np.float32) for i in range(6)]
    merge_host.merge(tensors[:2], tensors[2:4], tensors[4:])
    tensors[which] = np.zeros(tensors[0].size + 1, np.float32)[1:].reshape(SHAPE)
    merge_host.merge(tensors[:2], tensors[2:4], tensors[4:])
    assert found == [4, 1]


def test_a_kernel_that_is_kept_needs_no_numba():
    """Plans, keys and the words of arguments: half a second of the first call of a process."""
    code = """
import sys
sys.modules["numba"] = sys.modules["numba.cuda"] = sys.modules["cuda.core"] = None
import nbflash.distributed
from nbflash.cuda import kernel_key, launch
from nbflash.planning.kernels import common_decode_kernels, common_kernels
for capability in ((8, 0), (9, 0)):
    for dtype in ("bfloat16", "float32"):
        specs = common_kernels(dtype, 64, capability)
        specs += common_decode_kernels(dtype, 64, capability)
        for spec in specs:
            assert len(kernel_key.of(spec, capability)) == 64
            assert [word for kind in spec.signature for word in launch._words_of(kind)]
        names = {spec.name for spec in specs}
        assert {"nbflash_decode_simt", "nbflash_decode_sm80"} & names, names
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_numba_takes_for_an_argument_is_in_every_key(capability):
    specs = [pause_spec(), *common_kernels("bfloat16", 64, capability, ("causal",))]
    for spec in specs:
        assert ("nbflash.cuda.kinds", "numba_type") in definitions_of(*kernel_key.roots_of(spec))
