"""The kernels of selection on a GPU: results of the NumPy form, and graphs with other contents."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, differing, host

import nbflash
from nbflash import selection
from nbflash.backends.block_selection import host as on_gpu
from nbflash.selection import blocks, compressed_keys
from nbflash.testing import assert_within_reference, make_qkv

SHAPE = 2, 700, 3, 64


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_means(dtype, size):
    """Of whole numbers: their sums are exact, whatever their order."""
    x = np.random.default_rng(size).integers(-8, 9, SHAPE).astype(DTYPES[dtype])
    on_device = cupy.asarray(x)
    for part in ((), (slice(None), slice(None), slice(1, 3)), (..., slice(1, 60))):
        got = on_gpu.block_means(on_device[part], size)
        assert np.array_equal(host(got), blocks.means(np, x[part], size))


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("columns", [8, 64, 65, 700, 2048])
def test_ranked(columns, causal):
    """Few values, so that many are equal; zeros of both signs, infinities and NaN."""
    values = np.array([-1, -0.0, 0, 1e-40, 1, np.inf, -np.inf, np.nan], np.float32)
    q = k = np.zeros((2, 16 * columns - 3, 2, 8), np.float32)
    q = q[:, :40]
    on_host, _ = blocks.check_blocks(q, k, 16, causal)
    on_device, _ = blocks.check_blocks(cupy.asarray(q), cupy.asarray(k), 16, causal)
    scores = np.random.default_rng(columns).choice(values, (2, 2, *on_host.grid))
    for width in (1, columns // 3, columns):
        expected = blocks.ranked(on_host, scores, width, 1, 2)
        got = blocks.ranked(on_device, cupy.asarray(scores), width, 1, 2)
        for own, wanted in zip(got, expected, strict=True):
            assert np.array_equal(host(own), wanted)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (6, 65, 130, 128), (4, 160, 160, 64)])
def test_products(sizes):
    """Of whole numbers: their sums are exact, whatever their order."""
    planes, m, n, width = sizes
    rng = np.random.default_rng(m)
    shapes = (2, planes, m, width), (2, max(planes // 2, 1), n, width)
    q, k = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    got = on_gpu.block_products(cupy.asarray(q), cupy.asarray(k))
    assert np.array_equal(host(got), blocks.products(np, q, k))


@pytest.mark.parametrize("width", [32, 33])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_tokens(dtype, width):
    """Of whole numbers, whose sums are exact: contiguous arrays, and views of others."""
    rng = np.random.default_rng(width)
    q = rng.integers(-8, 9, (2, 70, 6, 2 * width)).astype(DTYPES[dtype])
    k = rng.integers(-8, 9, (2, 3, 130, width)).astype(DTYPES[dtype])
    heads_first = np.ascontiguousarray(q[..., :width].swapaxes(1, 2))
    cases = {
        "contiguous": lambda q, _: q[..., :width].copy(),
        "tokens": lambda q, _: q[:, 5::2, :, width:],
        "columns": lambda q, _: q[..., ::2],
        "backwards": lambda q, _: q[:, ::-1, :, :width],
        "heads backwards": lambda q, _: q[:, :, ::-1, :width],
        "one token": lambda q, _: q[:, 3:4, :, :width],
        "heads first": lambda _, q: q.swapaxes(1, 2),
    }
    on_device = cupy.asarray(q), cupy.asarray(heads_first)
    for name, view in cases.items():
        got = blocks.token_products(cupy, view(*on_device), cupy.asarray(k))
        wanted = blocks.token_products(np, view(q, heads_first), k)
        assert np.array_equal(host(got), wanted), name


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_weights(causal):
    """The last row of blocks is ragged."""
    scores = np.random.default_rng(1).standard_normal((2, 4, 300, 63), np.float32) * 9
    of_keys = 0.7, (64, 32), 8, 500
    first = 200 if causal else 499
    exact, low = (np.zeros((2, 2, 5, 16), dtype) for dtype in (np.float64, np.float32))
    for wanted in (exact, low):
        compressed_keys.block_weights(scores.astype(wanted.dtype), wanted, 0, first, *of_keys)
    got = cupy.full(low.shape, np.nan, np.float32)
    on_gpu.block_weights(cupy.asarray(scores), got, 0, first, *of_keys)
    assert_within_reference(host(got), exact, low, name="weights", factor=3)


def test_a_step_of_training_in_a_graph():
    """Selection, attention and its backward, replayed 1,000 times with other q, k, v and dout."""
    inputs = [cupy.asarray(x) for x in make_qkv(1, 700, 700, 4, 2, 64, np.float16)]

    def step():
        q, k, v, dout = inputs
        made = selection.mean_pooled(q, k, topk=3, causal=True)
        out, lse = nbflash.attention(q, k, v, made, return_lse=True)
        options = {"deterministic": True}
        gradients = nbflash.attention_backward(dout, q, k, v, out, lse, made, **options)
        return made.indices, out, *gradients

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        captured = step()
        graph = stream.end_capture()
        rng, wrong, seen = cupy.random.default_rng(0), 0, set()
        for i in range(1000):
            for x in inputs:
                x[...] = rng.standard_normal(x.shape, np.float32).astype(x.dtype)
            graph.launch(stream)
            wrong += differing(captured, step())
            if i % 100 == 0:
                seen.add(host(captured[0]).tobytes())
        assert int(wrong) == 0
        assert len(seen) == 10
