"""What a rank does alike in every call of one kind: its checks, stages and plans, made once."""

from __future__ import annotations

import json
import threading
from typing import NamedTuple

import numpy as np

import masks
from nbflash import __version__
from nbflash.backends.registry import BACKENDS
from nbflash.distributed.by_heads import queries_of
from nbflash.distributed.placed_score import placed
from nbflash.distributed.sharding import positive
from nbflash.distributed.stages import all_keys, check_split, part_count, stages_of
from nbflash.inputs.arrays import library, signature
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.problem import check_forward, check_mask
from nbflash.planning import cache
from nbflash.planning.dispatch import choose
from nbflash.planning.plan import plan_of
from nbflash.scores import Score, check_score

_planning = threading.Lock()  # ranks that are threads compile a score once


class RankOptions(NamedTuple):
    """What a `RankPlan` depends on besides arrays, sharding and rank.

    As the user gave them to `nbflash.distributed.attention`: `RankPlan` checks them.
    """

    scale: float | None
    score: Score | None
    dropout: float
    stages: int | None
    split: str
    impl: str


class RankPlan:
    """The checked arguments of a rank, but for the contents of arrays, and its stages.

    Parameters
    ----------
    q, k, v : native arrays
        Of which shapes, dtypes and layouts are read.
    sharding : nbflash.distributed.Sharding
    rank : int
    options : RankOptions

    Attributes
    ----------
    problem : nbflash.inputs.problem.Problem
        Of the rank's own queries and keys.
    stages : list of nbflash.distributed.stages.Stage
        One alone, of all keys, where heads are split.
    slices : list of slice
        Where heads are split: those of K and V that arrive together.
    group : int
        Heads of Q to one of K and V.
    merges : int
        Stages whose results are merged into those of the first.
    returns : int
        Messages of gradients of the rank's own keys that come from other ranks; of one slice.
    wide : numpy.dtype
        Of sums.
    """

    def __init__(self, q, k, v, sharding, rank, options):
        count, split = options.stages, options.split
        count = count if count is None else positive("stages", count)
        self.problem = check_forward(q, k, v, options.scale)
        self.dropout, self.wide = check_dropout(options.dropout), np.dtype(self.problem.lse_dtype)
        self._score, self._impl, self._shape = options.score, options.impl, sharding.mask.shape
        self._rank = rank
        heads_kv, self.slices = self.problem.heads_kv, []
        self.group = self.problem.heads // heads_kv
        check_split(split, count, heads_kv, self._why_not_heads(sharding))
        parts = count or part_count(sharding, heads_kv, self.group, split)
        if split == "heads":
            self.stages = [all_keys(sharding, rank)]
            width = heads_kv // parts
            self.slices = [slice(h, h + width) for h in range(0, heads_kv, width)]
        else:
            self.stages = stages_of(sharding, rank, parts)
        self.merges = sum(stage.keys > 0 for stage in self.stages[1:])
        self.returns = sum(len(stage.sends.ranks) for stage in self.stages)
        self._plans, self._notes = [None] * len(self.stages), {}
        if self.dropout:
            self._check_tile(sharding)
        self._check_first(q, k, v, sharding)
        self._facts = self._facts_of(sharding, count, split)

    def _check_tile(self, sharding):
        """Raise ValueError on all ranks alike if blocks that dropout looks up do not stay together.

        A rank's first stage may have whole ones, and a later one, planned behind messages, not.
        """
        spec = AttentionSpec(self.problem, self.stages[0].mask, None, self.dropout)
        block = BACKENDS[choose(self._impl, spec)].dropout_block
        if block and sharding.ranks > 1 and sharding.tile % block:
            raise ValueError(
                f"sharding has tile={sharding.tile}: dropout needs a multiple of {block}"
            )

    def _why_not_heads(self, sharding):
        """What heads are not split with: their numbers would begin at 0 in each slice."""
        given = {
            "a mask that differs by batch or head": sharding.mask.plane_index.size > 1,
            "score=": self._score is not None,
            "dropout=": bool(self.dropout),
        }
        return [name for name, value in given.items() if value]

    def _check_first(self, q, k, v, sharding):
        """Check and plan what comes first, for the arguments that this rank was given."""
        stage = self.stages[0]
        if not self.slices:
            check_mask(stage.mask, self.problem)
            self.attention(0, q, k, v)
            return
        own = stage.rows.size, stage.receives.size_of(self._rank)
        check_mask(masks.dense(*own), self.problem)
        heads, (xp, device) = self.slices[0], library(k)
        rest = heads.stop - heads.start, self.problem.head_dim
        with device:
            keys = xp.empty((self.problem.batch, stage.keys, *rest), k.dtype)
            q = queries_of(q, slice(0, self.group * heads.stop))
            self.attention(0, q, keys, keys)

    def _facts_of(self, sharding, count, split):
        """What must be equal on all ranks."""
        p = self.problem
        return {
            "nbflash": __version__,
            "sharding": sharding.digest,
            "batch, heads, heads_kv, head_dim": [p.batch, p.heads, p.heads_kv, p.head_dim],
            "dtype": p.dtype,
            "scale": p.scale,
            "score": getattr(self._score, "summary", str(self._score)),
            "dropout": self.dropout,
            "stages": count,
            "split": split,
        }

    def note(self, seed, **more):
        """The facts of a call as the ranks compare them; those of one kind are written once."""
        seed = seed if isinstance(seed, tuple) else None
        kind = repr(more)
        note = self._notes.get(kind) if seed is None else None
        if note is None:
            note = json.dumps(self._facts | more | {"seed": seed})
            if seed is None:
                self._notes[kind] = note
        return note

    def attention(self, number, q, k, v):
        """The `AttentionPlan` of a stage, whose arrays have the same layout in every call."""
        if self._plans[number] is None:
            with _planning:
                self._plans[number] = self._planned(self.stages[number], q, k, v)
        return self._plans[number]

    def _planned(self, stage, q, k, v):
        problem, score = check_forward(q, k, v, self.problem.scale), self._score
        if isinstance(score, Score):
            score = placed(score, stage.positions, self._shape)
        check_score(score, problem)
        positions = stage.positions if self.dropout else None
        spec = AttentionSpec(problem, stage.mask, score, self.dropout, positions)
        return plan_of(spec, self._impl)


def rank_plan(q, k, v, sharding, rank, options):
    """The cached `RankPlan` of a call."""
    # 1 == True: the types keep what a check refuses out of the cache.
    signatures = signature(q), signature(k), signature(v)
    key = (*signatures, sharding, rank, *options, *map(type, options))
    found = cache.plans.get(key)
    if found is None:
        found = RankPlan(q, k, v, sharding, rank, options)
        cache.plans.put(key, found)
    return found
