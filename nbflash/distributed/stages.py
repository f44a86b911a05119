"""What a rank does in each stage of a call: which keys it attends, and what travels for them.

Stage 0 is of the rank's own keys. The other ranks follow in groups by their distance, (source −
rank) modulo the number of ranks: all ranks send and receive alike, and while a stage is computed
the keys of those behind it are on their way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

import masks
from nbflash.distributed.parcels import Index, Parcels
from nbflash.inputs.positions import Positions

#: Stages besides that of a rank's own keys, at most, where nobody asks for another number.
STAGES = 4

# The unit of time is that of a forward tile of 128 × 128 of one head: 13 ns at 650 TFLOP/s (Hopper,
# d=128). A key of one head of K and V in half precision arrives in 2.2 ns over NVLink (235 GB/s);
# gathering and merging a row of one head takes 0.8 ns; launching a stage 30 µs, of 16 heads.
# Copying a key of one head of K and V takes 0.26 ns.
_TILE, _ARRIVAL, _MERGE, _LAUNCH, _COPY = 128, 0.17, 0.06, 145.0, 0.02
_BACKWARD = 2.5  # of tiles
_RETURN = 2.0  # gradients of keys, in float32


def groups(ranks, count):
    """The distances of the ranks whose keys arrive in each stage after the first.

    Neighbours come first, on both sides: who sends to a rank also receives from it, so that a link
    between machines is used both ways at once.
    """
    nearest = sorted(range(1, ranks), key=lambda d: min(d, ranks - d))
    count = min(count, ranks - 1)
    return [
        [d for i, d in enumerate(nearest) if i * count // (ranks - 1) == n] for n in range(count)
    ]


def check_split(split, count, heads_kv, why_not):
    """Raise ValueError if ``split`` is no such word, or heads are to be split and cannot be."""
    if not isinstance(split, str) or split not in ("ranks", "heads"):
        raise ValueError(f"split must be 'ranks' or 'heads', got {split!r}")
    if split == "heads" and why_not:
        raise ValueError(f"split='heads' does not run with {' or '.join(why_not)} yet")
    if split == "heads" and count and heads_kv % count:
        raise ValueError(f"stages must divide the {heads_kv} heads of k and v, got {count}")


@functools.lru_cache(maxsize=64)
def part_count(sharding, heads_kv, group, split):
    """How many parts a call is split into where nobody says it, the same on all ranks.

    Parameters
    ----------
    sharding : nbflash.distributed.Sharding
    heads_kv, group : int
        Heads of K and V, and those of Q to one of them.
    split : {"ranks", "heads"}

    Returns
    -------
    int
        Stages besides the first, or slices of heads: those that make forward and backward the
        shortest by a model, at most `STAGES`.
    """
    if split == "ranks":
        counts = range(1, max(2, min(STAGES, sharding.ranks - 1) + 1))
    else:
        counts = [n for n in range(1, STAGES + 1) if heads_kv % n == 0]
    loads = _loads(sharding, group)
    return min(counts, key=lambda count: _time(*loads, split, count))


def _loads(sharding, group):
    """Of one head of Q of the average rank: own tiles, others, arrival, a merge, and a copy.

    A merge: of all rows that have keys of other ranks; a copy: of all keys.
    """
    ranks, per_plane = sharding.ranks, (sharding.tile / _TILE) ** 2 / sharding.mask.plane_index.size
    own = np.trace(sharding.work_on) / ranks * per_plane
    others = sharding.work.mean() * per_plane - own
    keys = sharding.traffic.sum(0).max()
    merge = _MERGE * sharding.meeting / ranks
    copy = _COPY * (keys + sharding.mask.shape[1] / ranks) / group
    return own, others, keys * _ARRIVAL / group, merge, copy


def _time(own, others, arrival, merge, copy, split, count):
    """What forward and backward take together."""
    part = arrival / count
    if split == "heads":
        forward = backward = part
        for n in range(count):
            behind, back = part * (n + 1 < count), _RETURN * part * (n > 0)
            forward += max((own + others + copy) / count, behind) + _LAUNCH
            backward += max((_BACKWARD * (own + others) + copy) / count, behind + back) + _LAUNCH
        return forward + backward + _RETURN * part
    forward, backward, returned = own, _BACKWARD * own, 0.0
    for n in range(1, count + 1):
        forward = max(forward, n * part) + others / count + merge + _LAUNCH
        backward = max(backward, n * part) + _BACKWARD * others / count + merge + _LAUNCH
        returned = max(returned, backward) + _RETURN * part
    return forward + max(backward, returned)


class Stage(NamedTuple):
    """One stage of one rank.

    Attributes
    ----------
    mask : masks.Mask
        Of some of the rank's queries and the keys of the stage, in the order of the sequence.
    rows : Index
        Which of its own queries these are: all in the first stage, then those that attend a key.
    positions : nbflash.inputs.positions.Positions
    sends : Parcels
        Of this rank's own keys those that others need in their stage of the same number.
    receives : Parcels
        Of the keys of this stage where those of each rank are.
    """

    mask: masks.Mask
    rows: Index
    positions: Positions
    sends: Parcels
    receives: Parcels

    @property
    def keys(self):
        """How many there are."""
        return self.mask.shape[1]


@functools.lru_cache(maxsize=64)
def stages_of(sharding, rank, count):
    """The `Stage` list of a rank, that of its own keys first.

    Parameters
    ----------
    sharding : nbflash.distributed.Sharding
    rank : int
    count : int
        Stages besides the first, at most one for each other rank.
    """
    queries, own = sharding.positions(rank), sharding.positions(rank, "keys")
    mask = masks.restrict(sharding.mask, queries, own)
    all_rows = Index(np.arange(queries.size))
    nothing = Parcels({}, own.size)
    found = [Stage(mask, all_rows, Positions(queries, own), nothing, nothing)]
    for distances in groups(sharding.ranks, count):
        sources = [(rank + d) % sharding.ranks for d in distances]
        targets = [(rank - d) % sharding.ranks for d in distances]
        received = {source: sharding.sent(source, rank) for source in sources}
        rows = sharding.attending(rank, sources)
        found.append(_stage(sharding, rank, rows, received, targets))
    return found


@functools.lru_cache(maxsize=64)
def all_keys(sharding, rank):
    """The `Stage` of a rank whose keys have all arrived; among what it receives are its own."""
    others = [r for r in range(sharding.ranks) if r != rank]
    received = {source: sharding.sent(source, rank) for source in others}
    received[rank] = sharding.positions(rank, "keys")
    return _stage(sharding, rank, sharding.positions(rank), received, others)


def _stage(sharding, rank, rows, received, targets):
    """Of the queries at ``rows``, with the keys that are received, at their places by source."""
    queries, own = sharding.positions(rank), sharding.positions(rank, "keys")
    keys = np.sort(np.concatenate([np.zeros(0, np.int64), *received.values()]))
    sent = {target: sharding.sent(rank, target) for target in targets}
    return Stage(
        masks.restrict(sharding.mask, rows, keys),
        Index(np.searchsorted(queries, rows)),
        Positions(rows, keys),
        Parcels({t: np.searchsorted(own, at) for t, at in sent.items()}, own.size),
        Parcels({s: np.searchsorted(keys, at) for s, at in received.items()}, keys.size),
    )
