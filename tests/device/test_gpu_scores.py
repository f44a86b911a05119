"""Score functions on the device: every one in every implementation and pass."""

import cupy
import numpy as np
import pytest
from compile_ahead import SPECS, problem_of, sm90_specs
from device_runs import FACTORS, ON_HOPPER, RESULTS, blocks_of_64, by_impl, gallery, host, make_qkv
from score_cases import HEADS, NAMES, quadratic, quadratic_slope, scores_for

import masks
import nbflash
from nbflash import reference, scores, testing
from nbflash.backends.sm90.backward.choice import one_pass_config
from nbflash.backends.sm90.executor import HOPPER
from nbflash.cuda import score_params

pytestmark = pytest.mark.usefixtures("one_pass")
BLOCK = 64
MASKS = ("dense", "causal", "window", "checkerboard", "dead-scattered", "per-batch-per-head")
LENGTHS = ((5, 9), (63, 129), (200, 130), (257, 300))
DTYPES = {"simt": ("float32", "float64", "bfloat16")}
DTYPES["sm80"] = DTYPES["sm90"] = ("float16", "bfloat16")
NARROW, SLOPES = (420, 560), scores.alibi(np.arange(HEADS) / HEADS)
by_name = pytest.mark.parametrize("name", NAMES)


def dealt(impl, name, head_dim):
    """``seed, lengths, mask, dtype, scale`` of the problems of a test."""
    start = NAMES.index(name) + head_dim // 64
    for i, lengths in enumerate(LENGTHS, start):
        mask = gallery(*lengths, heads=HEADS)[MASKS[i % len(MASKS)]]
        scale = -(head_dim**-0.5) if i % 3 == 0 else None
        yield i, lengths, mask, DTYPES[impl][i % len(DTYPES[impl])], scale


def kernels(impl="simt", name=None, head_dim=64, **more):
    """For `compile_ahead`."""
    if "tiles" in more:
        problem = problem_of("bfloat16", head_dim, sizes=(1, 1000, 1000, HEADS))
        yield sm90_specs, problem, scores_for(1000, 1000)[name], 0.0, blocks_of_64(more["tiles"])
    elif name and head_dim in (64, 128):
        for _, lengths, mask, dtype, scale in dealt(impl, name, head_dim):
            problem = problem_of(dtype, head_dim, scale=scale, sizes=(2, *lengths, HEADS))
            yield SPECS[impl], problem, scores_for(*lengths)[name], 0.0, mask
    elif "mask" in more:
        problem = problem_of(more["dtype"], head_dim, sizes=(2, *NARROW, HEADS))
        yield sm90_specs, problem, SLOPES, 0.0, gallery(*NARROW, heads=HEADS)[more["mask"]]
    elif "dtype" in more:
        problem = problem_of(more["dtype"], head_dim, sizes=(2, 257, 256, HEADS))
        yield sm90_specs, problem, scores.softcap(1.5), 0.0, masks.dense(257, 256)
    elif name:
        score, mask = scores_for(130, 200)[name], gallery(130, 200)["causal"]
        yield sm90_specs, problem_of("bfloat16", head_dim), score, 0.0, mask


def check(inputs, mask, score, impl, scale=None):
    """Every block of every result of both forms of the backward within its budget."""
    (q, k, v, dout), options = inputs, {"scale": scale, "score": score, "impl": impl}
    q_, k_, v_, dout_ = map(host, inputs)
    ref = reference.attention(q_, k_, v_, mask, scale, score)
    ref += reference.attention_backward(dout_, q_, k_, v_, mask, scale, None, score)
    low = testing.low_precision(q_, k_, v_, mask, scale, score)
    low += testing.low_precision_backward(dout_, q_, k_, v_, mask, scale, None, score)
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, **options)
    for deterministic in (False, True):
        gradients = nbflash.attention_backward(
            dout, q, k, v, out, lse, mask, deterministic=deterministic, **options
        )
        got = map(host, (out, lse, *gradients))
        for name, factor, *values in zip(RESULTS, FACTORS, got, ref, low, strict=True):
            axis = 2 if name == "lse" else 1
            testing.assert_blocks_within_reference(
                *values, BLOCK, name=name, factor=factor, axis=axis
            )


@by_impl
@by_name
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_and_backward(impl, name, head_dim):
    """Lengths, masks, dtypes and signs of the scale are dealt out."""
    for seed, lengths, mask, dtype, scale in dealt(impl, name, head_dim):
        inputs = make_qkv(2, *lengths, HEADS, 2, head_dim, dtype, seed)
        check(inputs, mask, scores_for(*lengths)[name], impl, scale)


@ON_HOPPER
@by_name
@pytest.mark.parametrize("head_dim", [8, 192, 256])
def test_other_heads_on_hopper(name, head_dim):
    inputs = make_qkv(1, 130, 200, HEADS, HEADS, head_dim, "bfloat16")
    check(inputs, gallery(130, 200)["causal"], scores_for(130, 200)[name], "sm90")


@ON_HOPPER
@pytest.mark.parametrize("tiles", ["full", "masked"])
@pytest.mark.parametrize("name", ["softcap", "relative"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_64_keys(name, head_dim, tiles):
    inputs = make_qkv(1, 1000, 1000, HEADS, 2, head_dim, "bfloat16")
    check(inputs, blocks_of_64(tiles), scores_for(1000, 1000)[name], "sm90")


@ON_HOPPER
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_softcap_of_narrow_heads_in_one_pass(head_dim, dtype):
    """No tile of 128 × 128 is masked."""
    inputs, score = make_qkv(2, 257, 256, HEADS, 2, head_dim, dtype), scores.softcap(1.5)
    plan = nbflash.plan(*inputs[:3], score=score, impl="sm90")
    code, _ = score_params.prepare(score, plan.problem, HOPPER)
    assert one_pass_config(plan.spec, code)
    check(inputs, plan.mask, score, "sm90")


@ON_HOPPER
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("mask", ["dense", "dead-scattered", "checkerboard", "per-batch-per-head"])
def test_alibi_of_narrow_heads_by_a_product(mask, head_dim, dtype):
    """In tiles before the diagonal, behind it and across."""
    inputs = make_qkv(2, *NARROW, HEADS, 2, head_dim, dtype)
    mask = gallery(*NARROW, heads=HEADS)[mask]
    schedule = nbflash.plan(*inputs[:3], mask, score=SLOPES, impl="sm90").schedule
    assert (schedule.tile_m, schedule.tile_n) == (192, 112)
    check(inputs, mask, SLOPES, "sm90")


@by_impl
def test_caps_share_a_kernel_and_stay_apart(impl):
    """The cap is an argument; large scores end at it."""
    q, k, v, _ = make_qkv(1, 64, 64, 2, 2, 64, "float16")
    for cap in (2.0, 3.0):
        score = scores.softcap(cap)
        _, lse = nbflash.attention(100 * q, k, v, impl=impl, score=score, return_lse=True)
        assert float(cupy.abs(lse).max()) <= cap + np.log(64) + 2**-6


def score_of(kind, *arrays):
    if kind == "custom":
        return scores.custom(quadratic, quadratic_slope, (0.1, *arrays))
    return getattr(scores, kind)(*arrays)


ARRAYS = {"bias": ((1, HEADS, 70, 130),), "relative": ((HEADS, 9),)}
ARRAYS["custom"] = (HEADS,), (70, 130)


def results(plan, q, k, v, dout):
    out, lse = plan(q, k, v)
    return out, lse, *plan.backward(dout, q, k, v, out, lse, deterministic=True)


@by_impl
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_cuda_memory_are_read_where_they_are(kind, impl):
    """To the bit as copies of them; changed in place they have the same plan, and graph."""
    q, k, v, _ = inputs = make_qkv(2, 70, 130, HEADS, 2, 64, "bfloat16")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ARRAYS[kind]]
    held, how = [cupy.asarray(x) for x in arrays], {"impl": impl}
    plan = nbflash.plan(q, k, v, score=score_of(kind, *held), **how)
    results(plan, *inputs)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        replayed = results(plan, *inputs)
        graph = stream.end_capture()
    for factor in (1, 2, 4):
        copies = nbflash.plan(q, k, v, score=score_of(kind, *(factor * x for x in arrays)), **how)
        want = results(copies, *inputs)
        cupy.cuda.Device().synchronize()
        with stream:
            graph.launch(stream)
            stream.synchronize()
        again = nbflash.plan(q, k, v, score=score_of(kind, *held), **how)
        assert again is plan
        for name, x, y, z in zip(RESULTS, want, results(again, *inputs), replayed, strict=True):
            assert bool((x == y).all() and (x == z).all()), name
        for x in held:
            x *= 2


def _unknown(s, b, h, q_idx, kv_idx):
    return s + kv_idx.page


@by_impl
def test_what_cannot_be_compiled_is_named(impl):
    q, k, v, _ = make_qkv(1, 8, 8, 1, 1, 64, "float16")
    with pytest.raises(TypeError, match=r"score: _unknown, .*test_gpu_scores.py:\d+ cannot be"):
        nbflash.attention(q, k, v, impl=impl, score=scores.custom(_unknown))
