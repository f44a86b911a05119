"""What selection asks of the kernels, of arrays in CUDA memory or in the simulator's.

The host does not wait for the device. Kernels are bound once for each geometry.
"""

import functools
import math

import numpy as np

from nbflash.backends.block_selection.best_blocks import (
    MOST_COLUMNS,
    best_blocks_config,
    best_blocks_spec,
)
from nbflash.backends.block_selection.block_means import block_means_config, block_means_spec
from nbflash.backends.block_selection.block_products import BlockProductsConfig, block_products_spec
from nbflash.cuda.device import cuda_device
from nbflash.inputs import arrays

_BOUND = 128  # geometries that are remembered
_PRODUCTS = BlockProductsConfig()


def block_means(x, size):
    """Means of every ``size`` tokens of x, (batch, n, heads, head_dim), and of those of the last.

    Returns
    -------
    array
        float32 (batch, heads, blocks, head_dim).
    """
    batch, n, heads, head_dim = x.shape
    size = min(size, n)
    device, blocks = cuda_device(arrays.device_of(x)[1]), -(-n // size)
    config = block_means_config(x.dtype.name, head_dim, arrays.alignment_in_memory(x))
    means = device.empty((batch, heads, blocks, head_dim), np.float32)
    strides = [step // config.packed for step in arrays.strides(x)]
    _bound_means(device, config, batch, n, size, heads)(device.words((x, means), strides))
    return means


@functools.lru_cache(maxsize=_BOUND)
def _bound_means(device, config, batch, n, size, heads):
    blocks = -(-n // size)
    sizes = n, size, blocks, heads
    return device.bind(block_means_spec(config), batch * blocks * heads, sizes)


def block_products(q, k, config=_PRODUCTS):
    """``q kᵀ`` of means, (batch, heads, m, width) and (batch, heads_kv, n, width).

    Returns
    -------
    array
        float32 (batch, heads, m, n).
    """
    batch, heads, m, width = q.shape
    heads_kv, n = k.shape[1:3]
    device = cuda_device(arrays.device_of(q)[1])
    products = device.empty((batch, heads, m, n), np.float32)
    run = _bound_products(device, config, batch * heads, m, n, width, heads // heads_kv)
    run(device.words((q, k, products)))
    return products


@functools.lru_cache(maxsize=_BOUND)
def _bound_products(device, config, planes, m, n, width, group):
    tiles_m, tiles_n = -(-m // config.tile), -(-n // config.tile)
    sizes = m, n, width, group, tiles_m, tiles_n
    return device.bind(block_products_spec(config), planes * tiles_m * tiles_n, sizes)


def sorts(columns):
    """Whether `best_blocks` takes rows of so many columns."""
    return columns <= MOST_COLUMNS


def best_blocks(scores, last, width, sinks, local):
    """The ``width`` columns of largest score of each row, in order: see :mod:`.best_blocks`.

    Parameters
    ----------
    scores : array
        float32 (batch, heads, rows, columns), contiguous.
    last : bytes
        Of an int32 for each row: its last admissible column.
    width, sinks, local : int

    Returns
    -------
    indices, counts : array
        int32 (batch, heads, rows, width), and (batch, heads, rows): admissible ones.
    """
    *planes, rows, columns = scores.shape
    device = cuda_device(arrays.device_of(scores)[1])
    n = math.prod(planes) * rows
    indices, counts = device.integers((n * width, n))
    run = _bound_best(device, n, columns, width, sinks, local, last)
    run(device.words((scores, indices, counts)))
    return indices.reshape(*planes, rows, width), counts.reshape(*planes, rows)


@functools.lru_cache(maxsize=_BOUND)
def _bound_best(device, rows, columns, width, sinks, local, last):
    table = np.frombuffer(last, np.int32)
    # As many sinks and local blocks as there are columns are all of them.
    sizes = table.size, columns, width, min(sinks, columns), min(local, columns)
    spec = best_blocks_spec(best_blocks_config(columns))
    return device.bind(spec, rows, sizes, (table,))
