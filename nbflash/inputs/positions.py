"""Positions of queries and keys in the sequence that they are a part of."""

from __future__ import annotations

import hashlib

import numpy as np

from nbflash.definitions.constants import DROPOUT_BLOCK

_PAST = 4  # blocks behind the last one that a tile may reach into


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

    def starts(self, block):
        """Where every block of queries, and of keys, begins in the sequence.

        Parameters
        ----------
        block : int or (int, int)
            Tokens; of queries and of keys.

        Returns
        -------
        list of two int64 arrays, or None
            None where tokens are not in whole blocks of the sequence, but for the last one.
        """
        found = []
        for places, size in zip((self.queries, self.keys), np.broadcast_to(block, 2), strict=True):
            first = places[::size]
            inside = places - np.repeat(first, size)[: places.size]
            if (first % size).any() or (inside != np.arange(places.size) % size).any():
                return None
            found.append(first.copy())
        return found

    def shifts(self):
        """What is added to the number of a query, and of a key, by `DROPOUT_BLOCK`: two uint32."""
        found = []
        for starts in self.starts(DROPOUT_BLOCK):
            shifts = starts - DROPOUT_BLOCK * np.arange(starts.size)
            last = shifts[-1:] if shifts.size else np.zeros(1, np.int64)
            found.append(np.append(shifts, np.repeat(last, _PAST)).astype(np.uint32))
        return found

    def __eq__(self, other):
        return isinstance(other, Positions) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __reduce__(self):
        return Positions, (self.queries, self.keys)

    def __repr__(self):
        return f"Positions({self.queries.size} queries, {self.keys.size} keys)"
