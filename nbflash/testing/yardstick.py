"""Attention done plainly in the inputs' dtype: what the errors of implementations are held to."""

import numpy as np

from nbflash import reference


def low_precision(q, k, v, mask=None, scale=None, score=None, dropout=0.0, seed=(0, 0)):
    """Dense masked softmax as an eager framework does it in the inputs' own dtype: the yardstick.

    float16 and bfloat16 products accumulate in float32 and S, P and O are rounded to the dtype;
    float32 and float64 work in their own precision throughout. Sums over a sequence take one term
    after the other, from the last key to the first: their error grows with the length as that of
    every online softmax does, on any BLAS, and float64 too is rounded independently of the
    reference. Every score is moved by 0.2 √head_dim units in its last place, up and down in turn:
    what a random walk of roundings makes of its own sum, in whatever order; behind each function of
    ``score`` by two more, the way that the function took the moves before. NaN and Inf count as 0:
    they may stand only where nothing attends.

    Returns
    -------
    out : (batch, nq, heads, head_dim), dtype of q
    lse : (batch, heads, nq), natural logarithm, float64 for float64 and else float32
    """
    work, rounded = _precision(q)
    q, k, v, keep = _yardstick_inputs(q, k, v, mask, work)
    p, lse, _ = _low_softmax(q, k, keep, scale, rounded, score)
    factors = reference.drop_factors(p.shape, dropout, seed)[..., ::-1]
    p = rounded(p * factors.astype(work))
    return rounded(_in_order(p, v), keep_dtype=True).transpose(0, 2, 1, 3), lse.astype(work)


def low_precision_backward(
    dout, q, k, v, mask=None, scale=None, dlse=None, score=None, dropout=0.0, seed=(0, 0)
):
    """Gradients by the dense equations in the inputs' own dtype; see `low_precision`.

    delta = rowsum(dO ∘ O), over O as it is stored, is moved away from rowsum(P ∘ dP) by one
    rounding of ``rowsum |dO ∘ O|``: however the two are summed, they differ by about as much. Where
    a row attends a single key, dP - delta is nothing but that rounding. ``dlse``, ``score``,
    ``dropout`` and ``seed`` are as in `reference.attention_backward`, and ``dlse`` is finite.

    Returns
    -------
    dq : (batch, nq, heads, head_dim), dtype of q
    dk, dv : (batch, nk, heads_kv, head_dim), dtype of q
    """
    heads_kv, scale_ = np.shape(k)[2], np.shape(q)[-1] ** -0.5 if scale is None else scale
    work, rounded = _precision(q)
    dout, q, k, dropped, ds, slope = _low_gradient(
        dout, q, k, v, mask, scale, dlse, score, dropout, seed
    )
    ds = rounded(ds * (slope * work(scale_)))
    dq = _in_order(ds, k)
    dk = reference._group_sum(_in_order(ds.swapaxes(-1, -2), q), heads_kv)[:, :, ::-1]
    dv = reference._group_sum(_in_order(dropped.swapaxes(-1, -2), dout), heads_kv)[:, :, ::-1]
    return tuple(rounded(x, keep_dtype=True).transpose(0, 2, 1, 3) for x in (dq, dk, dv))


def low_score_gradient(dout, q, k, v, mask, scale, dlse, score, dropout=0.0, seed=(0, 0)):
    """The scores before ``score``, the gradient of those after it and the attended pairs.

    As in `low_precision_backward`, in the working precision, (batch, heads, nq, nk).
    """
    _, rounded = _precision(q)
    _, _, _, _, ds, _ = _low_gradient(dout, q, k, v, mask, scale, dlse, score, dropout, seed)
    q, k, _, keep = _yardstick_inputs(q, k, v, mask, ds.dtype.type)
    return _low_scores(q, k, scale, rounded)[..., ::-1], ds[..., ::-1], keep[..., ::-1]


def _low_gradient(dout, q, k, v, mask, scale, dlse, score, dropout, seed):
    """dO, Q, K, P ∘ Z, dS' and the slope of ``score``; keys from the last to the first."""
    work, rounded = _precision(q)
    dout = np.nan_to_num(np.asarray(dout, work).transpose(0, 2, 1, 3), posinf=0, neginf=0)
    q, k, v, keep = _yardstick_inputs(q, k, v, mask, work)
    p, _, slope = _low_softmax(q, k, keep, scale, rounded, score)
    factors = reference.drop_factors(p.shape, dropout, seed)[..., ::-1].astype(work)
    dropped, dp = rounded(p * factors), rounded(dout @ v.swapaxes(-1, -2) * factors)
    terms = dout * rounded(dropped @ v)
    delta = np.sum(terms, axis=-1, keepdims=True)
    rounding = np.finfo(work).eps * np.sum(np.abs(terms), axis=-1, keepdims=True)
    delta += np.copysign(rounding, delta - np.sum(p * dp, axis=-1, keepdims=True))
    if dlse is not None:
        delta = delta - np.asarray(dlse, work)[..., None]
    return dout, q, k, dropped, rounded(p * (dp - delta)), slope


def _precision(q):
    """Working dtype of the yardstick and the rounding that it applies to intermediates."""
    dtype = np.asarray(q).dtype
    work = np.float32 if dtype.itemsize < 4 else dtype.type

    def rounded(x, keep_dtype=False):
        with np.errstate(over="ignore"):
            return x.astype(dtype) if keep_dtype else x.astype(dtype).astype(work)

    return work, rounded


def _in_order(a, b):
    """``a @ b``, one term of every sum after the other."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., i, None] * b[..., None, i, :]
    return total


def _yardstick_inputs(q, k, v, mask, work):
    """Working copies (batch, heads, n, head_dim) with the keys reversed, and the attended pairs."""
    heads = np.shape(q)[2]
    q, k, v = (np.asarray(x, work).transpose(0, 2, 1, 3) for x in (q, k, v))
    q, k, v = (np.nan_to_num(x, nan=0, posinf=0, neginf=0) for x in (q, k, v))
    k, v = (np.repeat(x, heads // x.shape[1], axis=1)[:, :, ::-1] for x in (k, v))
    keep = reference._attended(mask, (*q.shape[:3], k.shape[2]))
    return q, k, v, keep[..., ::-1]


def _signs(s):
    """Plus and minus in turn: which way a score is moved."""
    return 1 - 2 * ((np.arange(s.shape[-2])[:, None] + np.arange(s.shape[-1])) % 2)


def _low_scores(q, k, scale, rounded):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = rounded(rounded(q @ k.swapaxes(-1, -2)) * q.dtype.type(scale))
    units = _signs(s) * max(1, round(0.2 * q.shape[-1] ** 0.5))
    return s + units.astype(s.dtype) * np.spacing(abs(s))


def _low_softmax(q, k, keep, scale, rounded, score=None):
    s = _low_scores(q, k, scale, rounded)
    slope = s.dtype.type(1)
    if score is not None:  # of the keys in their own order
        work, signs = s.dtype, _signs(s)[..., ::-1].astype(s.dtype)

        def moved(s, slope):
            """Each of the functions is two operations or more, and each of those rounds."""
            s = rounded(s.astype(work))
            away = 2 * np.copysign(signs, signs * slope).astype(work)
            return (s + away * np.spacing(abs(s))).astype(np.float64)

        s, keep_ = s[..., ::-1].astype(np.float64), keep[..., ::-1]
        s, slope = reference.scored(s, keep_, score, rounded=moved)
        s, slope = s.astype(work)[..., ::-1], rounded(slope.astype(work))[..., ::-1]
    s = np.where(keep, s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isneginf(m), 0, m)
    p = np.exp(s - m)
    total = np.sum(p, axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = m + np.log(total)
    return rounded(p / np.where(total == 0, 1, total)), lse[..., 0], slope
