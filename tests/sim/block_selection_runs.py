"""What the kernels of selection give, beside its NumPy form."""

from types import SimpleNamespace

import numpy as np

from nbflash import testing
from nbflash.backends.block_selection import host
from nbflash.backends.block_selection.block_products import BlockProductsConfig
from nbflash.backends.block_selection.block_weights import BlockWeightsConfig
from nbflash.selection import blocks, compressed_keys

SMALL_WEIGHTS = BlockWeightsConfig(threads=96)
SMALL = BlockProductsConfig(tile=16, depth=8)


def integers(shape, dtype, seed=0):
    """Numbers whose sums are exact, whatever their order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def check_means(x, size, module=host):
    """Means against the specification, bit for bit."""
    got = module.block_means(x, size)
    np.testing.assert_array_equal(got, blocks.means(np, x, size))
    assert got.dtype == np.float32


def check_products(planes, m, n, width, group=1, *, config=SMALL, module=host):
    """Products against the specification, bit for bit."""
    q, k = (
        integers((2, *shape, width), np.float32, seed=m)
        for shape in ((planes, m), (planes // group, n))
    )
    got = module.block_products(q, k, config)
    np.testing.assert_array_equal(got, blocks.products(np, q, k))
    assert got.dtype == np.float32


# Queries, means, heads and those of K; a block, keys of a mean, all keys; where queries begin; the
# scale.
WEIGHT_CASES = {
    "one": (1, 1, (1, 1), (1, 1), 1, 1, 0),
    "causal": (37, 21, (4, 2), (8, 16), 4, 83, 46),
    "nearly equal weights": (37, 21, (2, 1), (8, 16), 4, 83, 46, 0.01),
    "all keys": (19, 40, (2, 1), (16, 8), 2, 80, 79),
    "queries before the keys": (20, 9, (1, 1), (4, 8), 8, 70, -9, -8),
    "a column of many means": (9, 210, (1, 1), (4, 105), 1, 210, 200),
    "several columns of blocks": (6, 140, (2, 2), (4, 4), 2, 280, 270),
}


def check_weights(queries, n, heads, size, length, nk, first, scale=0.3, *, module=host):
    """Sums of weights in the middle rows of all, by float64 and the error of NumPy's float32."""
    rng = np.random.default_rng(n)
    scores = rng.standard_normal((2, heads[0], queries, n), np.float32) * 20
    rows, columns = -(-queries // size[0]), -(-nk // size[1])
    got = np.full((2, heads[1], rows + 3, columns), np.nan, np.float32)
    module.block_weights(scores, got, 2, first, scale, size, length, nk, SMALL_WEIGHTS)
    assert np.isnan(got[:, :, [0, 1, -1]]).all()
    exact, low = (np.zeros((2, heads[1], rows, columns), t) for t in (np.float64, np.float32))
    for wanted in (exact, low):
        given = scores.astype(wanted.dtype)
        compressed_keys.block_weights(given, wanted, 0, first, scale, size, length, nk)
    testing.assert_within_reference(got[:, :, 2:-1], exact, low, name="weights", factor=3)


def check_not_finite(module=host):
    """NaN, infinities and rows of nothing but −∞, where NumPy has them, and numbers as NumPy's."""
    scores = np.random.default_rng(0).standard_normal((1, 1, 6, 8), np.float32)
    scores[0, 0, 0, 2], scores[0, 0, 1, 3], scores[0, 0, 2, 1] = np.nan, np.inf, -np.inf
    scores[0, 0, 3], scores[0, 0, 4, :4] = -np.inf, -3e38
    got, low = np.full((2, 1, 1, 6, 8), np.nan, np.float32)
    exact, of_keys = np.zeros((1, 1, 6, 8)), (0, 7, 1.0, (1, 1), 1, 8)
    module.block_weights(scores, got, *of_keys, SMALL_WEIGHTS)
    for wanted in (exact, low):
        compressed_keys.block_weights(scores.astype(wanted.dtype), wanted, *of_keys)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    numbers = (x[~np.isnan(exact)] for x in (got, exact, low))
    testing.assert_within_reference(*numbers, name="weights", factor=3)


def scores_of(shape, seed=0):
    """Few values, so that many are equal; −0 beside 0, infinities and NaN."""
    values = np.array([-2, -1, -0.0, 0, 1e-40, 1, 2, np.inf, -np.inf, np.nan], np.float32)
    return np.random.default_rng(seed).choice(values, shape)


def check_best(grid, size, *, width, causal, sinks, local, planes=(2, 2), module=host):
    """Indices and counts against the specification, bit for bit.

    ``grid`` are queries and keys, ``size`` those of a block.
    """
    rows, columns = (-(-n // of) for n, of in zip(grid, size, strict=True))
    scores, problem = scores_of((*planes, rows, columns)), SimpleNamespace(nq=grid[0], nk=grid[1])
    geometry = blocks.Blocks(np, None, None, problem, size, causal)
    last = blocks._last_column(grid, size, causal)
    got = module.best_blocks(scores, last, width, sinks, local)
    wanted = blocks.ranked(geometry, scores, width, sinks, local)
    for own, expected in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(own, expected)
        assert own.dtype == np.int32
