"""A score of the whole sequence for some of its queries and keys.

Its functions are given the places that tokens have in the sequence, in place of those in the
arrays: ``fn(s, b, h, queries[q_idx], keys[kv_idx], ...)``. So they run on every implementation.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from nbflash.definitions import score_functions


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
        softcap = stage.at(*shape)[0] is score_functions.softcap
        return stage if softcap else cls(positions, shape, stage)

    def __init__(self, positions, shape, stage):
        self._stage, self._shape = stage, shape
        self._places = positions.queries, positions.keys
        _, self.grad, _ = self.at()
        self.params = *self._places, *stage.params
        self.parts = stage.parts and tuple(
            part._replace(function=self._placed(part.function)) for part in stage.parts
        )
        self.key = "placed", stage.key, positions, shape

    def at(self, nq=None, nk=None):
        fn, grad, params = self._stage.at(*self._shape)
        return self._placed(fn), self._placed(grad), (*self._places, *params)

    def _placed(self, fn):
        return _at_places(fn, len(self._stage.at(*self._shape)[2]))

    def check(self, problem):
        nq, nk = self._shape
        self._stage.check(replace(problem, nq=nq, nk=nk))

    def __str__(self):
        return str(self._stage)


# As many parameters as the function has: the CUDA target compiles no other by itself.
_SOURCE = """
def make(inner):
    def at_places(s, b, h, q_idx, kv_idx, queries, keys, {names}):
        return inner(s, b, h, queries[q_idx], keys[kv_idx], {names})
    return at_places
"""


@functools.lru_cache(maxsize=256)
def _at_places(fn, count):
    """A function of a score at the places that two arrays have; of any place where it is 1."""
    if fn in (None, score_functions.one):
        return fn
    import numba

    names, made = ", ".join(f"p{i}" for i in range(count)), {}
    exec(compile(_SOURCE.format(names=names), __file__, "exec"), globals(), made)
    at_places = made["make"](numba.njit(fn))
    # what messages say of it
    line = fn.__code__.co_filename, fn.__code__.co_firstlineno
    code = at_places.__code__.replace(co_filename=line[0], co_firstlineno=line[1])
    at_places.__code__, at_places.__qualname__ = code, fn.__qualname__
    return at_places
