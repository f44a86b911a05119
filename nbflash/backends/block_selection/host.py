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
from nbflash.backends.block_selection.block_weights import (
    BlockWeightsConfig,
    block_weights_spec,
    softmax_statistics_spec,
)
from nbflash.cuda.device import cuda_device
from nbflash.definitions.constants import WARP
from nbflash.inputs import arrays

_BOUND = 128  # geometries that are remembered
_PRODUCTS, _WEIGHTS = BlockProductsConfig(), BlockWeightsConfig()


def kernels_of_means(dtype, head_dim, alignment):
    """What means of arrays with rows of so many aligned bytes are made by."""
    return [block_means_spec(block_means_config(dtype, head_dim, alignment))]


def kernels_of_selection():
    """What selection asks of means, whatever their dtype was."""
    found = [block_products_spec(_PRODUCTS)]
    found += [softmax_statistics_spec(_WEIGHTS), block_weights_spec(_WEIGHTS)]
    columns = 2 * WARP
    while columns <= MOST_COLUMNS:
        found.append(best_blocks_spec(best_blocks_config(columns)))
        columns *= 2
    return found


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


def block_weights(scores, weights, first_row, first, scale, size, length, nk, config=_WEIGHTS):
    """Softmax over means of keys, summed by blocks into some rows of ``weights``.

    Parameters
    ----------
    scores : array
        float32 (batch, heads, queries, means), contiguous.
    weights : array
        float32 (batch, heads_kv, rows, columns), contiguous: all rows, of which those from
        ``first_row`` on are written, as many as the queries make.
    first : int
        Position of the first query: from its end on a mean is seen.
    scale : float
        Of scores.
    size : (int, int)
        Queries and keys of a block.
    length, nk : int
        Keys of a mean, and all.
    """
    batch, heads, queries, n = scores.shape
    heads_kv, all_rows, columns = weights.shape[1:]
    device = cuda_device(arrays.device_of(scores)[1])
    statistics = device.empty((batch, heads, queries, 2), np.float32)
    planes = batch * heads, batch * heads_kv
    grid = queries, n, all_rows, columns
    of_rows, of_blocks = _bound_weights(device, config, planes, grid, scale, size, length, nk)
    of_rows([*device.words((scores, statistics)), first])
    of_blocks([*device.words((scores, statistics, weights)), first, first_row])


@functools.lru_cache(maxsize=_BOUND)
def _bound_weights(device, config, planes, grid, scale, size, length, nk):
    (of_heads, of_kv), (queries, n, all_rows, columns) = planes, grid
    n_rows, per_column = of_heads * queries, size[1] // length
    statistics = device.bind(
        softmax_statistics_spec(config),
        -(-n_rows // (config.threads // WARP)),
        (n_rows, queries, n, nk - 1, length, scale),
    )
    rows, together = -(-queries // size[0]), max(1, config.threads // per_column)
    parts, group = -(-columns // together), of_heads // of_kv
    sizes = queries, n, group, size[0], per_column, rows, all_rows, columns, together, parts
    constants = *sizes, nk - 1, length, scale
    return statistics, device.bind(block_weights_spec(config), of_kv * rows * parts, constants)


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
