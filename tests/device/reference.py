"""Dense masked softmax on the device: float64 as the reference, the inputs' dtype as yardstick.

What :mod:`nbflash.reference` and :mod:`nbflash.testing` do with NumPy on the host, for arrays of
either library, so that a few thousand comparisons do not wait for the host.
"""

import numpy as np


def library(x):
    """NumPy or CuPy, whichever ``x`` belongs to."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def widened(x, dtype):
    """``x`` in float32 or float64; bfloat16 by way of its bits."""
    xp = library(x)
    if x.dtype.name == "bfloat16":
        x = (xp.ascontiguousarray(x).view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(dtype)


def rounded(x, dtype):
    """float32 or float64 values as the storage type holds them, in the type they came in."""
    if dtype.name != "bfloat16":
        return x.astype(dtype).astype(x.dtype)
    xp = library(x)
    bits = x.astype(xp.float32).view(xp.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return xp.where(xp.isfinite(x), bits.astype(xp.uint32).view(xp.float32), x).astype(x.dtype)


def _heads_first(xp, heads, dtype, *arrays):
    """(batch, heads, n, head_dim), key/value heads repeated, NaN and infinities as 0."""
    for x in arrays:
        x = widened(x, dtype).transpose(0, 2, 1, 3)
        x = xp.where(xp.isfinite(x), x, xp.zeros((), dtype))
        yield xp.repeat(x, heads // x.shape[1], axis=1)


def _group_sum(x, heads_kv):
    batch, heads, n, head_dim = x.shape
    return x.reshape(batch, heads_kv, heads // heads_kv, n, head_dim).sum(axis=2)


def _sum_over_rows(x, y, heads_kv):
    """Xᵀ Y summed over the heads of a group, one row of one head after the other."""
    xp = library(x)
    batch, heads, nq, nk = x.shape
    rows = heads // heads_kv * nq
    x, y = x.reshape(batch, heads_kv, rows, nk), y.reshape(batch, heads_kv, rows, y.shape[-1])
    total = xp.zeros((batch, heads_kv, nk, y.shape[-1]), x.dtype)
    for row in range(rows):
        total += x[:, :, row, :, None] * y[:, :, row, None, :]
    return total


def attention_and_gradients(dout, q, k, v, keep, scale):
    """``(out, lse, dq, dk, dv)`` in float64 by the dense equations.

    Parameters
    ----------
    dout, q, k, v : arrays in the public layout
        NaN and infinities count as 0: they may stand only where nothing attends.
    keep : bool array that broadcasts to (batch, heads, nq, nk)
    scale : float

    Returns
    -------
    out, dq, dk, dv : in the public layout
    lse : (batch, heads, nq)
    """
    xp, heads_kv = library(q), k.shape[2]
    dout, q, k, v = _heads_first(xp, q.shape[2], xp.float64, dout, q, k, v)
    s = xp.where(keep, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    p, lse = _softmax(xp, s, xp.exp, xp.log)
    dp = dout @ v.swapaxes(-1, -2)
    ds = scale * p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))
    dk, dv = (_group_sum(x.swapaxes(-1, -2) @ y, heads_kv) for x, y in ((ds, q), (p, dout)))
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in (p @ v, ds @ k, dk, dv))
    return out, lse, dq, dk, dv


def plain_computation(dout, q, k, v, keep, scale, order):
    """The same five results as a dense program in q's dtype has them: the yardstick.

    float16 and bfloat16: products in float32, S, P, dP and dS rounded to the type. float32 and
    float64: their own precision and, like the kernels, base 2 with the scale in Q; each score is
    moved up or down by 0.2 √head_dim units in its last place, a random walk of its own roundings.
    Gradients start from the LSE, moved by one unit too: its rounding scales a whole row of P.
    dK and dV sum over rows one after the other, whose error grows with the rows as the kernels'
    does. ``order`` seeds the order of the sums over keys and over head_dim.
    """
    xp, storage, heads_kv = library(q), q.dtype, k.shape[2]
    work = xp.float64 if storage.itemsize == 8 else xp.float32
    narrow = storage.itemsize == 2
    rng = np.random.default_rng(order)
    keys, columns = (xp.asarray(rng.permutation(n)) for n in k.shape[1::2])
    dout, q, k, v = _heads_first(xp, q.shape[2], work, dout, q, k, v)
    dout, q, k, v = (x[..., columns] for x in (dout, q, k, v))
    k, v, keep = k[:, :, keys], v[:, :, keys], keep[..., keys]

    def stored(x):
        return rounded(x, storage)

    if narrow:
        exp, log, unit = xp.exp, xp.log, work(1)
        s = stored(stored(q @ k.swapaxes(-1, -2)) * work(scale))
    else:
        exp, log, unit = xp.exp2, xp.log2, work(np.log2(np.e))
        s = (q * work(scale * np.log2(np.e))) @ k.swapaxes(-1, -2)
        sign = 1 - 2 * ((xp.arange(s.shape[-2])[:, None] + xp.arange(s.shape[-1])) % 2)
        units = max(1, round(0.2 * q.shape[-1] ** 0.5))
        size = xp.abs(s)
        s = s + (sign * units).astype(work) * (xp.nextafter(size, work(np.inf)) - size)
    s = xp.where(keep, s, work(-np.inf))
    p, lse = _softmax(xp, s, exp, log)
    lse = lse / unit
    out = stored(p) @ v
    finite = xp.where(xp.isneginf(lse), work(0), lse)[..., None]
    p = stored(exp(s - xp.nextafter(finite, work(np.inf)) * unit))
    dp = stored(dout @ v.swapaxes(-1, -2))
    # Over O as it is stored; however it is summed, delta differs from dP by about a rounding.
    terms = dout * stored(out)
    delta = xp.sum(terms, axis=-1, keepdims=True)
    delta += work(np.finfo(work).eps) * xp.sum(xp.abs(terms), axis=-1, keepdims=True)
    ds = stored(stored(p * (dp - delta)) * work(scale))
    dk, dv = (_sum_over_rows(x, y, heads_kv) for x, y in ((ds, q), (p, dout)))
    back, keys = xp.argsort(columns), xp.argsort(keys)
    out, dq = (stored(x[..., back]).transpose(0, 2, 1, 3) for x in (out, ds @ k))
    dk, dv = (stored(x[:, :, keys][..., back]).transpose(0, 2, 1, 3) for x in (dk, dv))
    return out, lse, dq, dk, dv


def _softmax(xp, s, exp, log):
    """Probabilities and log-sum-exp of masked scores; a row that attends nothing has 0 and -inf."""
    one = s.dtype.type(1)
    m = xp.max(s, axis=-1, keepdims=True)
    m = xp.where(xp.isneginf(m), s.dtype.type(0), m)
    p = exp(s - m)
    total = xp.sum(p, axis=-1, keepdims=True)
    alive = total > 0
    total = xp.where(alive, total, one)
    lse = xp.where(alive, m + log(total), s.dtype.type(-np.inf))
    return p / total, lse[..., 0]
