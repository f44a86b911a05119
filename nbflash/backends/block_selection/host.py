"""What selection asks of the kernels, of arrays in CUDA memory or in the simulator's.

The host does not wait for the device. Kernels are bound once for each geometry.
"""

import functools

import numpy as np

from nbflash.backends.block_selection.block_means import block_means_config, block_means_spec
from nbflash.cuda.device import cuda_device
from nbflash.inputs import arrays

_BOUND = 128  # geometries that are remembered


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
