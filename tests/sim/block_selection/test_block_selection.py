"""The kernels of selection: results of its NumPy form, bit for bit, without races."""

import ml_dtypes
import numpy as np
import pytest
from block_selection_runs import (
    WEIGHT_CASES,
    check_best,
    check_means,
    check_not_finite,
    check_products,
    check_weights,
    integers,
)

from nbflash import selection
from nbflash.backends.block_selection import host
from nbflash.backends.block_selection.block_products import BlockProductsConfig
from nbflash.cuda import simulator as sim

# Tokens of a block; batch, tokens, heads, head_dim.
SHAPES = {
    "ragged": (16, (2, 37, 3, 64)),
    "one token a block": (1, (1, 3, 2, 8)),
    "a block is all": (99, (1, 20, 1, 16)),
    "more rows than groups": (80, (1, 80, 1, 64)),
    "odd head": (8, (1, 20, 2, 12)),
    "wide head": (8, (1, 9, 1, 256)),
}
DTYPES = np.float16, ml_dtypes.bfloat16, np.float32, np.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_means(case, dtype):
    size, shape = case
    with sim.options(race=True, seed=1):
        check_means(integers(shape, dtype), size)


LAYOUTS = {
    "heads first": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "a part of the heads": lambda x: np.concatenate([x, x], 2)[:, :, 1:4],
    "not aligned": lambda x: np.concatenate([x, x[..., :1]], 3)[..., 1:],
    "one head for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_means_of_other_layouts(layout, dtype):
    with sim.options(race=True, seed=2):
        check_means(layout(integers((2, 19, 3, 16), dtype)), 8)


# Planes, rows of q, rows of k, width, heads of a group.
PRODUCTS = {
    "one": (1, 1, 1, 1, 1),
    "several tiles": (2, 17, 34, 20, 2),
    "whole": (1, 16, 16, 16, 1),
    "narrow": (1, 18, 17, 5, 1),
}


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products(case):
    with sim.options(race=True, seed=1):
        check_products(*case)


def test_products_of_the_tile_that_is_used():
    with sim.options(race=True, seed=1):
        check_products(1, 65, 3, 40, config=BlockProductsConfig())


@pytest.mark.parametrize("case", WEIGHT_CASES.values(), ids=WEIGHT_CASES)
def test_weights(case):
    with sim.options(race=True, seed=1):
        check_weights(*case)


def test_weights_that_are_not_finite():
    check_not_finite()


# Queries and keys, those of a block, and of the choice: how many, sinks, local.
CHOICES = {
    "one warp": ((40, 40), (8, 8), {"width": 3, "sinks": 1, "local": 1}),
    "a warp's keys": ((24, 64), (8, 1), {"width": 64, "sinks": 0, "local": 0}),
    "two warps": ((21, 65), (8, 1), {"width": 40, "sinks": 2, "local": 3}),
    "four warps": ((9, 200), (8, 1), {"width": 200, "sinks": 0, "local": 2}),
    "more queries": ((40, 20), (4, 4), {"width": 4, "sinks": 1, "local": 1}),
    "all always": ((16, 24), (4, 4), {"width": 5, "sinks": 99, "local": 99}),
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("case", CHOICES.values(), ids=CHOICES)
def test_best(case, causal):
    grid, size, options = case
    with sim.options(race=True, seed=1):
        check_best(grid, size, causal=causal, **options)


METHODS = {
    "mean_pooled": {"topk": 3},
    "compressed": {"topk": 4},
    "cumulative": {"threshold": 0.5},
    "antidiagonal": {"threshold": 0.5, "most": 3, "sinks": 1},
}


@pytest.mark.parametrize("name", METHODS)
def test_selections_by_kernels_are_those_of_numpy(name, monkeypatch):
    q, k = (integers((2, n, heads, 8), np.float32, seed=n) for n, heads in ((53, 4), (90, 2)))

    def select():
        return getattr(selection, name)(q, k, block=16, causal=True, **METHODS[name])

    expected = select()
    monkeypatch.setattr("nbflash.selection.blocks.kernels", lambda xp: host)
    chosen = select()
    assert np.array_equal(chosen.indices, expected.indices)
    assert np.array_equal(chosen.counts, expected.counts)
    assert chosen.within == expected.within
