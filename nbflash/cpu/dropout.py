"""Dropout in the CPU kernels: Z is 1 / (1 − p) where a probability is kept, and 0 elsewhere.

    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A `Dropout` describes it; with None for one the kernels are as if this module were not there.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from nbflash import philox
from nbflash.cpu.walk import place

_words = philox.compiled(njit)


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
        for t in range(p, stop):
            q0, kv0, top, left = place(walk, own, p, t)
            cols = min(walk.tile_n, walk.nk - kv0)
            for i in range(min(walk.tile_m, walk.nq - q0)):
                _row(dropout, b, h, q0 + i, kv0, z[top + i, left : left + cols])


@njit
def _row(dropout, b, h, q_idx, kv0, z):
    """Z of one query and the keys from kv0 on, four of them from one call."""
    first, stop = kv0 // 16, (kv0 + z.size + 15) // 16
    halves = np.empty((stop - first, 2, 4, 2), np.uint32)
    row, below = np.uint32(8 * (q_idx // 16) + q_idx % 8), q_idx // 8 % 2 == 1
    for i in range(stop - first):
        for pair in range(4):
            place = np.uint32(4 * (first + i) + pair), row, np.uint32(h), np.uint32(b)
            w0, w1, w2, w3 = _words(*place, dropout.k0, dropout.k1)
            both = (w1, w3) if below else (w0, w2)
            for part in range(2):
                halves[i, part, pair, 0] = both[part] & philox.MASK
                halves[i, part, pair, 1] = both[part] >> np.uint32(16) & philox.MASK
    mine = halves.ravel()[kv0 - 16 * first :]
    for j in range(z.size):
        z[j] = dropout.factor if mine[j] >= dropout.threshold else z.dtype.type(0)


@njit
def drop(dropout, x, z):
    """X <- X ∘ Z."""
    if dropout is not None:
        for j in range(x.size):
            x[j] *= z[j]
