"""The specification as an implementation, and what runs where there is nothing to compute."""

from __future__ import annotations

import numpy as np

from nbflash.backends.base import Backend
from nbflash.inputs.arrays import CPU


class Reference(Backend):
    """Every problem in host memory, in float64; "auto" never chooses it."""

    name, memory, dropout_block = "reference", CPU, None

    def why_not_here(self, device_id: int = 0) -> list[str]:
        return []

    def executor(self, spec):
        return ReferenceExecutor(spec)

    def score_backward(self, spec):
        return ReferenceExecutor(spec).score_backward


class ReferenceExecutor:
    """`nbflash.reference` in float64, rounded once; the dense score matrix is materialised."""

    schedule = two_passes = None

    def __init__(self, spec):
        from nbflash import reference

        self._reference, self._spec, self._scale = reference, spec, spec.problem.scale

    def _options(self, seed, **more):
        score, dropout = self._spec.score, self._spec.dropout
        return {"score": score, "dropout": dropout, "seed": seed, **more}

    def forward(self, q, k, v, out, lse, seed=(0, 0)):
        inputs = q, k, v, self._spec.mask, self._scale
        _store((out, lse), self._reference.attention(*inputs, **self._options(seed)))

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0)):
        inputs = dout, q, k, v, self._spec.mask, self._scale
        options = self._options(seed, dlse=dlse)
        _store((dq, dk, dv), self._reference.attention_backward(*inputs, **options))

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0)):
        inputs = dout, q, k, v, self._spec.mask, self._scale
        options = self._options(seed, dlse=dlse)
        _store(sums, self._reference.score_backward(*inputs, **options))


class EmptyExecutor:
    """No query-key pair exists: ``out = 0``, ``lse = -inf`` and zero gradients, on any device."""

    schedule = two_passes = None

    def forward(self, q, k, v, out, lse, seed=(0, 0), lists=()):
        out.fill(0)
        lse.fill(-np.inf)

    def backward(
        self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0), lists=()
    ):
        for gradient in (dq, dk, dv):
            gradient.fill(0)

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0), lists=()):
        for total in sums:
            total.fill(0)


def _store(targets, values):
    """Round to the targets' dtypes; a value beyond their range becomes an infinity."""
    with np.errstate(over="ignore"):
        for target, value in zip(targets, values, strict=True):
            target[...] = value
