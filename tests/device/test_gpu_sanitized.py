"""Small problems that reach every part of the kernels: what compute-sanitizer runs.

A tile or two, few heads. Part of the ordinary tier too; ``sanitize.py`` runs it under each tool.
Inputs come from the host and nothing but nbflash's own kernels computes on the device.
"""

import cupy
import decode_cases
import numpy as np
import pytest
from device_runs import (
    DTYPES,
    ON_HOPPER,
    ON_TENSOR_CORES,
    assert_close,
    by_half_impl,
    by_impl,
    by_mode,
    gallery,
    run,
)

import masks
import nbflash
from nbflash import reference, scores, testing
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.planning import plan as planning

pytestmark = pytest.mark.usefixtures("one_pass", "results_of_the_copy_engine")

SIMT = (
    ("dense", (1, 1), 64, "float32", (1, 1)),
    ("causal", (70, 70), 64, "float32", (2, 1)),
    ("causal", (129, 130), 64, "float32", (1, 1)),
    ("dead-scattered", (65, 33), 5, "float32", (2, 2)),
    ("checkerboard", (40, 140), 64, "float16", (1, 1)),
    ("butterfly", (100, 100), 64, "bfloat16", (2, 1)),
    ("per-batch-per-head", (33, 40), 64, "float64", (2, 2)),
    ("padding", (20, 150), 128, "float32", (2, 1)),
    ("empty", (20, 20), 64, "float32", (1, 1)),
    ("window", (40, 40), 256, "float32", (1, 1)),
)
# Each in one pass and in two; of the wide heads `sm90` has two only.
HALF = (
    ("dense", (1, 1), 64, "float16", (1, 1)),
    ("causal", (130, 130), 64, "bfloat16", (2, 1)),
    ("window", (70, 200), 128, "float16", (1, 1)),
    ("dead-scattered", (65, 33), 72, "float16", (2, 2)),
    ("checkerboard", (40, 140), 64, "bfloat16", (1, 1)),
    ("dense", (300, 300), 128, "bfloat16", (1, 1)),
    ("per-batch-per-head", (70, 130), 128, "bfloat16", (2, 2)),
    ("padding", (20, 150), 256, "float16", (2, 1)),
    ("causal", (130, 140), 192, "bfloat16", (2, 1)),
    ("empty", (20, 20), 64, "float16", (1, 1)),
)
COLUMNS = ("impl", "name", "shape", "head_dim", "dtype", "heads")
ROWS = [("simt", *row) for row in SIMT]
ROWS += [pytest.param("sm80", *row, marks=ON_TENSOR_CORES) for row in HALF]
ROWS += [pytest.param("sm90", *row, marks=ON_HOPPER) for row in HALF]


@pytest.fixture
def results_of_the_copy_engine(request, monkeypatch):
    """On Hopper results begin as NaN: initcheck does not see what TMA writes.

    What is between the kernels is left as it is, and so is every array of the `simt` kernels.
    """
    if "impl" in request.fixturenames and request.getfixturevalue("impl") == "sm90":
        allocator = planning.allocator

        def filled(device, device_id):
            empty, device = allocator(device, device_id)

            def nan(shape, dtype):
                array = empty(shape, dtype)
                array.data.memset(0xFF, array.nbytes)
                return array

            return nan, device

        monkeypatch.setattr(planning, "allocator", filled)


def assert_within_budget(results, inputs, mask, dlse=None, **options):
    q, k, v, dout = inputs
    backward = dout, q, k, v, mask
    ref = reference.attention(q, k, v, mask, **options)
    ref += reference.attention_backward(*backward, dlse=dlse, **options)
    low = testing.low_precision(q, k, v, mask, **options)
    low += testing.low_precision_backward(*backward, dlse=dlse, **options)
    assert_close(results, ref, low)


@by_mode
@pytest.mark.parametrize(COLUMNS, ROWS)
def test_kernels(impl, name, shape, head_dim, dtype, heads, deterministic):
    mask = gallery(*shape, heads=heads[0])[name]
    inputs = testing.make_qkv(mask.batch or 1, *shape, *heads, head_dim, DTYPES[dtype])
    there = [cupy.asarray(x) for x in inputs]
    results = run(there, mask, impl=impl, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)


@by_mode
@by_impl
def test_gradient_of_the_lse(impl, deterministic):
    mask, inputs = gallery(70, 130)["causal"], testing.make_qkv(1, 70, 130, 2, 1, 64, np.float16)
    dlse = np.random.default_rng(0).standard_normal((1, 2, 70)).astype(np.float32)
    there, dlse_there = [cupy.asarray(x) for x in inputs], cupy.asarray(dlse)
    results = run(there, mask, dlse=dlse_there, impl=impl, deterministic=deterministic)
    assert_within_budget(results, inputs, mask, dlse)


@by_mode
@pytest.mark.parametrize("head_dim", [64, 128])
@by_half_impl
def test_blocks_of_64(impl, head_dim, deterministic):
    """Configurations of their own."""
    n = 320
    mask, inputs = masks.random(n, 64, 0.3), testing.make_qkv(1, n, n, 2, 2, head_dim, np.float16)
    there = [cupy.asarray(x) for x in inputs]
    schedule = nbflash.plan(*there[:3], mask, impl=impl).schedule
    assert (schedule.tile_m, schedule.tile_n) == (64, 64)
    results = run(there, mask, impl=impl, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)


@by_mode
@pytest.mark.parametrize("impl", [pytest.param("sm90", marks=ON_HOPPER)])
def test_more_rows_than_blocks(impl, deterministic):
    """What a block's rows share: the places of Q and of what leaves through them."""
    mask, heads = gallery(130, 130)["causal"], 140
    inputs = testing.make_qkv(1, 130, 130, heads, heads, 64, np.float16)
    assert heads * 2 > 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    results = run([cupy.asarray(x) for x in inputs], mask, impl=impl, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)


SCORE = scores.compose(scores.softcap(2), scores.alibi(0.1))
OPTIONS = {
    "score": {"score": SCORE},
    "dropout": {"dropout": 0.3, "seed": (5, 7)},
    "both": {"score": SCORE, "dropout": 0.3, "seed": (5, 7)},
}


def check_options(inputs, mask, impl, deterministic, **options):
    """Of ``score``, or ``dropout`` and ``seed``."""
    q, k, v, dout = map(cupy.asarray, inputs)
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, impl=impl, **options)
    how = {"impl": impl, "deterministic": deterministic, **options}
    gradients = nbflash.attention_backward(dout, q, k, v, out, lse, mask, **how)
    assert_within_budget((out, lse, *gradients), inputs, mask, **options)


@by_mode
@by_impl
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_and_dropout(impl, name, deterministic):
    mask, inputs = gallery(130, 140)["causal"], testing.make_qkv(1, 130, 140, 2, 1, 128, np.float16)
    check_options(inputs, mask, impl, deterministic, **OPTIONS[name])


NARROW = {"softcap": (scores.softcap(2), (130, 128)), "alibi": (scores.alibi(0.1), (190, 330))}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("impl", [pytest.param("sm90", marks=ON_HOPPER)])
def test_scores_of_narrow_heads(impl, name):
    """ALiBi by a product; in one pass without slopes, or softcap where no tile is masked."""
    score, shape = NARROW[name]
    mask = masks.dense(*shape)
    inputs = testing.make_qkv(1, *shape, 2, 1, 64, np.float16)
    check_options(inputs, mask, impl, deterministic=False, score=score)


@pytest.mark.parametrize("storage", [None, np.int8])
@pytest.mark.parametrize(
    ("kind", "impl"),
    [("f32", "simt"), ("bf16", "sm80"), pytest.param("bf16", "sm90", marks=ON_HOPPER)],
)
def test_decode(kind, impl, storage):
    """Several parts, joined; a cache in pages; no keys at all."""
    lengths = np.array([0, 65, 1000], np.int32)
    shape = {"heads": (8, 2), "head_dim": 64, "dtype": decode_cases.DTYPES[kind]}
    q, k, v = decode_cases.contiguous(2, lengths=lengths, capacity=1000, **shape)
    caches, names = [k, v], ["k_cache", "v_cache"]
    if storage:
        caches = [x for cache in (k, v) for x in quantise(cache, storage)]
        k, v = (dequantise(*pair, np.float32) for pair in (caches[:2], caches[2:]))
        names = ["k_cache", "k_scale", "v_cache", "v_scale"]
    *pages, table = decode_cases.paged(*caches, lengths=lengths)
    named = dict(zip((*names, "lengths", "block_table"), (*pages, lengths, table), strict=True))
    named = {name: cupy.asarray(x) for name, x in named.items()}
    results = nbflash.decode(cupy.asarray(q), **named, return_lse=True, impl=impl)
    decode_cases.check([x.get() for x in results], q, k, v, lengths)


@by_mode
def test_rows_that_are_read_one_element_at_a_time(deterministic):
    mask = gallery(70, 40)["causal"]
    inputs = testing.make_qkv(1, 70, 40, 2, 1, 64, np.float32)
    moved = []
    for x in inputs:
        padded = np.pad(x, ((0, 0),) * 3 + ((1, 0),), constant_values=np.nan)
        moved.append(cupy.asarray(padded)[..., 1:])
    assert_within_budget(run(moved, mask, deterministic=deterministic), inputs, mask)


@by_mode
def test_garbage_between_the_keys(deterministic):
    """Of the threads of a warp, some find the NaN and some do not."""
    mask = gallery(70, 150)["dead-keys"]
    inputs = testing.make_qkv(1, 70, 150, 2, 1, 64, np.float32)
    dirty = [x.copy() for x in inputs]
    dead = ~mask.dense().any(axis=0)
    for x in dirty[1:3]:
        x[:, dead] = np.nan
    results = run([cupy.asarray(x) for x in dirty], mask, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)
