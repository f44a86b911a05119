"""Dropout in the CPU kernels: Z is 1 / (1 − p) where a probability is kept, and 0 elsewhere.

    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A `TileFunction` of `Dropout` writes it.
"""

import functools
import threading
from typing import NamedTuple

import numpy as np
from numba import carray

from nbflash.backends.cpu.compiling import inlined
from nbflash.backends.cpu.intrinsics import pointer, read
from nbflash.backends.cpu.tile_function import ABSENT, bind, compile_tile_function, kind_of
from nbflash.definitions import philox

_words, _far = philox.compiled(inlined), philox.compiled_far(inlined)
_queries_of, _keys_of, _crossed = map(inlined, (philox.queries_of, philox.keys_of, philox.crossed))


_BLOCK = 16, 32  # queries and keys


class Dropout(NamedTuple):
    """What is known of a probability and a state; ``factor`` is 1 / (1 − p).

    ``queries`` and ``keys`` are where each block of 16 queries or 32 keys begins in the sequence.
    """

    k0: np.uint32
    k1: np.uint32
    threshold: np.uint32
    factor: np.floating
    queries: np.ndarray
    keys: np.ndarray


class Drop(NamedTuple):
    """A probability, seed and offset, and `Positions` or None."""

    p: float
    state: tuple = (0, 0)
    positions: object = None


def prepare(drop, shape, real):
    """A `Drop` for (nq, nk) scores as a bound `TileFunction`; `ABSENT` if nothing is dropped."""
    if drop.p == 0:
        return ABSENT
    key = philox.key(*map(np.uint64, drop.state))
    places = _places(drop.positions, shape)
    dropout = Dropout(*key, philox.threshold(drop.p), real(philox.factor(drop.p)), *places)
    return bind(_compiled(real), dropout)


def _places(positions, shape):
    """Where blocks begin, which are whole ones of the sequence."""
    if positions is None:
        return [np.arange(0, n, block) for n, block in zip(shape, _BLOCK, strict=True)]
    return positions.starts(_BLOCK)


_compiling = threading.Lock()  # ranks that are threads ask for the same function at once


def _compiled(real):
    with _compiling:
        return _compiled_once(real)


@functools.cache
def _compiled_once(real):
    return compile_tile_function(functools.partial(_tile_function, real), "dropout", real)


def _tile_function(real):
    places = np.zeros(1, np.int64), np.zeros(1, np.int64)
    described = read(kind_of(Dropout(*map(np.uint32, (0, 0, 0)), real(0), *places)))

    @inlined
    def tile(z, _, step, rows, columns, b, h, q0, kv0, record):
        """Z of a block, by blocks of 16 queries and 32 keys that begin at multiples of these."""
        dropout, block = Dropout(*described(record)), np.empty((16, 32), np.uint32)
        for q in range(q0 // 16 * 16, q0 + rows, 16):
            for kv in range(kv0 // 32 * 32, kv0 + columns, 32):
                places = dropout.queries[q // 16], dropout.keys[kv // 32]
                _numbers(dropout, b, h, *places, block)
                j, end = max(kv, kv0), min(kv + 32, kv0 + columns)
                for i in range(max(q, q0), min(q + 16, q0 + rows)):
                    row = carray(pointer(z + (i - q0) * step, real), (columns,))
                    _compare(dropout, block[i - q, j - kv : end - kv], row[j - kv0 : end - kv0])

    return tile


@inlined
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


@inlined
def _two(row, column, halves):
    row[column] = halves & philox.MASK
    row[column + 1] = halves >> np.uint32(16) & philox.MASK


@inlined
def _compare(dropout, numbers, z):
    for j in range(z.size):
        z[j] = dropout.factor if numbers[j] >= dropout.threshold else z.dtype.type(0)


@inlined
def drop(dropout, x, z):
    """X <- X ∘ Z."""
    if dropout.address != 0:
        for j in range(x.size):
            x[j] *= z[j]
