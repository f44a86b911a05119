"""Dense masked softmax attention in float64: the specification every implementation is held to.

    S = scale · Q Kᵀ      P = softmax(S over the attended keys)      O = P V      LSE = log Σ exp(S)

Plain NumPy over the whole score matrix, O(N²) memory. Three rules settle the corners:

* A row of total weight zero (it attends nothing) has ``out = 0``, ``lse = -inf`` and zero
  gradients.
* What the mask leaves out contributes nothing, NaN and Inf included.
* What the mask keeps takes part honestly: a NaN that is attended reaches the result. Where its
  weight underflows to 0 it does here, elsewhere it may not.
"""

import numpy as np

from nbflash.definitions import philox
from nbflash.definitions.score_chain import chain
from nbflash.inputs.score_functions import where


def attention(q, k, v, mask=None, scale=None, score=None, dropout=0.0, seed=(0, 0)):
    """Attention forward in float64.

    Parameters
    ----------
    q : array (batch, nq, heads, head_dim)
    k, v : array (batch, nk, heads_kv, head_dim)
        Query head ``h`` reads key/value head ``h // (heads // heads_kv)``.
    mask : Mask, bool array broadcastable to (batch, heads, nq, nk), or None
        True where query ``i`` attends key ``j``; None attends everywhere.
    scale : float, optional
        Default ``head_dim**-0.5``.
    score : scores.Score, optional
        ``S = score(scale · Q Kᵀ)``.
    dropout : float
        Probability that an element of P becomes 0, rounded as `philox.factor` has it; the others
        are divided by 1 minus it. Whether NaN shows where it is dropped is not defined.
    seed : (int, int)
        Seed and offset of the random numbers.

    Returns
    -------
    out : float64 (batch, nq, heads, head_dim)
    lse : float64 (batch, heads, nq), natural logarithm
    """
    q, k, v = _heads_first(q, k, v)
    keep, p, lse, _ = _softmax(q, k, mask, scale, score)
    out = _product(p * drop_factors(p.shape, dropout, seed), keep, v)
    return out.transpose(0, 2, 1, 3), lse


def attention_backward(
    dout, q, k, v, mask=None, scale=None, dlse=None, score=None, dropout=0.0, seed=(0, 0)
):
    """Gradients of attention in float64 (FlashAttention, appendix B.2).

    Parameters
    ----------
    dout : array (batch, nq, heads, head_dim), gradient of the output
    q, k, v, mask, scale, score, dropout, seed
        As in `attention`.
    dlse : array (batch, heads, nq), optional
        Gradient of the log-sum-exp; default zero. Ignored where a row attends nothing.

    Returns
    -------
    dq : float64 (batch, nq, heads, head_dim)
    dk, dv : float64 (batch, nk, heads_kv, head_dim), summed over the query heads that share them
    """
    heads_kv = np.shape(k)[2]
    dout, q, k, v = _heads_first(dout, q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep, p, lse, slope = _softmax(q, k, mask, scale, score, with_slope=True)
    factors = drop_factors(p.shape, dropout, seed)
    ds = _score_gradient(dout, v, keep, p, lse, dlse, factors)
    with np.errstate(invalid="ignore"):
        ds = np.where(keep, ds * slope, 0.0) * scale
    keep_t, ds_t, p_t = (x.swapaxes(-1, -2) for x in (keep, ds, p * factors))
    dq = _product(ds, keep, k)
    dk = _group_sum(_product(ds_t, keep_t, q), heads_kv)
    dv = _group_sum(_product(p_t, keep_t, dout), heads_kv)
    return tuple(x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))


def score_backward(
    dout, q, k, v, mask=None, scale=None, dlse=None, *, score, dropout=0.0, seed=(0, 0)
):
    """Gradients of attention with respect to the arrays of ``score``, in float64.

    Parameters
    ----------
    dout, q, k, v, mask, scale, dlse, score, dropout, seed
        As in `attention_backward`.

    Returns
    -------
    tuple of float64 arrays, like those of ``score``
    """
    how = {"score": score, "dropout": dropout, "seed": seed}
    return score_sums(*score_gradient(dout, q, k, v, mask, scale, dlse, **how), score)


def score_gradient(
    dout, q, k, v, mask=None, scale=None, dlse=None, *, score, dropout=0.0, seed=(0, 0)
):
    """S before ``score``, dS' of what it makes of them, and the attended pairs, in float64.

    Parameters
    ----------
    dout, q, k, v, mask, scale, dlse, score, dropout, seed
        As in `attention_backward`.

    Returns
    -------
    s, ds : array (batch, heads, nq, nk)
    keep : bool array, of the same shape
    """
    dout, q, k, v = _heads_first(dout, q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep, p, lse, _ = _softmax(q, k, mask, scale, score)
    ds = _score_gradient(dout, v, keep, p, lse, dlse, drop_factors(p.shape, dropout, seed))
    with np.errstate(invalid="ignore"):
        return scale * (q @ k.swapaxes(-1, -2)), ds, keep


def score_sums(s, ds, keep, score):
    """Sums of dS', that of the last function's scores, for every array; S is before the first."""
    given, sums = ds[keep], []
    parts = (part for parts in score.parts for part in parts)
    for part, (shape, index, factor) in zip(parts, score_terms(s, keep, score), strict=True):
        total = np.zeros(shape, ds.dtype)
        try:
            np.add.at(total, index, given * factor.astype(ds.dtype))
        except IndexError as error:
            wrong = f"a wrong index, returned by {where(part.function)} for shape {shape}"
            raise IndexError(f"score: {wrong}: {error}") from error
        sums.append(total)
    return tuple(sums)


def score_terms(s, keep, score):
    """Where dS' of the attended pairs, in their order, goes and what it is multiplied with.

    Parameters
    ----------
    s : array (batch, heads, nq, nk)
        Before the first function.
    keep : bool array, of the same shape
    score : scores.Score

    Returns
    -------
    list of (shape, index, factor)
        For every array; ``index`` is a tuple with an array for each of its axes.
    """
    stages = zip(score.stages(*s.shape[2:]), score.parts, strict=True)
    stages = [(fn, grad, params, parts) for (fn, grad, params), parts in stages]
    functions = [
        (_checked(fn), _checked(grad), list(map(_checked_part, parts)))
        for fn, grad, _, parts in stages
    ]
    run, params = (
        chain(functions, lambda fn: fn, float),
        [_wide(given) for _, _, given, _ in stages],
    )
    at = np.nonzero(keep)
    places = zip(s[at].tolist(), *(i.tolist() for i in at), strict=True)
    pairs = [run(x, *place, params)[2] for x, *place in places]
    terms = []
    for i, shape in enumerate(part.shape for *_, parts in stages for part in parts):
        index = np.array([pair[i][0] for pair in pairs] or np.zeros(0, np.int64))
        factor = np.array([pair[i][1] for pair in pairs], np.float64)
        terms.append((shape, tuple(index.reshape(-1, len(shape)).T), factor))
    return terms


def _score_gradient(dout, v, keep, p, lse, dlse, factors):
    """dS' = P ∘ (dP ∘ Z − (δ − dLSE)), 0 where nothing is attended."""
    with np.errstate(invalid="ignore"):
        dp = np.where(keep, dout @ v.swapaxes(-1, -2), 0.0) * factors
        delta = np.sum(p * dp, axis=-1, keepdims=True)  # = rowsum(dO ∘ O), equation 4
        if dlse is not None:
            # ∂LSE/∂S = P: dS = P ∘ (dP − δ) + P ∘ dLSE
            delta = delta - np.where(np.isneginf(lse), 0.0, dlse)[..., None]
        return np.where(keep, p * (dp - delta), 0.0)


def merge(parts):
    """Attention over all keys from attention over disjoint sets of them.

        LSE = log Σ exp(LSE_p)      O = Σ w_p O_p      w_p = exp(LSE_p − LSE)

    Parameters
    ----------
    parts : sequence of (out, lse)
        As `attention` returns them.

    Returns
    -------
    out : float64 (batch, nq, heads, head_dim)
    lse : float64 (batch, heads, nq)
    """
    outs, lses = zip(*parts, strict=True)
    weights, lse = _merge_weights(lses)
    return sum(w * out for w, out in zip(weights, outs, strict=True)), lse


def merge_backward(dout, dlse, parts):
    """Gradients of `merge` with respect to its parts.

        dO_p = w_p dO      dLSE_p = w_p (dLSE + rowsum(dO ∘ (O_p − O)))

    Parameters
    ----------
    dout : array (batch, nq, heads, head_dim)
    dlse : array (batch, heads, nq)
    parts : sequence of (out, lse)
        As given to `merge`.

    Returns
    -------
    list of (dout, dlse), float64, one for each part
    """
    dout, dlse = np.asarray(dout, np.float64), np.asarray(dlse, np.float64)
    whole, _ = merge(parts)
    gradients = []
    for (out, _), w in zip(parts, _merge_weights([lse for _, lse in parts])[0], strict=True):
        towards = np.sum(dout * (out - whole), axis=-1).swapaxes(1, 2)
        gradients.append((w * dout, w[..., 0].swapaxes(1, 2) * (dlse + towards)))
    return gradients


def _merge_weights(lses):
    """w_p (batch, nq, heads, 1), 0 where a part attends nothing, and the LSE of all parts."""
    lses = [np.asarray(lse, np.float64) for lse in lses]
    lse = np.logaddexp.reduce(lses)
    empty = np.isneginf(lse)
    weights = [np.exp(x - np.where(empty, 0.0, lse)) for x in lses]
    total = np.where(empty, 1.0, sum(weights))  # all carry the rounding of lse: it cancels
    return [(w / total).swapaxes(1, 2)[..., None] for w in weights], lse


def _heads_first(*arrays):
    """To float64 (batch, heads, n, head_dim), key/value heads repeated to match the first."""
    heads = np.shape(arrays[0])[2]
    arrays = [np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in arrays]
    return [np.repeat(x, heads // x.shape[1], axis=1) for x in arrays]


def _attended(mask, shape):
    """A Mask, a bool array or None as a bool array of ``shape``."""
    keep = True if mask is None else mask.dense() if hasattr(mask, "dense") else mask
    return np.broadcast_to(keep, shape)


def _softmax(q, k, mask, scale, score=None, with_slope=False):
    """Attended pairs, probabilities (batch, heads, nq, nk), LSE (batch, heads, nq), ∂S/∂(Q Kᵀ)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep = _attended(mask, (*q.shape[:3], k.shape[2]))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        s, slope = scale * (q @ k.swapaxes(-1, -2)), 1.0
        if score is not None:
            s, slope = scored(s, keep, score, with_slope)
        s = np.where(keep, s, -np.inf)
        m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
        m = np.where(np.isneginf(m), 0.0, m)
        p = np.exp(s - m)
        total = np.sum(p, axis=-1, keepdims=True)
        lse = m + np.log(total)
        p = np.where(keep & (total != 0.0), p / total, 0.0)
    return keep, p, lse[..., 0], slope


def scored(s, keep, score, with_slope=True, rounded=None):
    """The scores that are kept after every function of ``score``, and the product of its slopes.

    ``rounded(s, slope)``, if given, is what becomes of the scores after each function; ``slope`` is
    the product so far.
    """
    at, slope = np.nonzero(keep), np.ones(s.shape)
    s = s.copy()
    for fn, grad, params in score.stages(*s.shape[2:]):
        wide = _wide(params)

        def each(function, s=s, params=wide):
            places = zip(s[at].tolist(), *(x.tolist() for x in at), strict=True)
            return np.array([function(*place, *params) for place in places], np.float64)

        if with_slope:
            slope[at] *= each(_checked(grad))
        s[at] = each(_checked(fn))
        s = rounded(s, slope) if rounded else s
    return s, slope


def _wide(params):
    """Numbers as Python's, arrays of float64 or int64: what is computed of them does not wrap."""
    kinds = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}
    return [x.astype(kinds[x.dtype.kind], copy=False) if x.ndim else x.item() for x in params]


_NUMBERS = int, float, np.integer, np.floating, np.bool_


def _checked(function, kinds=_NUMBERS, is_right=None, what="a number"):
    """A function of a score, whose mistakes are told with its file and line."""

    def call(*given):
        try:
            result = function(*given)
        except (AttributeError, NameError, TypeError) as error:
            raise TypeError(f"score: {where(function)} cannot be computed: {error}") from error
        except Exception as error:
            error.add_note(f"score: {where(function)}")
            raise
        if not isinstance(result, kinds) or (is_right and not is_right(result)):
            raise TypeError(f"score: {where(function)} must return {what}, got {result!r}")
        return result

    return call


def _checked_part(part):
    """The function of a part, which returns an index with a number for each axis, and a factor."""
    axes = len(part.shape)
    what = f"an index of {axes} and a number" if axes > 1 else "an index and a number"

    def is_pair(x):
        return len(x) == 2 and _axes_of(x[0]) == axes

    return _checked(part.function, tuple, is_pair, what)


def _axes_of(index):
    if isinstance(index, int):
        return 1
    return len(index) if isinstance(index, tuple) else np.size(index)


def drop_factors(shape, dropout, seed):
    """1 / (1 − dropout) where an element of P (batch, heads, nq, nk) is kept, else 0."""
    if not dropout:
        return np.ones(shape)
    return philox.kept(shape, dropout, seed) * philox.factor(dropout)


def _product(weight, keep, x):
    """``weight @ x`` over the kept pairs alone: weight is 0 elsewhere, but 0 · NaN is not."""
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        y = weight @ np.where(finite, x, 0.0)
        for j in np.unique(np.nonzero(~finite)[2]):
            term = weight[..., j, None] * np.where(finite, 0.0, x)[..., None, j, :]
            y = y + np.where(keep[..., j, None], term, 0.0)
    return y


def _group_sum(x, heads_kv):
    """Sum a (batch, heads, n, head_dim) gradient over the query heads of each key/value head."""
    batch, heads, n, head_dim = x.shape
    return x.reshape(batch, heads_kv, heads // heads_kv, n, head_dim).sum(axis=2)
