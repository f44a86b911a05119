"""A drawn call of attention, run by any implementation, against the plain definition."""

import dataclasses
import functools
import types

import merged_parts
import numpy as np
import poisoned_rows
import score_gradients
from fuzzing import budgets, plain_attention
from fuzzing.drawn_problems import factors_of

import nbflash
from nbflash import testing


def exact_of(call, sink=None, rounding=0.0):
    """`plain_attention.Results` of a call."""
    how = {"stages": call.drawn.stages, "factors": factors_of(call)}
    how |= {"sink": sink, "rounding": rounding}
    how |= {"dout": call.dout, "dlse": call.dlse, "scale": call.options.get("scale")}
    return plain_attention.attention(*call.arrays, call.keep, **how)


def _how(call):
    """What the plain low-precision runs take in the place of the options."""
    how = {x: call.options[x] for x in ("scale", "score", "dropout") if x in call.options}
    return how | ({"seed": words_of(call)} if "seed" in call.options else {})


def words_of(call):
    """Seed and offset, of any form."""
    seed = call.options["seed"]
    words = seed.view(np.uint64) if isinstance(seed, np.ndarray) else seed
    return tuple(map(int, words)) if np.ndim(words) else (int(words), 0)


def finite(call):
    """With 0 for what is NaN or infinite."""
    arrays = {x: _finite(getattr(call, x)) for x in ("q", "k", "v", "dout")}
    return dataclasses.replace(call, **arrays)


def _reordered(rng, call):
    """Arrays and attended pairs with the keys in another order, and where those were.

    Scores and dropout know their places: where there are any, dimensions change places instead.
    """
    if call.drawn.score is not None or "dropout" in call.options:
        order = rng.permutation(call.q.shape[-1])
        q, k = call.q[..., order], call.k[..., order]
        return (call.dout, q, k, call.v), call.keep, order
    order = rng.permutation(2 * call.k.shape[1])
    wide = [
        np.concatenate([x, np.zeros_like(x)], axis).take(order, axis)
        for x, axis in ((call.k, 1), (call.v, 1), (call.keep, 3))
    ]
    return (call.dout, call.q, *wide[:2]), wide[2], order


def _in_place(call, order, dq, dk, dv):
    back = np.argsort(order)
    if call.drawn.score is not None or "dropout" in call.options:
        return dq[..., back], dk[..., back], dv
    n = call.k.shape[1]
    return dq, dk[:, back[:n]], dv[:, back[:n]]


def _plain(call, given, keep):
    """out, lse, dq, dk and dv of one plain run, in the precision of the arrays."""
    how = _how(call)
    dlse = None if call.dlse is None else np.where(call.keep.any(axis=3), call.dlse, 0)
    forward = testing.low_precision(*given[1:], keep, **how)
    return *forward, *testing.low_precision_backward(*given, keep, dlse=dlse, **how)


def low_of(call, exact):
    """Of every result the plain runs in the arrays' own precision."""
    draws, rng, given = [], np.random.default_rng(0), (call.dout, *call.arrays)
    for run in range(budgets.runs_for(call.q[..., 0].size)):
        if not run:
            draws.append(_plain(call, given, call.keep))
            continue
        arrays, keep, order = _reordered(rng, call)
        out, lse, *gradients = _plain(call, arrays, keep)
        draws.append((out, lse, *_in_place(call, order, *gradients)))
    pair = [_plain(call, [x.astype(real) for x in given], call.keep) for real in budgets.PRECISIONS]
    for name, *values in zip(poisoned_rows.NAMES, *pair, strict=True):
        budgets.check_yardstick(name, getattr(exact, name), *values)
    return list(zip(*draws, strict=True))


def rounded_of(call, sink=None):
    """The exact results, but of gradients those of scores that are rounded once more."""
    wide = np.float64 if call.q.dtype == np.float64 else np.float32
    return exact_of(call, sink, float(np.finfo(wide).eps))


def low_with_sink(call, sink):
    """Of out, lse, dq, dk, dv and dsink the plain runs of a call with a sink."""
    draws, rng, scale = [], np.random.default_rng(0), call.options.get("scale")
    scale, n = call.q.shape[-1] ** -0.5 if scale is None else scale, 2 * call.k.shape[1]
    for _ in range(budgets.runs_for(call.q[..., 0].size)):
        (dout, *arrays), keep, order = _reordered(rng, call)
        given = [_finite(x) for x in (*arrays, dout)]
        mask = types.SimpleNamespace(dense=functools.partial(np.asarray, keep))
        wide = merged_parts._with_column(*given, mask, sink, scale)
        _, low = merged_parts._expected(*wide, scale, call.dlse)
        out, lse, *gradients, dsink = merged_parts._without_column(low, (n, call.k.shape[2]), scale)
        draws.append((out, lse, *_in_place(call, order, *gradients), dsink))
    return list(zip(*draws, strict=True))


def run(call, **more):
    """out, lse, dq, dk and dv of the public functions, and the gradients of the score's arrays."""
    how = call.options | more
    forward = {x: y for x, y in how.items() if x != "deterministic"}
    out, lse = nbflash.attention(*call.arrays, call.mask, return_lse=True, **forward)
    given = call.dout, *call.arrays, out, lse, call.mask
    gradients = nbflash.attention_backward(*given, dlse=call.dlse, **how)
    arrays = []
    if any(stage.array is not None for stage in call.drawn.stages):
        arrays = nbflash.score_backward(*given, dlse=call.dlse, **forward)
    return [out, lse, *gradients], arrays


def check(call, run=run):
    """Hold every result of a call to its budget; ``run`` may have no gradients of arrays: None."""
    exact, rounded, (got, arrays) = exact_of(call), rounded_of(call), run(call)
    for name, factor, x, low in zip(
        poisoned_rows.NAMES, poisoned_rows.FACTORS, got, low_of(call, exact), strict=True
    ):
        assert x.dtype == low[0].dtype, name
        draws = *low, getattr(rounded, name)
        budgets.check(name, x, getattr(exact, name), draws, factor)
    assert arrays is None or len(arrays) == len(exact.arrays)
    if arrays:
        given, how = [_finite(x) for x in (*call.arrays, call.dout)], _how(call)
        wide, low = score_gradients.expected(given, call.keep, dlse=call.dlse, **how)
        for i, (x, want, plain) in enumerate(zip(arrays, exact.arrays, low, strict=True)):
            plain = plain.reshape(want.shape)
            budgets.check_yardstick(f"array {i}", want, plain, wide[i].reshape(want.shape))
            draws = plain, rounded.arrays[i]
            budgets.check(f"array {i}", x, want, draws, score_gradients.FACTOR)
    return got


def _finite(x):
    return np.nan_to_num(x.astype(np.float64), posinf=0, neginf=0).astype(x.dtype)
