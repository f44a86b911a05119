"""A model of attention over many GPUs: when each stage's keys are there, and when it is computed.

It walks the stages of `nbflash.distributed` with the tiles and messages that a `Sharding` has. On
every rank computation and communication are two queues, filled as the code does:

    cast 1, cast 2, ..., compute 0, compute 1, [return 1], compute 2, [return 2], ...

A cast brings the keys of a stage and begins when the one before it is done; a stage is computed
when its keys are there; in the backward pass dK and dV go back behind it. Where heads are split, a
slice n begins when its keys are there, and with it the cast of slice n + 1 and the return of slice
n − 1.

A message takes as long as the busier end of the slower link needs. What ranks do to each other is
not modelled: no switch is full, and nobody waits for a rank that is late.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbflash.distributed.sharding import members
from nbflash.distributed.stages import groups

WIDE = 4  # bytes of a sum


@dataclass(frozen=True)
class Cluster:
    """Rates of a GPU for one mask, and of the links; units are seconds, bytes and FLOPs."""

    forward: float
    backward: float
    hbm: float
    launch: float
    nvlink: float
    infiniband: float
    latency: float
    message: float
    gpus_per_node: int

    @classmethod
    def of(cls, gpu, link, mask):
        """From the tables of the sweep."""
        return cls(
            gpu["forward"][mask] * 1e12,
            gpu["backward"][mask] * 1e12,
            gpu["hbm_gb_s"] * 1e9,
            gpu["launch_us"] * 1e-6,
            link["nvlink_gb_s"] * 1e9,
            link["infiniband_gb_s"] * 1e9,
            link["latency_us"] * 1e-6,
            link["message_us"] * 1e-6,
            link["gpus_per_node"],
        )


@dataclass(frozen=True)
class Layer:
    """Sizes of an attention layer."""

    head_dim: int
    heads: int
    heads_kv: int
    itemsize: int

    @property
    def kv_bytes(self):
        """Of K and V of a token."""
        return 2 * self.heads_kv * self.head_dim * self.itemsize

    @property
    def group(self):
        """Heads of Q to one of K and V."""
        return self.heads // self.heads_kv

    @property
    def q_bytes(self):
        """Of Q of a token."""
        return self.heads * self.head_dim * self.itemsize


def simulate(sharding, layer, cluster, split, parts):
    """What one forward and one backward pass take.

    Parameters
    ----------
    sharding : nbflash.distributed.Sharding
    layer : Layer
    cluster : Cluster
    split, parts : str, int
        What arrives together, and in how many parts: `nbflash.distributed.stages.part_count`.

    Returns
    -------
    dict of str to float
        Of either pass the seconds of the slowest rank, and the share of the ideal, which is the
        time of one GPU over the number of ranks; the largest part of it that is spent waiting for
        keys; the bytes that a rank receives and has, at most.
    """
    flops = sharding.work_on * sharding.tile**2 * 4.0 * layer.head_dim * layer.heads
    own = np.bincount(sharding.query_owner, minlength=sharding.ranks) * sharding.tile
    by = _by_heads if split == "heads" else _by_ranks
    found = by(sharding, layer, cluster, flops, own, parts)
    row = {"received_bytes": float(found.received.max() * layer.kv_bytes)}
    for name, rate, products, back in (
        ("forward", cluster.forward, 1.0, None),
        ("backward", cluster.backward, 2.5, found.casts * WIDE / layer.itemsize),
    ):
        compute = found.flops * products / rate + found.fixed
        seconds = found.walk(compute, found.casts, back).max()
        ideal = flops.sum() * products / rate / sharding.ranks
        row |= {f"{name}_s": float(seconds), f"{name}_of_ideal": float(ideal / seconds)}
        row |= {f"{name}_waiting": float(1 - compute.sum(0).max() / seconds)}
    return row | {"memory_bytes": float(_memory(own, found.held, layer).max())}


class _Parts(NamedTuple):
    """What arrives together, stages or slices of heads (rows), on every rank (columns).

    FLOPs of the forward pass, seconds beside them, and seconds of each cast; the tokens that a rank
    receives, and those of others that it has at a time; how ranks go through all this.
    """

    flops: np.ndarray
    fixed: np.ndarray
    casts: np.ndarray
    received: np.ndarray
    held: np.ndarray
    walk: Callable


def _by_ranks(sharding, layer, cluster, flops, own, parts):
    """Stages: the keys of some ranks, all heads."""
    merge = layer.q_bytes * (1 + 2 * WIDE / layer.itemsize) / cluster.hbm  # of a query
    work, fixed, casts, tokens = [], [], [], []
    for stage in _stage_of(sharding.ranks, parts):
        work.append(np.where(stage, flops, 0).sum(1))
        launch = np.where(work[-1] > 0, cluster.launch, 0)
        fixed.append(launch + _rows(sharding, stage) * merge if casts else np.zeros(own.shape))
        moved = np.where(stage.T, sharding.traffic, 0)  # from (row) to (column)
        casts.append(_seconds(moved, layer.kv_bytes, cluster))
        tokens.append(moved.sum(0))
    work, fixed, casts, tokens = map(np.array, (work, fixed, casts, tokens))
    return _Parts(work, fixed, casts, tokens.sum(0), tokens, _walk)


def _by_heads(sharding, layer, cluster, flops, own, parts):
    """Slices: all keys, some heads; a rank has two at a time."""
    tokens = sharding.traffic.sum(0)
    cast = _seconds(sharding.traffic, layer.kv_bytes / parts, cluster)
    copied = 2 * (own + tokens) * layer.kv_bytes / parts / cluster.hbm
    work, casts, fixed = (np.tile(x, (parts, 1)) for x in (flops.sum(1) / parts, cast, copied))
    fixed[1:] += cluster.launch
    held = (own + tokens)[None] * min(parts, 2) / parts
    return _Parts(work, fixed, casts, tokens, held, _walk_heads)


def _stage_of(ranks, stages):
    """Of every stage, bool (ranks, ranks): whether a rank (row) attends an owner's keys in it."""
    distance = (np.arange(ranks)[None] - np.arange(ranks)[:, None]) % ranks
    return [distance == 0, *(np.isin(distance, group) for group in groups(ranks, stages))]


def _rows(sharding, stage):
    """How many of each rank's queries have keys in a stage, by whole tiles."""
    live = (sharding.live @ members(sharding.key_owner, sharding.ranks).T).tocoo()
    (row, owner), ranks = live.coords, sharding.query_owner
    tiles = np.unique(row[stage[ranks[row], owner]])
    return np.bincount(ranks[tiles], minlength=sharding.ranks) * sharding.tile


def _memory(own, tokens, layer):
    """Of each rank in the backward pass, of its own tokens and of all keys that arrive."""
    wide = WIDE / layer.itemsize
    arrays = 4 + wide, 2 + wide  # q, out, dout, dq and its sum; k and v, dk and dv, their sums
    kept = own * (arrays[0] * layer.q_bytes + arrays[1] * layer.kv_bytes)
    return kept + (tokens.sum(0) + wide * tokens.max(0)) * layer.kv_bytes


def _seconds(moved, size, cluster):
    """How long each rank is busy with the tokens of one stage, ``size`` bytes each."""
    node = np.arange(len(moved)) // cluster.gpus_per_node
    near = node[:, None] == node[None]
    seconds = np.zeros(len(moved))
    for there, rate in ((near, cluster.nvlink), (~near, cluster.infiniband)):
        over = np.where(there, moved, 0) * size
        seconds = np.maximum(seconds, np.maximum(over.sum(0), over.sum(1)) / rate)
    messages = np.maximum((moved > 0).sum(0), (moved > 0).sum(1))
    return seconds + np.where(messages, cluster.latency + messages * cluster.message, 0)


def _walk(compute, casts, returns):
    """When each rank is done: stages (rows) through the queues of computation and communication."""
    arrived, done = np.cumsum(casts, axis=0), compute[0]
    sent = arrived[-1]
    for n in range(1, len(compute)):
        done = np.maximum(done, arrived[n]) + compute[n]
        if returns is not None:
            sent = np.maximum(sent, done) + returns[n]
    return np.maximum(done, sent)


def _walk_heads(compute, casts, returns):
    """The same of slices (rows) of heads."""
    done = arrived = casts[0]
    for n, took in enumerate(compute):
        start = np.maximum(done, arrived)
        behind = casts[n + 1] if n + 1 < len(casts) else 0
        back = returns[n - 1] if n and returns is not None else 0
        arrived, done = start + behind + back, start + took
    return np.maximum(done, arrived) + (0 if returns is None else returns[-1])
