"""Score functions in the CPU kernels: one's own Python, compiled into the walk.

``score(s, b, h, q_idx, kv_idx, params)`` returns the new score and its derivative; None stands for
no score function, and the kernels are then as if this module were not there.
"""

import functools
import math

from numba import njit
from numba.core.errors import NumbaError

from nbflash.backends.cpu.walk import place
from nbflash.definitions.constants import LOG2_E
from nbflash.scores import where

#: What the kernels take where there is no score function: no code and no parameters.
NO_SCORE = None, ()


@njit
def factor(operands, score):
    """What Q Kᵀ is multiplied with: a score function sees natural units."""
    return operands.scale_log2 if score is None else operands.scale


@njit
def apply(walk, score, params, b, h, own, p, stop, s, slope=None):
    """S <- score(S) in base 2, for the tiles p..stop of row ``own``; slope <- ∂score/∂S."""
    if score is not None:
        for t in range(p, stop):
            q0, kv0, top, left = place(walk, own, p, t)
            for i in range(min(walk.tile_m, walk.nq - q0)):
                for j in range(min(walk.tile_n, walk.nk - kv0)):
                    at = top + i, left + j
                    x, derivative = score(s[at], b, h, q0 + i, kv0 + j, params)
                    s[at] = x * LOG2_E
                    if slope is not None:
                        slope[at] = derivative


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


# As CUDA divides: 1 / 0 where a pair is hidden is no error.
jitted = functools.lru_cache(maxsize=128)(njit(error_model="numpy"))


@functools.lru_cache(maxsize=64)
def _compiled(functions):
    """One function for those of ``(fn, grad)`` one after the other."""
    if not functions:
        return _nothing
    (fn, grad), *others = functions
    first, rest = jitted(fn), _compiled(tuple(others))
    slope = jitted(grad or _no_slope)

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


def prepare_chain(score, nq, nk, real):
    """Functions with gradients and parts, and their parameters, for `backward_scores`.

    Raises
    ------
    TypeError
        If Numba cannot compile a part, with its reason and the line that defines it.
    """
    stages = list(zip(score.stages(nq, nk), score.parts, strict=True))
    for (_, _, params), parts in stages:
        for part in parts:
            _check(part.function, params, real, tuple, "an index and a number")
    functions = ((fn, grad, tuple(p.function for p in parts)) for (fn, grad, _), parts in stages)
    return tuple(functions), tuple(params for (_, _, params), _ in stages)


def prepare(score, nq, nk, real):
    """The compiled function of a `Score` and its parameters; `NO_SCORE` of None.

    Raises
    ------
    TypeError
        If Numba cannot compile a function, with its reason and the line that defines it.
    """
    if score is None:
        return NO_SCORE
    stages = score.stages(nq, nk)
    for fn, grad, params in stages:
        for function in (fn, grad):
            if function is not None:
                _check(function, params, real)
    functions = tuple((fn, grad) for fn, grad, _ in stages)
    return _compiled(functions), tuple(params for _, _, params in stages)


def _check(function, params, real, kind=(int, float), what="a number"):
    try:
        result = jitted(function)(real(0), 0, 0, 0, 0, *params)
    except NumbaError as error:
        raise TypeError(f"score: {where(function)} cannot be compiled: {error}") from error
    if not isinstance(result, kind):
        raise TypeError(f"score: {where(function)} must return {what}, got {result!r}")
