"""What the kernels of selection give, beside its NumPy form."""

import numpy as np

from nbflash.backends.block_selection import host
from nbflash.selection import blocks


def integers(shape, dtype, seed=0):
    """Numbers whose sums are exact, whatever their order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def check_means(x, size, module=host):
    """Means against the specification, bit for bit."""
    got = module.block_means(x, size)
    np.testing.assert_array_equal(got, blocks.means(np, x, size))
    assert got.dtype == np.float32
