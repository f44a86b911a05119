"""Strategies of score functions: each beside what it does, in NumPy."""

import functools
from dataclasses import dataclass

import numpy as np
from fuzzing.examples import SEED, Brief
from fuzzing.plain_attention import Stage
from hypothesis import strategies as st

from nbflash import scores


@dataclass(frozen=True)
class DrawnScore(Brief):
    """``build(library, array)`` makes it: of `nbflash.scores` or of `nbflash.torch.scores`.

    ``array`` is called with each array that has a gradient, in the order of the stages.
    """

    build: object
    stages: tuple
    text: str

    def __repr__(self):
        return self.text

    @functools.cached_property
    def score(self):
        return self.build(scores, lambda x: x)


NONE = DrawnScore(lambda library, array: None, (), "no score")


def _one(s, b, h, i, j):
    return np.ones(s.size)


def softcap(cap):
    stage = Stage(
        lambda s, b, h, i, j: cap * np.tanh(s / cap),
        lambda s, b, h, i, j: 1 - np.tanh(s / cap) ** 2,
    )
    return DrawnScore(lambda library, array: library.softcap(cap), (stage,), f"softcap({cap})")


def alibi(slopes, shift):
    """``shift`` is nk − nq."""
    own = np.atleast_1d(np.asarray(slopes, np.float64))
    of = lambda h: h if own.size > 1 else 0
    stage = Stage(
        lambda s, b, h, i, j: s - own[of(h)] * abs(i + shift - j),
        _one,
        own if np.ndim(slopes) else None,
        lambda s, b, h, i, j: ((np.full(j.size, of(h)),), -1.0 * abs(i + shift - j)),
    )
    build = lambda library, array: library.alibi(array(own) if np.ndim(slopes) else slopes)
    return DrawnScore(build, (stage,), f"alibi({slopes})")


def relative(table, shift):
    reach = table.shape[1] // 2
    column = lambda i, j: np.clip(j - i - shift + reach, 0, 2 * reach)
    stage = Stage(
        lambda s, b, h, i, j: s + table[h, column(i, j)],
        _one,
        table,
        lambda s, b, h, i, j: ((np.full(j.size, h), column(i, j)), np.ones(j.size)),
    )
    build = lambda library, array: library.relative(array(table))
    return DrawnScore(build, (stage,), f"relative of {table.shape}")


def bias(array):
    whole = array.reshape((1,) * (4 - array.ndim) + array.shape)

    def at(b, h, i, j):
        places = zip(np.broadcast_arrays(b, h, i, j), whole.shape, strict=True)
        return tuple(x if n > 1 else np.zeros_like(x) for x, n in places)

    stage = Stage(
        lambda s, b, h, i, j: s + whole[at(b, h, i, j)],
        _one,
        array,
        lambda s, b, h, i, j: (at(b, h, i, j)[4 - array.ndim :], np.ones(j.size)),
    )
    build = lambda library, given: library.bias(given(array))
    return DrawnScore(build, (stage,), f"bias of {array.shape}")


def _bent(s, b, h, q_idx, kv_idx, weight, by_head):
    return by_head[h] * s + weight * (q_idx - kv_idx) / (1 + b) if q_idx % 3 else s


def _bent_slope(s, b, h, q_idx, kv_idx, weight, by_head):
    return by_head[h] if q_idx % 3 else 1.0


def _bent_part(s, b, h, q_idx, kv_idx, weight, by_head):
    return h, s if q_idx % 3 else 0.0


def bent(weight, by_head):
    """Another function for two rows of three."""
    stage = Stage(
        lambda s, b, h, i, j: by_head[h] * s + weight * (i - j) / (1 + b) if i % 3 else s,
        lambda s, b, h, i, j: np.full(s.size, by_head[h] if i % 3 else 1.0),
        by_head,
        lambda s, b, h, i, j: ((np.full(j.size, h),), s * bool(i % 3)),
    )

    def build(library, array):
        params, parts = (weight, array(by_head)), (None, _bent_part)
        return library.custom(_bent, _bent_slope, params=params, param_grads=parts)

    return DrawnScore(build, (stage,), f"bent({weight})")


def composed(*drawn):
    stages = sum((x.stages for x in drawn), ())
    build = lambda library, array: library.compose(*(x.build(library, array) for x in drawn))
    return DrawnScore(build, stages, f"compose({', '.join(x.text for x in drawn)})")


# Each is compiled, and for float64 once more. CI, whose caches are cold, has those of other tests.
COMMON = "none", "softcap", "alibi", "bias"
CHAINS = "none", *COMMON, "slope", "relative", "bent", "chain"


def chains(dtype):
    """Names of the functions for arrays of a dtype."""
    if SEED is not None:
        return CHAINS
    return ("none",) if dtype == np.float64 else COMMON


@st.composite
def drawn_scores(draw, batch, heads, nq, nk, dtype):
    """One of few chains of functions, with any parameters."""
    rng, shift = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), nk - nq
    cap, size = draw(st.floats(0.5, 30)), draw(st.floats(0.1, 3))
    normal = lambda *shape: (size * rng.standard_normal(shape)).astype(np.float32).astype(float)
    axes = [n if draw(st.booleans()) else 1 for n in (batch, heads, nq, nk)]
    kind = draw(st.sampled_from(chains(dtype)))
    reach, fewer = draw(st.integers(0, 6)), draw(st.integers(0, 2))
    return {
        "none": lambda: NONE,
        "softcap": lambda: softcap(cap),
        "alibi": lambda: alibi(normal(heads), shift),
        "slope": lambda: alibi(float(normal(1)[0]), shift),
        "relative": lambda: relative(normal(heads, 2 * reach + 1), shift),
        "bias": lambda: bias(normal(*axes[fewer:])),
        "bent": lambda: bent(float(normal(1)[0]), normal(heads)),
        "chain": lambda: composed(
            bias(normal(*axes)), softcap(cap), alibi(normal(heads), shift), softcap(cap)
        ),
    }[kind]()
