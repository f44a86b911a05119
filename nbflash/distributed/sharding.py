"""Sharding: which rank has which queries and keys of a sequence, and which keys it needs.

Everything is decided by tiles of the mask; `nbflash.distributed.dealing` finds the owners of rows.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

import masks
from nbflash.distributed.dealing import deal, even

TILE = 128


class Sharding:
    """How a mask's queries and keys are dealt to ranks; made by `Sharding.of`, immutable.

    Attributes
    ----------
    mask : masks.Mask
    ranks : int
    tile : int
        Tokens that stay together.
    query_owner, key_owner : int32 array
        The rank of each row and each column of tiles.
    work : float64 array (ranks,)
        Live tiles of each rank, summed over the heads and batch entries that the mask tells apart.
    """

    def __init__(self, mask, ranks, tile, query_owner, key_owner):
        self.mask, self.ranks, self.tile = mask, ranks, tile
        self.query_owner, self.key_owner = query_owner, key_owner
        self.work = np.bincount(query_owner, row_work(mask, tile), ranks)

    @classmethod
    def of(
        cls, mask: masks.Mask, ranks: int, tile: int = TILE, *, key_cost: float = 0.0
    ) -> Sharding:
        """Deal the queries and keys of a mask to ranks.

        Parameters
        ----------
        mask : masks.Mask
            Shape (seqlen_q, seqlen_k); plain, per head or per batch. All ranks make the same one.
        ranks : int
        tile : int
            Tokens that stay together, a multiple of 64 where there is dropout. Larger ones are
            planned faster, smaller ones balance better.
        key_cost : float
            Tiles that a rank computes in the time in which a key arrives. With 0, of all balanced
            dealings the one that moves the fewest keys is taken. Larger values are for slow links:
            they give up balance for fewer messages.

        Notes
        -----
        Keys belong to the rank of the query at the same position; where there are more or fewer
        keys than queries, every rank has one run of them.
        """
        if not isinstance(mask, masks.Mask):
            raise TypeError(f"mask must be a masks.Mask, got {type(mask).__name__}")
        ranks, tile = positive("ranks", ranks), positive("tile", tile)
        nq, nk = mask.shape
        keys = None if nq == nk else even(-(-nk // tile), ranks)

        def made(owner):
            return cls(mask, ranks, tile, owner, owner if keys is None else keys)

        if isinstance(key_cost, bool) or not isinstance(key_cost, numbers.Real):
            raise TypeError(f"key_cost must be a number, got {key_cost!r}")
        if not 0 <= key_cost < np.inf:
            raise ValueError(f"key_cost must be finite and at least 0, got {key_cost!r}")
        return deal(row_work(mask, tile), ranks, made, key_cost)

    @property
    def balance(self) -> float:
        """Work of the most loaded rank over the mean; 1 where there is none."""
        mean = self.work.mean()
        return float(self.work.max() / mean) if mean else 1.0

    def positions(self, rank: int, of: str = "queries") -> NDArray[Any]:
        """Places in the sequence of a rank's own tokens, increasing: int64 (n,).

        Rotary embeddings and a loss need them. ``of`` is "queries" or "keys".
        """
        if not isinstance(of, str) or of not in ("queries", "keys"):
            raise ValueError(f"of must be 'queries' or 'keys', got {of!r}")
        if integer("rank", rank) not in range(self.ranks):
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {rank}")
        axis = 0 if of == "queries" else 1
        return self._tokens((self.query_owner, self.key_owner)[axis] == rank, axis)

    @functools.cached_property
    def live(self) -> csr_array:
        """CSR of the tiles that live in any plane: how many (batch, head) pairs have each."""
        live = 0
        for times, plane in zip(_uses(self.mask), self.mask.planes, strict=True):
            kinds = plane.tiles(self.tile).kinds
            counts = np.full(kinds.nnz, times, np.int64)
            live = live + csr_array((counts, kinds.indices, kinds.indptr), shape=kinds.shape)
        return live

    @functools.cached_property
    def needs(self) -> Any:
        """bool (ranks, columns of tiles): which keys the rows of each rank attend."""
        return (members(self.query_owner, self.ranks) @ self.live).toarray() > 0

    @functools.cached_property
    def work_on(self) -> Any:
        """float64 (ranks, ranks): of the work of a rank (row), that on the keys of each owner."""
        tiles = members(self.query_owner, self.ranks) @ self.live
        return (tiles @ members(self.key_owner, self.ranks).T).toarray().astype(np.float64)

    def sent(self, source: int, target: int) -> NDArray[Any]:
        """Places of the keys of one rank that another one needs, increasing: int64 (n,)."""
        return self._tokens(self.needs[target] & (self.key_owner == source), 1)

    def attending(self, rank: int, sources: Any) -> Any:
        """Places of a rank's queries whose tiles attend keys of other ranks: int64 (n,)."""
        theirs = np.isin(self.key_owner, sources).astype(np.int64)
        return self._tokens((self.query_owner == rank) & (self.live @ theirs > 0), 0)

    @functools.cached_property
    def meeting(self) -> int:
        """How many queries, of all ranks, have tiles with keys of other ranks."""
        tiles = self.live.tocoo()
        row, column = tiles.coords
        rows = np.unique(row[self.query_owner[row] != self.key_owner[column]])
        n = self.mask.shape[0]
        return int((np.minimum((rows + 1) * self.tile, n) - rows * self.tile).sum())

    @functools.cached_property
    def traffic(self) -> Any:
        """int64 (ranks, ranks): how many keys go from a rank (row) to another (column)."""
        n, columns = self.mask.shape[1], np.arange(self.key_owner.size)
        tokens = np.minimum(columns * self.tile + self.tile, n) - columns * self.tile
        traffic = np.zeros((self.ranks, self.ranks), np.int64)
        for target, needed in enumerate(self.needs):
            traffic[:, target] = np.bincount(self.key_owner[needed], tokens[needed], self.ranks)
        np.fill_diagonal(traffic, 0)
        return traffic

    @functools.cached_property
    def digest(self) -> str:
        """Of what is dealt and of the cells of the mask: equal on ranks that agree."""
        content = hashlib.blake2b(digest_size=16)
        heads = self.mask.plane_index.shape  # of one, two and of two, one the content is the same
        content.update(repr((self.mask.shape, heads, self.ranks, self.tile)).encode())
        for plane in self.mask.planes:
            tiles = plane.tiles(self.tile)
            kinds = tiles.kinds
            for part in (kinds.indptr, kinds.indices, kinds.data, tiles.lo, tiles.hi, tiles.bits):
                content.update(np.ascontiguousarray(part))
        for part in (self.mask.plane_index, self.query_owner, self.key_owner):
            content.update(np.ascontiguousarray(part))
        return content.hexdigest()

    @functools.cached_property
    def _key(self):
        owners = self.query_owner.tobytes(), self.key_owner.tobytes()
        return self.mask, self.ranks, self.tile, owners

    def __eq__(self, other):
        return isinstance(other, Sharding) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __reduce__(self):
        parts = self.mask, self.ranks, self.tile, self.query_owner, self.key_owner
        return Sharding, parts

    def __repr__(self) -> str:
        return f"<Sharding of {self.mask!r} to {self.ranks} ranks, balance {self.balance:.3f}>"

    def _tokens(self, tiles, axis):
        """Tokens of the tiles that a bool array names, along an axis of the mask."""
        first = np.flatnonzero(tiles) * self.tile
        tokens = (first[:, None] + np.arange(self.tile)).ravel()
        return tokens[tokens < self.mask.shape[axis]]


def check_sharding(x):
    """Raise TypeError for what is no Sharding."""
    if not isinstance(x, Sharding):
        raise TypeError(f"sharding must be a Sharding, got {type(x).__name__}")


def integer(name, x):
    """``x`` as an int, or TypeError."""
    try:
        if not isinstance(x, bool | np.bool_):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {x!r}")


def positive(name, x):
    """``x`` as an int of at least 1."""
    if (n := integer(name, x)) < 1:
        raise ValueError(f"{name} must be at least 1, got {n}")
    return n


def row_work(mask, tile):
    """Live tiles of each row of tiles, times the (batch, head) pairs that have them."""
    rows = (np.diff(plane.tiles(tile).kinds.indptr) for plane in mask.planes)
    return sum(n * row for n, row in zip(_uses(mask), rows, strict=True))


def members(owner, ranks):
    """CSR (ranks, tiles) of ones: which rows or columns of tiles each rank has."""
    ones = np.ones(owner.size, np.int64)
    return csr_array(coo_array((ones, (owner, np.arange(owner.size))), shape=(ranks, owner.size)))


def _uses(mask):
    """How many of the (batch, head) pairs that a mask tells apart have each plane."""
    return np.bincount(mask.plane_index.ravel(), minlength=len(mask.planes))
