"""What a rank does in each stage of a call: which keys it attends, and what travels for them.

Stage 0 is of the rank's own keys. The other ranks follow in groups by their distance, (source −
rank) modulo the number of ranks: all ranks send and receive alike, and while a stage is computed
the keys of the next are on their way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

import masks
from nbflash.inputs.arrays import library, resident
from nbflash.inputs.positions import Positions

#: Stages besides that of a rank's own keys, at most, where nobody asks for another number.
STAGES = 4
#: Keys that the fullest rank receives in each of them, at least: 8 MB of 4 heads of 128 columns in
#: half precision, which take 35 µs on NVLink, about as long as a stage takes to launch and merge.
KEYS = 4096


def groups(ranks, count=None):
    """The distances of the ranks whose keys arrive in each stage after the first.

    Neighbours come first, on both sides: who sends to a rank also receives from it, so that a link
    between machines is used both ways at once.
    """
    nearest = sorted(range(1, ranks), key=lambda d: min(d, ranks - d))
    count = min(STAGES if count is None else count, ranks - 1)
    return [
        [d for i, d in enumerate(nearest) if i * count // (ranks - 1) == n] for n in range(count)
    ]


def stage_count(sharding):
    """Stages besides the first where nobody asks for another number, the same on all ranks.

    As many as have `KEYS` keys each, at most `STAGES`: little that travels travels at once.
    """
    arriving = int(sharding.traffic.sum(0).max())
    return max(1, min(STAGES, arriving // KEYS))


class Index:
    """Places along an axis, as a slice where they follow each other: that needs no gather."""

    def __init__(self, places):
        first = int(places[0]) if places.size else 0
        run = (first == 0 and not places.size) or (np.diff(places) == 1).all()
        self.size = places.size
        self._host = slice(first, first + places.size) if run else places.astype(np.int32)
        self._on_device = {}

    def of(self, x):
        """The index for an array, in its memory."""
        if isinstance(self._host, slice) or isinstance(x, np.ndarray):
            return self._host
        device = x.data.device_id
        if device not in self._on_device:
            with library(x)[1]:
                (self._on_device[device],) = resident([self._host])
        return self._on_device[device]


class Stage(NamedTuple):
    """One stage of one rank.

    Attributes
    ----------
    mask : masks.Mask
        Of some of the rank's queries and the keys of the stage, in the order of the sequence.
    rows : Index
        Which of its own queries these are: all in the first stage, then those that attend a key.
    positions : nbflash.inputs.positions.Positions
    sends : dict of int to Index
        By rank: which of this rank's own keys it needs in its stage of the same number.
    receives : dict of int to Index
        By rank: where its keys are among those of this stage.
    """

    mask: masks.Mask
    rows: Index
    positions: Positions
    sends: dict
    receives: dict

    @property
    def keys(self):
        """How many there are."""
        return self.mask.shape[1]


@functools.lru_cache(maxsize=64)
def stages_of(sharding, rank, count=None):
    """The `Stage` list of a rank, that of its own keys first.

    Parameters
    ----------
    sharding : nbflash.distributed.Sharding
    rank : int
    count : int, optional
        Stages besides the first, at most one for each other rank; default `stage_count`.
    """
    count = stage_count(sharding) if count is None else count
    queries, own = sharding.positions(rank), sharding.positions(rank, "keys")
    mask = masks.restrict(sharding.mask, queries, own)
    all_rows = Index(np.arange(queries.size))
    found = [Stage(mask, all_rows, Positions(queries, own), {}, {})]
    for distances in groups(sharding.ranks, count):
        sources = [(rank + d) % sharding.ranks for d in distances]
        targets = [(rank - d) % sharding.ranks for d in distances]
        found.append(_stage(sharding, rank, queries, own, sources, targets))
    return found


def _stage(sharding, rank, queries, own, sources, targets):
    received = {source: sharding.sent(source, rank) for source in sources}
    received = {source: keys for source, keys in received.items() if keys.size}
    keys = np.sort(np.concatenate([np.zeros(0, np.int64), *received.values()]))
    sent = {target: sharding.sent(rank, target) for target in targets}
    rows = sharding.attending(rank, sources)
    return Stage(
        masks.restrict(sharding.mask, rows, keys),
        Index(np.searchsorted(queries, rows)),
        Positions(rows, keys),
        {t: Index(np.searchsorted(own, at)) for t, at in sent.items() if at.size},
        {s: Index(np.searchsorted(keys, at)) for s, at in received.items()},
    )
