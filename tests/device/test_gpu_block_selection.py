"""The kernels of selection on a GPU: results of the NumPy form, and graphs with other contents."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, host

from nbflash.backends.block_selection import host as on_gpu
from nbflash.selection import blocks
from nbflash.testing import make_qkv

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


def test_a_graph_is_replayed_with_other_contents():
    """Means and order of blocks; CuPy refuses the product between them during capture."""
    q, k = (cupy.asarray(x) for x in make_qkv(1, 700, 700, 4, 4, 64, np.float16)[:2])
    on_device, _ = blocks.check_blocks(q, k, 64, True)
    scores = blocks.products(cupy, *(blocks.means(cupy, x, 64) for x in (q, k)))

    def select():
        return on_gpu.block_means(q, 64), *blocks.ranked(on_device, scores, 3, 0, 0)

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        select()
        stream.synchronize()
        stream.begin_capture()
        captured = select()
        graph = stream.end_capture()
        for _ in range(3):
            q[...] = q[:, ::-1].copy()
            scores[...] = -scores
            graph.launch(stream)
            replayed = [host(x) for x in captured]
            for a, b in zip(replayed, select(), strict=True):
                assert np.array_equal(a, host(b))
