"""A score of the whole sequence for some of its queries and keys.

Its functions are given the places that tokens have in the sequence, in place of those in the
arrays: ``fn(s, b, h, queries[q_idx], keys[kv_idx], ...)``. So they run on every implementation.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numba

from nbflash import scores


@functools.lru_cache(maxsize=256)
def placed(score, positions, shape):
    """A `Score` for a part of a sequence.

    Parameters
    ----------
    score : nbflash.scores.Score
        Of the whole sequence.
    positions : nbflash.inputs.positions.Positions
    shape : (int, int)
        Queries and keys of the whole sequence.
    """
    return score.map(functools.partial(_PlacedStage.of, positions, shape))


class _PlacedStage:
    """A stage of a score, and where its tokens are."""

    @classmethod
    def of(cls, positions, shape, stage):
        """The stage itself where no place counts: kernels have a form of their own for it."""
        softcap = stage.at(*shape)[0] is scores._softcap
        return stage if softcap else cls(positions, shape, stage)

    def __init__(self, positions, shape, stage):
        self._stage, self._shape = stage, shape
        self._places = positions.queries, positions.keys
        self.grad, self.params = _at_places(stage.grad), (*self._places, *stage.params)
        self.parts = stage.parts and tuple(
            part._replace(function=_at_places(part.function)) for part in stage.parts
        )
        self.key = "placed", stage.key, positions, shape

    def at(self, nq, nk):
        fn, grad, params = self._stage.at(*self._shape)
        return _at_places(fn), _at_places(grad), (*self._places, *params)

    def check(self, problem):
        nq, nk = self._shape
        self._stage.check(replace(problem, nq=nq, nk=nk))

    def __str__(self):
        return str(self._stage)


@functools.lru_cache(maxsize=256)
def _at_places(fn):
    """A function of a score at the places that two arrays have; of any place where it is 1."""
    if fn in (None, scores._one):
        return fn
    inner = numba.njit(error_model="numpy")(fn)

    def at_places(s, b, h, q_idx, kv_idx, queries, keys, *params):
        return inner(s, b, h, queries[q_idx], keys[kv_idx], *params)

    at_places.__qualname__ = fn.__qualname__  # what messages call it
    return at_places
