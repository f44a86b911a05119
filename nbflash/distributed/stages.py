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
_TILE, _ARRIVAL, _MERGE, _LAUNCH = 128, 0.17, 0.06, 145.0
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


@functools.lru_cache(maxsize=64)
def stage_count(sharding, group=1):
    """Stages besides the first where nobody asks for another number, the same on all ranks.

    As many as make forward and backward the shortest by a model: a stage costs a merge, and hides
    what arrives for those behind it. ``group``: heads of Q to one of K and V.
    """
    ranks, per_plane = sharding.ranks, (sharding.tile / _TILE) ** 2 / sharding.mask.plane_index.size
    own = np.trace(sharding.work_on) / ranks * per_plane
    others = sharding.work.mean() * per_plane - own
    arrival = sharding.traffic.sum(0).max() * _ARRIVAL / group
    merge = _MERGE * sharding.mask.shape[0] / ranks + _LAUNCH

    def time(count):
        forward, backward, returned = own, _BACKWARD * own, 0.0
        for n in range(1, count + 1):
            there = n * arrival / count
            forward = max(forward, there) + others / count + merge
            backward = max(backward, there) + _BACKWARD * others / count + merge
            returned = max(returned, backward) + _RETURN * arrival / count
        return forward + max(backward, returned)

    return min(range(1, max(2, min(STAGES, ranks - 1) + 1)), key=time)


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
        found.append(_stage(sharding, rank, queries, own, sources, targets))
    return found


def _stage(sharding, rank, queries, own, sources, targets):
    received = {source: sharding.sent(source, rank) for source in sources}
    keys = np.sort(np.concatenate([np.zeros(0, np.int64), *received.values()]))
    sent = {target: sharding.sent(rank, target) for target in targets}
    rows = sharding.attending(rank, sources)
    return Stage(
        masks.restrict(sharding.mask, rows, keys),
        Index(np.searchsorted(queries, rows)),
        Positions(rows, keys),
        Parcels({t: np.searchsorted(own, at) for t, at in sent.items()}, own.size),
        Parcels({s: np.searchsorted(keys, at) for s, at in received.items()}, keys.size),
    )
