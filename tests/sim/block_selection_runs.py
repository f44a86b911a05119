"""What the kernels of selection give, beside its NumPy form."""

from types import SimpleNamespace

import numpy as np

from nbflash.backends.block_selection import host
from nbflash.backends.block_selection.block_products import BlockProductsConfig
from nbflash.selection import blocks

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
