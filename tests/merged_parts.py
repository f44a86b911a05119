"""Attention over parts of the keys, merged by their LSE and differentiated through both results.

Every tier holds its implementations to it: out and lse of a part get gradients of their own, and
what comes of them for all parts together must be the gradients of the whole attention.
"""

import numpy as np

import masks
import nbflash
from nbflash import reference, testing

# A gradient goes through one more product and one more rounded operand than the output.
FACTOR = 3.0
FACTORS = {"out": 2.0, "lse": 2.0, "dq": FACTOR, "dk": FACTOR, "dv": FACTOR, "dsink": FACTOR}


def parts_of(mask, cut):
    """The mask for the keys before ``cut`` and for those from there on."""
    before = masks.from_function(lambda q, kv: (kv < cut) & (q >= 0), *mask.shape)
    return mask & before, mask & ~before


def check(vjp, mask, inputs, cut, *, scale=None, seed=0):
    """Raise unless the gradients of two merged parts are those of the whole.

    Parameters
    ----------
    vjp : callable
        ``vjp(part)`` returns ``(out, lse), pullback`` for a mask, and
        ``pullback(dout, dlse)`` the gradients of q, k and v, all on the host.
    mask : masks.Mask
    inputs : tuple
        q, k, v and dout.
    cut : int
    scale : float, optional
    seed : int
        Of dlse. Where a part attends nothing its dlse is NaN.
    """
    q, k, v, dout = inputs
    whole = reference.attention(q, k, v, mask, scale)
    dlse = np.random.default_rng(seed).standard_normal(whole[1].shape)
    parts, pullbacks = zip(*(vjp(part) for part in parts_of(mask, cut)), strict=True)
    wide = [tuple(np.asarray(x, np.float64) for x in part) for part in parts]
    total = [np.zeros(x.shape) for x in (q, k, v)]
    for i, (part_dout, part_dlse) in enumerate(reference.merge_backward(dout, dlse, wide)):
        lse = parts[i][1]
        part_dlse = np.where(np.isneginf(lse), np.nan, part_dlse).astype(lse.dtype)
        for sum_, x in zip(total, pullbacks[i](part_dout.astype(q.dtype), part_dlse), strict=True):
            sum_ += np.asarray(x, np.float64)
    exact = reference.attention_backward(dout, q, k, v, mask, scale, dlse)
    low = testing.low_precision_backward(dout, q, k, v, mask, scale, dlse)
    # Each part is rounded on its own.
    factor = FACTOR * len(parts)
    for name, *values in zip(("dq", "dk", "dv"), total, exact, low, strict=True):
        testing.assert_within_reference(*values, name=name, factor=factor)


def check_merge(vjp, mask, inputs, cut, *, scale=None, array=np.asarray):
    """Raise unless `nbflash.merge` makes one attention of two parts, with its gradients.

    Parameters
    ----------
    vjp, mask, inputs, cut, scale
        As in `check`, but ``vjp`` and ``pullback`` work on arrays of one library throughout.
    array : callable
        Makes such an array of one on the host.
    """
    q, k, v, dout = inputs
    dlse = _dlse_of(q)
    (a, pullback_a), (b, pullback_b) = (vjp(part) for part in parts_of(mask, cut))
    merged = nbflash.merge(*a, *b)
    gradients = nbflash.merge_backward(array(dout), *a, *b, dlse=array(dlse))
    pairs = zip(pullback_a(*gradients[:2]), pullback_b(*gradients[2:]), strict=True)
    sums = (np.asarray(_host(x), np.float64) + np.asarray(_host(y), np.float64) for x, y in pairs)
    exact, low = _expected(q, k, v, dout, mask, scale, dlse)
    _hold((*merged, *sums), exact, low)


def check_sink(vjp, mask, inputs, sink, *, scale=None, array=np.asarray):
    """Raise unless `nbflash.merge_sink` is one more column of the scores, with its gradients.

    Parameters
    ----------
    vjp, mask, inputs, scale, array
        As in `check_merge`.
    sink : array (heads,), in the dtype of the LSE
    """
    q, k, _, dout = inputs
    dlse = _dlse_of(q)
    part, pullback = vjp(mask)
    results = nbflash.merge_sink(*part, array(sink))
    dout_part, dlse_part, dsink = nbflash.merge_sink_backward(
        array(dout), *part, array(sink), dlse=array(dlse)
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    column = _with_column(*inputs, mask, sink, scale)
    exact, low = (_without_column(x, k.shape[1:3], scale) for x in _expected(*column, scale, dlse))
    _hold((*results, *pullback(dout_part, dlse_part), dsink), exact, low)


def _dlse_of(q):
    batch, nq, heads, _ = q.shape
    dlse = np.random.default_rng(nq).standard_normal((batch, heads, nq))
    return dlse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def _expected(q, k, v, dout, mask, scale, dlse):
    """out, lse, dq, dk and dv of the specification, and of the plain computation."""
    exact = reference.attention(q, k, v, mask, scale)
    low = testing.low_precision(q, k, v, mask, scale)
    exact += reference.attention_backward(dout, q, k, v, mask, scale, dlse)
    return exact, low + testing.low_precision_backward(dout, q, k, v, mask, scale, dlse)


def _with_column(q, k, v, dout, mask, sink, scale):
    """q, k, v, dout and what is attended, with one more key that gives every query its sink.

    One more feature is 1 in q, and in k it is 0 but for the last key: every query head has keys of
    its own, the last of which is 0 elsewhere.
    """
    batch, nq, heads, _ = q.shape
    k, v = (np.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    q = np.pad(q, [(0, 0)] * 3 + [(0, 1)], constant_values=1)
    k = np.pad(k.astype(np.float64), [(0, 0), (0, 1), (0, 0), (0, 1)])
    k[:, -1, :, -1] = np.asarray(sink, np.float64) / scale
    v = np.pad(v, [(0, 0), (0, 1), (0, 0), (0, 0)])
    keep = np.broadcast_to(mask.dense(), (batch, heads, nq, k.shape[1] - 1))
    return q, k, v, dout, np.pad(keep, [(0, 0)] * 3 + [(0, 1)], constant_values=True)


def _without_column(results, kv, scale):
    """out, lse and the gradients of q, k, v and the sink from those of `_with_column`."""
    out, lse, dq, dk, dv = results
    nk, heads_kv = kv
    batch, _, heads, head_dim = dv.shape
    dsink = np.asarray(dk[:, nk, :, -1], np.float64).sum(axis=0) / scale
    shared = (batch, nk, heads_kv, heads // heads_kv, head_dim)
    dk, dv = (
        np.asarray(x[:, :nk, :, :head_dim], np.float64).reshape(shared).sum(axis=3).astype(x.dtype)
        for x in (dk, dv)
    )
    return out, lse, dq[..., :-1], dk, dv, dsink.astype(dq.dtype)


def _hold(got, exact, low):
    """Each part is rounded on its own, and a sink is one."""
    for (name, factor), *values in zip(FACTORS.items(), got, exact, low, strict=False):
        testing.assert_within_reference(*map(_host, values), name=name, factor=2 * factor)


def _host(x):
    return x.get() if hasattr(x, "get") else x
