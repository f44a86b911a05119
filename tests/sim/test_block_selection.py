"""The kernels of selection: results of its NumPy form, bit for bit, without races."""

import ml_dtypes
import numpy as np
import pytest
from block_selection_runs import check_means, integers

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
