"""Score functions in the CPU kernels: one's own Python, compiled into the walk.

``score(s, b, h, q_idx, kv_idx, params)`` returns the new score and its derivative; None stands for
no score function, and the kernels are then as if this module were not there.
"""

import functools
import math

from numba import njit
from numba.core.errors import NumbaError

from nbflash.constants import LOG2_E
from nbflash.scores import where


@njit
def factor(operands, score):
    """What Q Kᵀ is multiplied with: a score function sees natural units."""
    return operands.scale_log2 if score is None else operands.scale


@njit
def _place(walk, own, p, t):
    """First query and key of a tile, and where its scores begin."""
    if walk.transposed:
        return walk.col_idx[t] * walk.tile_m, own * walk.tile_n, (t - p) * walk.tile_m, 0
    return own * walk.tile_m, walk.col_idx[t] * walk.tile_n, 0, (t - p) * walk.tile_n


@njit
def apply(walk, score, params, b, h, own, p, stop, s):
    """S <- score(S) in base 2, for the tiles p..stop of row ``own``."""
    if score is not None:
        for t in range(p, stop):
            q0, kv0, top, left = _place(walk, own, p, t)
            for i in range(min(walk.tile_m, walk.nq - q0)):
                for j in range(min(walk.tile_n, walk.nk - kv0)):
                    at = top + i, left + j
                    x, _ = score(s[at], b, h, q0 + i, kv0 + j, params)
                    s[at] = x * LOG2_E


@njit
def apply_with_slope(walk, score, params, b, h, own, p, stop, s, slope):
    """`apply`, and the derivative of every score."""
    if score is not None:
        for t in range(p, stop):
            q0, kv0, top, left = _place(walk, own, p, t)
            for i in range(min(walk.tile_m, walk.nq - q0)):
                for j in range(min(walk.tile_n, walk.nk - kv0)):
                    at = top + i, left + j
                    x, slope[at] = score(s[at], b, h, q0 + i, kv0 + j, params)
                    s[at] = x * LOG2_E


@njit
def chain(score, ds, slope):
    """dS <- dS ∘ ∂score/∂S, exactly 0 where dS is."""
    if score is not None:
        for j in range(ds.size):
            if ds[j] != 0:
                ds[j] *= slope[j]


@njit
def _nothing(s, b, h, q_idx, kv_idx, params):
    return s, 1.0


@functools.lru_cache(maxsize=64)
def _compiled(functions):
    """One function for those of ``(fn, grad)`` one after the other."""
    if not functions:
        return _nothing
    (fn, grad), *others = functions
    first, rest = njit(fn), _compiled(tuple(others))
    slope = njit(grad or _no_slope)

    @njit
    def score(s, b, h, q_idx, kv_idx, params):
        own = slope(s, b, h, q_idx, kv_idx, *params[0])
        x = first(s, b, h, q_idx, kv_idx, *params[0])
        x, others = rest(x, b, h, q_idx, kv_idx, params[1:])
        return x, own * others

    return score


def _no_slope(s, b, h, q_idx, kv_idx, *params):
    """Of a function without a gradient, which has no backward pass."""
    return math.nan


def prepare(score, nq, nk, real):
    """The compiled function of a `Score` and its parameters; None and () of None.

    Raises
    ------
    TypeError
        If Numba cannot compile a function, with its reason and the line that defines it.
    """
    if score is None:
        return None, ()
    stages = score.stages(nq, nk)
    for fn, grad, params in stages:
        for function in (fn, grad):
            if function is not None:
                _check(function, params, real)
    functions = tuple((fn, grad) for fn, grad, _ in stages)
    return _compiled(functions), tuple(params for _, _, params in stages)


def _check(function, params, real):
    try:
        result = njit(function)(real(0), 0, 0, 0, 0, *params)
    except NumbaError as error:
        raise TypeError(f"score: {where(function)} cannot be compiled: {error}") from error
    if not isinstance(result, (int, float)):
        raise TypeError(f"score: {where(function)} must return a number, got {result!r}")
