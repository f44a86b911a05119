"""Dropout in the CPU kernels: Z is 1 / (1 − p) where a probability is kept, and 0 elsewhere.

    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A `Dropout` describes it; with None for one the kernels are as if this module were not there.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from nbflash.backends.cpu.walk import place
from nbflash.definitions import philox

_words, _far = philox.compiled(njit), philox.compiled_far(njit)
_queries_of, _keys_of, _crossed = map(njit, (philox.queries_of, philox.keys_of, philox.crossed))


class Dropout(NamedTuple):
    """What the kernels need to know of a probability and a state; ``factor`` is 1 / (1 − p)."""

    k0: np.uint32
    k1: np.uint32
    threshold: np.uint32
    factor: np.floating


def prepare(p, state, real):
    """The `Dropout` of a probability, and of a state (seed, offset); None where p is 0."""
    if p == 0:
        return None
    return Dropout(*philox.key(*map(np.uint64, state)), philox.threshold(p), real(philox.factor(p)))


@njit
def factors(walk, dropout, b, h, own, p, stop, z):
    """Z of the tiles p..stop of row ``own``."""
    if dropout is not None:
        block = np.empty((16, 32), np.uint32)
        for t in range(p, stop):
            q0, kv0, top, left = place(walk, own, p, t)
            rows, cols = min(walk.tile_m, walk.nq - q0), min(walk.tile_n, walk.nk - kv0)
            for q in range(q0 // 16 * 16, q0 + rows, 16):
                for kv in range(kv0 // 32 * 32, kv0 + cols, 32):
                    _numbers(dropout, b, h, q, kv, block)
                    j, end = max(kv, kv0), min(kv + 32, kv0 + cols)
                    for i in range(max(q, q0), min(q + 16, q0 + rows)):
                        own_z = z[top + i - q0, left + j - kv0 : left + end - kv0]
                        _compare(dropout, block[i - q, j - kv : end - kv], own_z)


@njit
def _numbers(dropout, b, h, q, kv, block):
    """What is compared, of 16 queries and 32 keys that begin at multiples of these."""
    key, odd = (dropout.k0, dropout.k1), kv // 32 % 2
    for row in range(0, 8, 2):
        for column in range(0, 8, 2):
            places = np.uint32(_keys_of(kv + column)), np.uint32(_queries_of(q + row))
            words = _words(np.uint32(h), places[0], np.uint32(b), places[1], *key)
            for j, (w0, w1, w2, w3) in ((column, words), (column + 16, _far(*words))):
                for i, one, other in ((row + odd, w0, w1), (row + 1 - odd, w2, w3)):
                    _two(block[i], j, one)
                    _two(block[i], j + 8, _crossed(one, other))
                    _two(block[i + 8], j, other)
                    _two(block[i + 8], j + 8, _crossed(other, one))


@njit
def _two(row, column, halves):
    row[column] = halves & philox.MASK
    row[column + 1] = halves >> np.uint32(16) & philox.MASK


@njit
def _compare(dropout, numbers, z):
    for j in range(z.size):
        z[j] = dropout.factor if numbers[j] >= dropout.threshold else z.dtype.type(0)


@njit
def drop(dropout, x, z):
    """X <- X ∘ Z."""
    if dropout is not None:
        for j in range(x.size):
            x[j] *= z[j]
