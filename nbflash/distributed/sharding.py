"""Sharding: which rank has which queries and keys of a sequence, and which keys it needs.

Everything is decided by tiles of the mask. Rows of tiles are cut into equal chunks, and chunks are
dealt by the work of their tiles, the heaviest first, each to the rank that has least so far and is
not full (Graham's greedy rule with equal counts, as MagiAttention deals). Few chunks keep
neighbours together: of one, two, four, ... chunks a rank the first number is taken that balances
the ranks. One chunk a rank does for windows, two make pairs of the head and the tail of a causal
sequence.
"""

from __future__ import annotations

import functools
import hashlib
import heapq

import numpy as np
from scipy.sparse import coo_array, csr_array

import masks

TILE = 128
#: Most work of a rank over the mean, at which finer chunks are not tried.
BALANCE = 1.02


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
    def of(cls, mask, ranks, tile=TILE):
        """Deal the queries and keys of a mask to ranks.

        Parameters
        ----------
        mask : masks.Mask
            Shape (seqlen_q, seqlen_k); plain, per head or per batch. All ranks make the same one.
        ranks : int
        tile : int
            Tokens that stay together, a multiple of 32 where there is dropout. Larger ones are
            planned faster, smaller ones balance better.

        Notes
        -----
        Keys belong to the rank of the query at the same position; where there are more or fewer
        keys than queries, every rank has one run of them.
        """
        if not isinstance(mask, masks.Mask):
            raise TypeError(f"mask must be a masks.Mask, got {type(mask).__name__}")
        ranks, tile = positive("ranks", ranks), positive("tile", tile)
        owner = _balanced(row_work(mask, tile), ranks)
        nq, nk = mask.shape
        if nq == nk:
            return cls(mask, ranks, tile, owner, owner)
        return cls(mask, ranks, tile, owner, _even(-(-nk // tile), ranks))

    @property
    def balance(self) -> float:
        """Work of the most loaded rank over the mean; 1 where there is none."""
        mean = self.work.mean()
        return float(self.work.max() / mean) if mean else 1.0

    def positions(self, rank, of="queries"):
        """Places in the sequence of a rank's own tokens, increasing: int64 (n,).

        What rotary embeddings and a loss need of them. ``of`` is "queries" or "keys".
        """
        if of not in ("queries", "keys"):
            raise ValueError(f"of must be 'queries' or 'keys', got {of!r}")
        axis = 0 if of == "queries" else 1
        return self._tokens((self.query_owner, self.key_owner)[axis] == rank, axis)

    @functools.cached_property
    def needs(self):
        """bool (ranks, columns of tiles): which keys the rows of each rank attend."""
        n_row = self.query_owner.size
        ones = np.ones(n_row, np.int32)
        rows_of = csr_array(
            coo_array((ones, (self.query_owner, np.arange(n_row))), shape=(self.ranks, n_row))
        )
        return (rows_of @ _live(self.mask, self.tile)).toarray() > 0

    def sent(self, source, target):
        """Places of the keys of one rank that another one needs, increasing: int64 (n,)."""
        return self._tokens(self.needs[target] & (self.key_owner == source), 1)

    @functools.cached_property
    def traffic(self):
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
        for plane in self.mask.planes:
            tiles = plane.tiles(self.tile)
            kinds = tiles.kinds
            for part in (kinds.indptr, kinds.indices, kinds.data, tiles.lo, tiles.hi, tiles.bits):
                content.update(np.ascontiguousarray(part))
        for part in (self.mask.plane_index, self.query_owner, self.key_owner):
            content.update(np.ascontiguousarray(part))
        return content.hexdigest()

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


def positive(name, x):
    """``x`` as an int of at least 1."""
    if isinstance(x, bool | np.bool_) or not hasattr(x, "__index__"):
        raise TypeError(f"{name} must be an integer, got {x!r}")
    if x < 1:
        raise ValueError(f"{name} must be at least 1, got {x}")
    return int(x)


def row_work(mask, tile):
    """Live tiles of each row of tiles, times the (batch, head) pairs that have them."""
    times = np.bincount(mask.plane_index.ravel(), minlength=len(mask.planes))
    rows = (np.diff(plane.tiles(tile).kinds.indptr) for plane in mask.planes)
    return sum(n * row.astype(np.float64) for n, row in zip(times, rows, strict=True))


def _live(mask, tile):
    """CSR of ones: the tiles that live in any plane."""
    live = 0
    for plane in mask.planes:
        kinds = plane.tiles(tile).kinds
        ones = np.ones(kinds.nnz, np.int32)
        live = live + csr_array((ones, kinds.indices, kinds.indptr), shape=kinds.shape)
    return live


def _even(n, parts):
    """Which of `parts` runs, as long as each other, each of n belongs to."""
    return (np.arange(n) * parts // max(n, 1)).astype(np.int32)


def _balanced(work, ranks):
    """The rank of each row of tiles: the fewest chunks that are balanced, or else the best."""
    best, least = np.zeros(work.size, np.int32), np.inf
    chunks = ranks
    while least > BALANCE:
        owner = _dealt(work, ranks, min(chunks, work.size))
        load = np.bincount(owner, work, ranks)
        balance = load.max() / load.mean() if load.any() else 1.0
        if balance < least:
            best, least = owner, balance
        if chunks >= work.size:
            break
        chunks *= 2
    return best


def _dealt(work, ranks, chunks):
    """Chunks of rows to ranks, the heaviest first, as many to each; ranks by their first chunk."""
    chunk_of = _even(work.size, max(chunks, 1))
    load = np.bincount(chunk_of, work, chunks)
    fewest, more = divmod(chunks, ranks)
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    owner = np.empty(chunks, np.int32)
    for chunk in np.argsort(-load, kind="stable"):
        total, count, rank = heapq.heappop(heap)
        while count == fewest and not more:
            total, count, rank = heapq.heappop(heap)
        more -= count == fewest
        owner[chunk] = rank
        if count < fewest:
            heapq.heappush(heap, (total + load[chunk], count + 1, rank))
    _, first = np.unique(owner, return_index=True)
    by_first = np.argsort(first)
    number = np.empty(ranks, np.int32)
    number[np.unique(owner)[by_first]] = np.arange(by_first.size)
    return number[owner][chunk_of]
