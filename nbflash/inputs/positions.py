"""Positions of queries and keys in the sequence that they are a part of."""

from __future__ import annotations

import hashlib

import numpy as np


class Positions:
    """Places of the queries and keys of a problem; immutable, with a hash: part of a plan's key.

    Parameters
    ----------
    queries, keys : int64 array (nq,), (nk,)
        Increasing.
    """

    def __init__(self, queries, keys):
        self.queries, self.keys = (np.ascontiguousarray(x, np.int64) for x in (queries, keys))
        content = hashlib.blake2b(self.queries, digest_size=16)
        content.update(self.keys)
        self._key = self.queries.size, content.digest()

    def __eq__(self, other):
        return isinstance(other, Positions) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __reduce__(self):
        return Positions, (self.queries, self.keys)

    def __repr__(self):
        return f"Positions({self.queries.size} queries, {self.keys.size} keys)"
