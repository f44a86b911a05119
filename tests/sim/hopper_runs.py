"""Shared memory, swizzled images and small launches for the tests of Hopper's instructions."""

import numpy as np
import pytest
from numba import cuda, uint16

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.hopper import shared_address

SEEDS = range(10)
BYTES = 40 * 1024
BASE = 1024  # the first address that a box or a matrix can have
UPPER = 1 << 30 | 64  # of a descriptor: swizzle, 1024 bytes per eight rows
races = pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])


def launched(kernel, *arguments, threads=128, blocks=1, nbytes=BYTES):
    cuda.jit(kernel)[blocks, threads, 0, nbytes](*arguments)


def rejected(kernel, match, error=sim.SimError, threads=32):
    with pytest.raises(error, match=match):
        launched(kernel, threads=threads)


def memory():
    """Shared memory as 16-bit words from address ``BASE`` on."""
    smem = cuda.shared.array(0, uint16)
    return smem[(BASE - shared_address(smem)) // 2 :]


def image(matrix):
    """Panels of 64 columns, rows of 128 bytes, 16-byte chunks moved by the swizzle."""
    rows, columns = matrix.shape
    words = np.zeros((-(-columns // 64), rows, 8, 8), matrix.dtype)
    for r in range(rows):
        for c in range(columns):
            words[c // 64, r, c % 64 // 8 ^ r % 8, c % 8] = matrix[r, c]
    return words.ravel()


def bits_of(x, dtype):
    """Small integers as the bits of float16 or bfloat16."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
