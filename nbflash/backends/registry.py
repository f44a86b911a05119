"""One protocol over the implementations: what a plan prepares and then runs.

An executor has ``schedule`` (a `TileSchedule`, or None), ``two_passes`` as `AttentionPlan` has it,
and two methods on checked arrays,

    forward(q, k, v, out, lse)
    backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic)

which write every element of ``out`` and ``lse``, or of ``dq``, ``dk`` and ``dv``. With dropout both
take ``seed`` after these: two integers, or an array of them in CUDA memory.

`prepare_score_backward` gives what computes the gradients of a score's arrays: one function,

    score_backward(dout, q, k, v, out, lse, dlse, sums)

which writes every element of the arrays ``sums``, in the order of the score's; with ``seed`` alike.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property

import numpy as np

from nbflash.planning.dispatch import score_backward_impl
from nbflash.schedule.tile_schedule import TileSchedule


def prepare(impl: str, problem, mask, score=None, dropout=0.0):
    """The executor of ``impl`` for one problem and mask; implementations are imported here."""
    if problem.empty:
        return EmptyExecutor()
    if impl == "cpu":
        return CpuExecutor(problem, mask, score, dropout)
    if impl == "reference":
        return ReferenceExecutor(problem, mask, score, dropout)
    if impl == "sm90":
        from nbflash.backends.sm90 import executor as sm90

        return sm90.Sm90Executor(problem, mask, score=score, dropout=dropout)
    from nbflash.backends.simt import executor as simt

    return simt.SimtExecutor(problem, mask, score=score, dropout=dropout)


def prepare_score_backward(impl: str, problem, mask, score, dropout=0.0):
    """What writes the gradients of the arrays of ``score``, for a plan of ``impl``."""
    impl = score_backward_impl(impl)
    if problem.empty:
        return EmptyExecutor().score_backward
    if impl == "cpu":
        return CpuExecutor(problem, mask, score, dropout).score_backward
    if impl == "reference":
        return ReferenceExecutor(problem, mask, score, dropout).score_backward
    from nbflash.backends.simt import score_gradient_host as simt_score

    return simt_score.SimtScoreBackward(problem, mask, score, dropout=dropout)


class EmptyExecutor:
    """No query-key pair exists: ``out = 0``, ``lse = -inf`` and zero gradients, on any device."""

    schedule = two_passes = None

    def forward(self, q, k, v, out, lse, seed=(0, 0)):
        out.fill(0)
        lse.fill(-np.inf)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0)):
        for gradient in (dq, dk, dv):
            gradient.fill(0)

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0)):
        for total in sums:
            total.fill(0)


class CpuExecutor:
    """`nbflash.backends.cpu` over one schedule; always deterministic."""

    two_passes = None

    def __init__(self, problem, mask, score=None, dropout=0.0):
        from nbflash.backends import cpu

        self._cpu, self._dropout = cpu, dropout
        self._problem, self._given = problem, score
        self.schedule = TileSchedule.from_mask(mask, *cpu.tile_sizes(problem.head_dim, mask))
        self._scale = problem.scale
        real = np.dtype(problem.lse_dtype).type
        self._score = cpu.prepare(score, self.schedule.nq, self.schedule.nk, real)

    @contextmanager
    def _named(self):
        """What a function of a score raises has its file and line as a note."""
        try:
            yield
        except Exception as error:
            if self._given is not None:
                error.add_note(f"score: {self._given}")
            raise

    def forward(self, q, k, v, out, lse, seed=(0, 0)):
        how = self.schedule, self._scale, self._score, (self._dropout, seed)
        with self._named():
            self._cpu.forward(q, k, v, out, lse, *how)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0)):
        how = self.schedule, self._scale, self._score, (self._dropout, seed)
        with self._named():
            self._cpu.backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *how)

    @cached_property
    def _chained(self):
        """The functions of the score with those of its arrays, their parameters, the arrays."""
        score, real = self._given, np.dtype(self._problem.lse_dtype).type
        chained = self._cpu.prepare_chain(score, self.schedule.nq, self.schedule.nk, real)
        return chained, [part for parts in score.parts for part in parts]

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0)):
        how = self.schedule, self._scale, *self._chained, self._problem, (self._dropout, seed)
        with self._named():
            self._cpu.score_backward(dout, q, k, v, out, lse, dlse, sums, *how)


class ReferenceExecutor:
    """`nbflash.reference` in float64, rounded once; the dense score matrix is materialised."""

    schedule = two_passes = None

    def __init__(self, problem, mask, score=None, dropout=0.0):
        from nbflash import reference

        self._reference, self._score, self._dropout = reference, score, dropout
        self._mask = mask
        self._scale = problem.scale

    def forward(self, q, k, v, out, lse, seed=(0, 0)):
        how = self._mask, self._scale, self._score, self._dropout, seed
        results = self._reference.attention(q, k, v, *how)
        _store((out, lse), results)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0)):
        how = self._mask, self._scale, dlse, self._score, self._dropout, seed
        results = self._reference.attention_backward(dout, q, k, v, *how)
        _store((dq, dk, dv), results)

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0)):
        results = self._reference.score_backward(
            *(dout, q, k, v, self._mask, self._scale, dlse),
            score=self._score,
            dropout=self._dropout,
            seed=seed,
        )
        _store(sums, results)


def _store(targets, values):
    """Round to the targets' dtypes; a value beyond their range becomes an infinity."""
    with np.errstate(over="ignore"):
        for target, value in zip(targets, values, strict=True):
            target[...] = value
