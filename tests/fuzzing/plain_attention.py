"""Attention, row by row in float64 from its formula, with every option and all gradients.

Nothing of nbflash is used. A row takes the keys that it attends and no others, so that what is
hidden cannot reach it. With s = scale · q kᵀ, s' what the score makes of it, z the factors of
dropout and δ = Σ p z dp:

    p = exp(s') / Σ exp(s')      lse = log Σ exp(s')      out = Σ p z v
    ds' = p (z dp − δ + dlse),  dp = v · dout             ds = ds' ∂s'/∂s
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Stage:
    """One function of a score, on arrays: s of the attended keys, then b, h, i and the keys j.

    ``array`` is what has a gradient; ``part`` returns its index for each key and ∂s'/∂element.
    """

    value: object
    slope: object
    array: np.ndarray | None = field(default=None, repr=False)
    part: object = None


@dataclass
class Results:
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    arrays: list
    sink: np.ndarray


def attention(
    q,
    k,
    v,
    keep,
    scale=None,
    stages=(),
    factors=None,
    dout=None,
    dlse=None,
    sink=None,
    rounding=0.0,
):
    """`Results` of arrays in the public layout, ``keep`` (batch, heads, nq, nk) bool.

    Parameters
    ----------
    stages : sequence of Stage
    factors : array like keep, optional
        0 where dropout drops, 1 / (1 − probability) elsewhere.
    dout, dlse : array, optional
        Zero when omitted.
    sink : array (heads,), optional
        The score of one more key, whose value is 0.
    rounding : float
        By how much of themselves the scores of which gradients make p anew are off, at random:
        what `nbflash.attention_backward` says of its own.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, nq, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = head_dim**-0.5 if scale is None else float(scale)
    dout = np.zeros(q.shape) if dout is None else np.asarray(dout, np.float64)
    dlse = np.zeros((batch, heads, nq)) if dlse is None else np.asarray(dlse, np.float64)
    rng, tiny = np.random.default_rng(0), np.finfo(float).tiny
    sink = np.full(heads, -np.inf) if sink is None else np.asarray(sink, np.float64)
    found = Results(
        *(np.zeros(q.shape), np.full((batch, heads, nq), -np.inf)),
        *map(np.zeros, (q.shape, k.shape, k.shape)),
        [np.zeros(stage.array.shape) for stage in stages if stage.array is not None],
        np.zeros(heads),
    )
    for b, h, i in np.ndindex(batch, heads, nq):
        keys, g = np.flatnonzero(keep[b, h, i]), h // group
        row, key, value = q[b, i, h], k[b, keys, g], v[b, keys, g]
        p, lse, trail = softmax(scale * (key @ row), stages, b, h, i, keys, sink=sink[h])
        if lse == -np.inf:
            continue
        z = np.ones(keys.size) if factors is None else factors[b, h, i, keys]
        found.lse[b, h, i] = lse
        found.out[b, i, h] = (p * z) @ value
        off = rounding * np.maximum(abs(lse), abs(lse + np.log(np.maximum(p, tiny))))
        p = p * np.exp(rng.choice([-1, 1], p.size) * off)
        dp = z * (value @ dout[b, i, h])
        further = dlse[b, h, i] - p @ dp
        found.sink[h] += np.exp(sink[h] - lse) * further
        ds = p * (dp + further)
        ds = _through_stages(ds, trail, found.arrays, (b, h, i, keys))
        found.dq[b, i, h] = scale * (ds @ key)
        found.dk[b, keys, g] += scale * np.outer(ds, row)
        found.dv[b, keys, g] += np.outer(p * z, dout[b, i, h])
    return found


def softmax(s, stages, *place, sink=-np.inf):
    """Weights of the attended keys, the log-sum-exp, and each stage with the s that it got."""
    trail = []
    for stage in stages:
        trail.append((stage, s))
        s = stage.value(s, *place)
    top = np.max(s, initial=sink)
    if top == -np.inf:
        return np.zeros(s.size), -np.inf, trail
    e, of_sink = np.exp(s - top), np.exp(sink - top)
    total = e.sum() + of_sink
    return e / total, top + np.log(total), trail


def _through_stages(ds, trail, arrays, place):
    """The gradient of what the first stage got; what arrays get is added to theirs."""
    at = len(arrays)
    for stage, s in reversed(trail):
        if stage.array is not None:
            at -= 1
            index, factor = stage.part(s, *place)
            np.add.at(arrays[at], index, ds * factor)
        ds = ds * stage.slope(s, *place)
    return ds


def merged(parts, real=np.float64):
    """``(out, lse)`` over the keys of all parts, of ``(out, lse)`` over those of each."""
    outs, sums = (np.stack([np.asarray(x, real) for x in xs]) for xs in zip(*parts, strict=True))
    top = sums.max(axis=0)
    with np.errstate(divide="ignore"):
        weights = np.exp(sums - np.where(top == -np.inf, 0, top))
        lse = top + np.log(np.maximum(weights.sum(axis=0), np.finfo(real).tiny))
    rows = (weights / np.where(top == -np.inf, 1, weights.sum(axis=0))).swapaxes(2, 3)[..., None]
    return (np.where(rows > 0, outs, 0) * rows).sum(axis=0), np.where(top == -np.inf, top, lse)
