"""Gradients of a score's arrays on the device: every array, masks, dropout, bits, graphs."""

import cupy
import numpy as np
import pytest
from compile_ahead import problem_of, score_specs
from device_runs import by_impl, gallery, host, make_qkv
from score_cases import HEADS
from score_gradients import NAMES, expected, hold, learned_scores

import nbflash
from nbflash import scores

MASKS = ("dense", "causal", "window", "checkerboard", "dead-scattered", "per-batch-per-head")
LENGTHS = ((5, 9), (63, 129), (200, 130), (257, 300))
DTYPES = {"simt": ("float32", "float64", "bfloat16")}
DTYPES["sm80"] = DTYPES["sm90"] = ("float16", "bfloat16")


def dealt(impl, name, head_dim):
    """``seed, lengths, mask, dtype, scale`` of the problems of a test."""
    start = NAMES.index(name) + head_dim // 64
    dtype = DTYPES[impl][start % len(DTYPES[impl])]  # compiled anew
    for i, lengths in enumerate(LENGTHS, start):
        mask = gallery(*lengths, heads=HEADS)[MASKS[i % len(MASKS)]]
        yield i, lengths, mask, dtype, -(head_dim**-0.5) if i % 3 == 0 else None


def kernels(impl="simt", name=None, head_dim=None):
    """For `compile_ahead`."""
    if head_dim:
        for _, lengths, mask, dtype, scale in dealt(impl, name, head_dim):
            problem = problem_of(dtype, head_dim, scale=scale, sizes=(2, *lengths, HEADS))
            yield score_specs, problem, learned_scores(*lengths, 2)[name], mask, impl


def gradients(inputs, mask, score, dlse=None, **how):
    q, k, v, dout = inputs
    out, lse = nbflash.attention(q, k, v, mask, score=score, return_lse=True, **how)
    return nbflash.score_backward(dout, q, k, v, out, lse, mask, score=score, dlse=dlse, **how)


def check(inputs, mask, score, dlse=None, *, impl, **how):
    given = None if dlse is None else cupy.asarray(dlse)
    got = gradients(inputs, mask, score, given, impl=impl, **how)
    on_host = [host(x) for x in inputs]
    hold(tuple(map(host, got)), *expected(on_host, mask, dlse=dlse, score=score, **how))


@by_impl
@pytest.mark.parametrize(
    ("name", "head_dim"), [*((name, 64) for name in NAMES), ("bias", 128), ("composed", 128)]
)
def test_every_array(impl, name, head_dim):
    """Lengths, masks, dtypes, signs of the scale and a gradient of the LSE are dealt out."""
    for seed, lengths, mask, dtype, scale in dealt(impl, name, head_dim):
        inputs = make_qkv(2, *lengths, HEADS, 2, head_dim, dtype, seed)
        wide = np.float64 if dtype == "float64" else np.float32
        dlse = np.random.default_rng(seed).standard_normal((2, HEADS, lengths[0])).astype(wide)
        check(inputs, mask, learned_scores(*lengths, 2)[name], dlse, impl=impl, scale=scale)


@pytest.mark.parametrize("name", ["bias", "relative"])
def test_dropout(name):
    inputs = make_qkv(2, 100, 130, HEADS, 2, 64, "float32")
    score, how = learned_scores(100, 130, 2)[name], {"dropout": 0.3, "seed": (5, 6)}
    check(inputs, gallery(100, 130)["causal"], score, impl="simt", **how)


def test_nothing_of_what_is_masked():
    """NaN in hidden keys and in queries that see nothing."""
    mask = gallery(100, 130, heads=HEADS)["dead-keys"]
    inputs = make_qkv(1, 100, 130, HEADS, 2, 64, "float32")
    hidden = cupy.asarray(~mask.dense().reshape(100, 130).any(0))
    for x in inputs[1:3]:
        x[:, hidden] = cupy.nan
    (bias,) = gradients(inputs, mask, learned_scores(100, 130)["bias"], impl="simt")
    assert not bias[..., hidden].any()
    assert cupy.isfinite(bias).all()


@by_impl
def test_a_whole_bias_has_the_same_bits_every_time(impl):
    inputs = make_qkv(2, 257, 300, HEADS, 2, 64, "float16")
    score = learned_scores(257, 300, 2)["bias"]
    first, second = (gradients(inputs, None, score, impl=impl)[0] for _ in range(2))
    assert bool((first == second).all())


def test_an_array_of_cuda_memory():
    inputs = make_qkv(1, 100, 130, HEADS, 2, 64, "float32")
    table = np.random.default_rng(0).standard_normal((HEADS, 9), np.float32)
    got = gradients(inputs, None, scores.relative(cupy.asarray(table)), impl="simt")
    score = scores.relative(table)
    hold(tuple(map(host, got)), *expected([host(x) for x in inputs], None, score=score))


def test_in_a_graph():
    """Sums are cleared anew by every launch of the graph."""
    q, k, v, dout = inputs = make_qkv(1, 100, 130, HEADS, 2, 64, "float32")
    score = learned_scores(100, 130)["relative"]
    plan = nbflash.plan(q, k, v, score=score, impl="simt")
    out, lse = plan(q, k, v)
    plan.score_backward(dout, q, k, v, out, lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        (table,) = plan.score_backward(dout, q, k, v, out, lse)
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
    hold((host(table),), *expected([host(x) for x in inputs], None, score=score))
