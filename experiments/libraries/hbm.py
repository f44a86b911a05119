"""A memory that counts its accesses, and what the written-out algorithms on it share."""

from collections import Counter
from typing import NamedTuple

import numpy as np


class Accesses(NamedTuple):
    """Elements read from and written to HBM."""

    reads: int
    writes: int

    @property
    def total(self):
        return self.reads + self.writes


class HBM:
    """Named matrices in off-chip memory; counts every element that is loaded or stored.

    The inputs given to the constructor are there from the start and cost nothing.

    Attributes
    ----------
    reads, writes : int
    allocated, peak : int
        Elements allocated now, and at most, without the inputs.
    recomputed : Counter
        Elements of what a backward pass computes again, by name.
    """

    def __init__(self, **inputs):
        self._matrices = {name: np.array(x) for name, x in inputs.items()}
        self.reads = self.writes = self.allocated = self.peak = 0
        self.recomputed = Counter()

    def __getitem__(self, name):
        """The matrix as it stands, for the observer: not counted."""
        return self._matrices[name]

    def allocate(self, name, shape, value=None):
        """Make room for a matrix; only filling it with ``value`` is an access."""
        self._add(name, np.full(shape, np.nan if value is None else value, self["Q"].dtype))
        self.writes += 0 if value is None else self[name].size

    def free(self, *names):
        """Give back the room of some matrices."""
        for name in names:
            self.allocated -= self._matrices.pop(name).size

    def load(self, name, rows=slice(None)):
        block = self._matrices[name][rows]
        self.reads += block.size
        return block.copy()

    def store(self, name, block, rows=slice(None)):
        if name not in self._matrices:
            self._add(name, np.empty_like(block))
        self._matrices[name][rows] = block
        self.writes += block.size

    def _add(self, name, matrix):
        self._matrices[name] = matrix
        self.allocated += matrix.size
        self.peak = max(self.peak, self.allocated)

    @property
    def accesses(self):
        return Accesses(self.reads, self.writes)

    def extra(self, *outputs):
        """Most elements that lay there beside the inputs and the outputs of these names."""
        return self.peak - sum(self[name].size for name in outputs)


def row_blocks(n, size):
    """Slices of ``size`` rows each, the last one of what is left."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def shift(m):
    """The running maximum as something to subtract: -inf (nothing attended so far) becomes 0."""
    return np.where(np.isneginf(m), 0, m)


def invert(l):
    """diag(l)⁻¹ as a column; a row without weight stays 0."""
    return 1 / np.where(l == 0, 1, l)[:, None]


def masked_scores(q_i, k_j, scale, keep):
    """τ Q_i K_jᵀ, and -inf where MASK hides."""
    return np.where(keep, scale * (q_i @ k_j.T), -np.inf)
