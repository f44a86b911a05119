"""One protocol over the implementations: what a plan prepares and then runs.

An executor has ``schedule`` (a `TileSchedule`, or None) and two methods on checked arrays,

    forward(q, k, v, out, lse)
    backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic)

which write every element of ``out`` and ``lse``, or of ``dq``, ``dk`` and ``dv``.
"""

from __future__ import annotations

import numpy as np

from nbflash.schedule import TileSchedule


def prepare(impl: str, problem, mask, score=None):
    """The executor of ``impl`` for one problem and mask; implementations are imported here."""
    if problem.empty:
        return EmptyExecutor()
    if impl == "cpu":
        return CpuExecutor(problem, mask, score)
    if impl == "reference":
        return ReferenceExecutor(problem, mask, score)
    if impl == "sm90":
        from nbflash import sm90

        return sm90.Sm90Executor(problem, mask)
    from nbflash import simt

    return simt.SimtExecutor(problem, mask)


class EmptyExecutor:
    """No query-key pair exists: ``out = 0``, ``lse = -inf`` and zero gradients, on any device."""

    schedule = None

    def forward(self, q, k, v, out, lse):
        out.fill(0)
        lse.fill(-np.inf)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic):
        for gradient in (dq, dk, dv):
            gradient.fill(0)


class CpuExecutor:
    """`nbflash.cpu` over one schedule; always deterministic."""

    def __init__(self, problem, mask, score=None):
        from nbflash import cpu

        self._cpu, self._score = cpu, score
        self.schedule = TileSchedule.from_mask(mask, *cpu.tile_sizes(problem.head_dim, mask))
        self._scale = problem.scale

    def forward(self, q, k, v, out, lse):
        self._cpu.forward(q, k, v, out, lse, self.schedule, self._scale, self._score)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic):
        how = self.schedule, self._scale, self._score
        self._cpu.backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *how)


class ReferenceExecutor:
    """`nbflash.reference` in float64, rounded once; the dense score matrix is materialised."""

    schedule = None

    def __init__(self, problem, mask, score=None):
        from nbflash import reference

        self._reference, self._score = reference, score
        self._mask = mask
        self._scale = problem.scale

    def forward(self, q, k, v, out, lse):
        results = self._reference.attention(q, k, v, self._mask, self._scale, self._score)
        _store((out, lse), results)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic):
        how = self._mask, self._scale, dlse, self._score
        results = self._reference.attention_backward(dout, q, k, v, *how)
        _store((dq, dk, dv), results)


def _store(targets, values):
    """Round to the targets' dtypes; a value beyond their range becomes an infinity."""
    with np.errstate(over="ignore"):
        for target, value in zip(targets, values, strict=True):
            target[...] = value
