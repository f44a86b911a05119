"""What a rank does alike in every call of one kind: its checks, stages and plans, made once."""

from __future__ import annotations

import json
import threading

import numpy as np

from nbflash import __version__
from nbflash.distributed.placed_score import placed
from nbflash.distributed.sharding import positive
from nbflash.distributed.stages import stage_count, stages_of
from nbflash.inputs.arrays import signature
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.problem import check_forward, check_mask
from nbflash.planning import cache
from nbflash.planning.plan import plan_of
from nbflash.scores import Score, check_score

_planning = threading.Lock()  # ranks that are threads compile a score once


class RankPlan:
    """The checked arguments of a rank, but for the contents of arrays, and its stages.

    Attributes
    ----------
    problem : nbflash.inputs.problem.Problem
        Of the rank's own queries and keys.
    stages : list of nbflash.distributed.stages.Stage
    merges : int
        Stages whose results are merged into those of the first.
    returns : int
        Messages of gradients of the rank's own keys that come from other ranks.
    wide : numpy.dtype
        Of sums.
    """

    def __init__(self, q, k, v, sharding, rank, scale, score, dropout, stages, impl):
        count = stages if stages is None else positive("stages", stages)
        self.problem = check_forward(q, k, v, scale)
        self.dropout, self.wide = check_dropout(dropout), np.dtype(self.problem.lse_dtype)
        self._score, self._impl, self._shape = score, impl, sharding.mask.shape
        group = self.problem.heads // self.problem.heads_kv
        self.stages = stages_of(sharding, rank, count or stage_count(sharding, group))
        self.merges = sum(stage.keys > 0 for stage in self.stages[1:])
        self.returns = sum(len(stage.sends.ranks) for stage in self.stages)
        self._plans, self._notes = [None] * len(self.stages), {}
        check_mask(self.stages[0].mask, self.problem)
        self.attention(0, q, k, v)
        self._facts = self._facts_of(sharding, count)

    def _facts_of(self, sharding, count):
        """What must be equal on all ranks."""
        p = self.problem
        return {
            "nbflash": __version__,
            "sharding": sharding.digest,
            "batch, heads, heads_kv, head_dim": [p.batch, p.heads, p.heads_kv, p.head_dim],
            "dtype": p.dtype,
            "scale": p.scale,
            "score": str(self._score),
            "dropout": self.dropout,
            "stages": count,
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


def rank_plan(q, k, v, sharding, rank, *options):
    """The cached `RankPlan` of a call; ``options``: its last five arguments."""
    # 1 == True: the types keep what a check refuses out of the cache.
    signatures = signature(q), signature(k), signature(v)
    key = (*signatures, sharding, rank, *options, *map(type, options))
    found = cache.plans.get(key)
    if found is None:
        found = RankPlan(q, k, v, sharding, rank, *options)
        cache.plans.put(key, found)
    return found
