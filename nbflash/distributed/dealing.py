"""Which rank gets which rows of tiles: as much work, about as many rows, and neighbours together.

Rows are cut into equal chunks, one, two, four, ... for each rank, and each number is dealt twice:

* In halves: the first half of the ranks gets the first half of the chunks; as few as possible
  change sides, the heaviest for the lightest, until the work is even; and so on within each half.
  Ranks that are near each other have tokens that are.
* Greedily: the heaviest chunk first, each to the rank that has least so far and is not full (Graham
  1969 with equal counts, as MagiAttention deals). Of two chunks a rank in a causal sequence it
  makes pairs of the head and the tail.

Of those that are balanced the one is taken whose fullest rank receives the fewest keys, and of
equal ones that of the fewest chunks. One chunk a rank does for windows and butterflies. Where keys
that travel have a cost, in tiles, the dealing is taken of which work and keys together cost the
most loaded rank least, balanced or not.
"""

from __future__ import annotations

import heapq

import numpy as np

#: Work of the most loaded rank over the mean that is balanced.
BALANCE = 1.02


def even(n, parts):
    """Which of `parts` runs, as long as each other, each of n belongs to."""
    return (np.arange(n) * parts // max(n, 1)).astype(np.int32)


#: Chunks of a rank, at most, of which dealings are compared by their cost.
MOST_CHUNKS = 8


def deal(work, ranks, made, key_cost=0.0):
    """The best of all dealings.

    Parameters
    ----------
    work : array (rows,)
    ranks : int
    made : callable
        Of the owners of rows, int32 (rows,), something with ``work``, ``balance`` and ``traffic``:
        a `nbflash.distributed.Sharding`.
    key_cost : float
        Tiles that a rank computes in the time in which a key arrives.
    """
    candidates, chunks = [], ranks
    while True:
        chunk_of = even(work.size, max(1, min(chunks, work.size)))
        load = np.bincount(chunk_of, work, chunk_of.max(initial=0) + 1)
        for owners in (_in_halves(load, ranks), _greedily(load, ranks)):
            candidates.append(made(owners[chunk_of]))
        found = chunks >= MOST_CHUNKS * ranks if key_cost else candidates[-2].balance <= BALANCE
        if found or chunks >= work.size:
            break
        chunks *= 2
    if key_cost:
        return min(candidates, key=lambda x: (x.work + key_cost * x.traffic.sum(0)).max())
    balanced = [x for x in candidates if x.balance <= BALANCE]
    if not balanced:
        return min(candidates, key=lambda x: x.balance)
    if len(balanced) == 1:
        return balanced[0]
    return min(balanced, key=lambda x: x.traffic.sum(0).max())


def _in_halves(load, ranks):
    """The rank of each chunk; ranks that follow each other have chunks that do, where they can."""
    owner = np.empty(load.size, np.int32)

    def split(chunks, first, ranks):
        if ranks == 1:
            owner[chunks] = first
            return
        left = ranks // 2
        count = chunks.size * left // ranks
        target = load[chunks].sum() * left / ranks
        a, b = _evened(load, chunks[:count], chunks[count:], target)
        split(np.sort(a), first, left)
        split(np.sort(b), first + left, ranks - left)

    split(np.arange(load.size), 0, ranks)
    return _by_first_chunk(owner, ranks)


def _evened(load, a, b, target):
    """Two sets of chunks between which some have changed places, so that the first has the target.

    Of equal ones those change that are nearest to the border.
    """
    too_much = load[a].sum() - target
    sign = 1 if too_much > 0 else -1
    a = a[np.lexsort([-a, -sign * load[a]])]  # first what is to leave
    b = b[np.lexsort([b, sign * load[b]])]
    n = min(a.size, b.size)
    gain = sign * (load[a[:n]] - load[b[:n]])  # not increasing
    gain = np.cumsum(gain[gain > 0])
    k = int(np.searchsorted(gain, abs(too_much), side="right"))
    a[:k], b[:k] = b[:k].copy(), a[:k].copy()
    rest = abs(too_much) - (gain[k - 1] if k else 0)
    return _one_more(load, a, b, k, sign * rest)


def _one_more(load, a, b, done, wanted):
    """One more exchange: the one that comes nearest to what the first set is to lose."""
    ours, theirs = load[a[done:]], load[b[done:]]
    if not ours.size or not theirs.size:
        return a, b
    order = np.argsort(theirs, kind="stable")
    at = np.searchsorted(theirs[order], ours - wanted)
    best = abs(wanted), None
    for shift in (-1, 0):
        j = order[np.clip(at + shift, 0, theirs.size - 1)]
        left = abs(wanted - (ours - theirs[j]))
        i = int(left.argmin())
        if left[i] < best[0]:
            best = left[i], (done + i, done + int(j[i]))
    if best[1]:
        i, j = best[1]
        a[i], b[j] = b[j], a[i]
    return a, b


def _greedily(load, ranks):
    """The rank of each chunk, the heaviest first, as many to each; ranks by their first chunk."""
    fewest, more = divmod(load.size, ranks)
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    owner = np.empty(load.size, np.int32)
    for chunk in np.argsort(-load, kind="stable"):
        total, count, rank = heapq.heappop(heap)
        while count == fewest and not more:
            total, count, rank = heapq.heappop(heap)
        more -= count == fewest
        owner[chunk] = rank
        if count < fewest:
            heapq.heappush(heap, (total + load[chunk], count + 1, rank))
    return _by_first_chunk(owner, ranks)


def _by_first_chunk(owner, ranks):
    """The same parts, with the ranks in the order of the first chunk that each has."""
    found, first = np.unique(owner, return_index=True)
    number = np.empty(ranks, np.int32)
    number[found[np.argsort(first)]] = np.arange(found.size)
    return number[owner]
