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


def attention_and_gradients(dout, q, k, v, keep, scale, *, low=False):
    """``(out, lse, dq, dk, dv)`` by the dense equations.

    Parameters
    ----------
    dout, q, k, v : arrays in the public layout
        NaN and infinities count as 0: they may stand only where nothing attends.
    keep : bool array that broadcasts to (batch, heads, nq, nk)
    scale : float
    low : bool
        In float32 (float64 for float64) with S, P, dP and dS rounded to q's dtype, and sums over
        keys and over head_dim from the last to the first, instead of in float64 throughout.

    Returns
    -------
    out, dq, dk, dv : in the public layout
    lse : (batch, heads, nq)
    """
    xp, storage, heads_kv = library(q), q.dtype, k.shape[2]
    work = xp.float32 if low and storage.itemsize < 8 else xp.float64

    def keeping(x):
        return rounded(x, storage) if low else x

    dout, q, k, v = _heads_first(xp, q.shape[2], work, dout, q, k, v)
    keep = xp.broadcast_to(keep, (*q.shape[:3], k.shape[2]))
    if low:
        q, dout, keep = q[..., ::-1], dout[..., ::-1], keep[..., ::-1]
        k, v = k[:, :, ::-1, ::-1], v[:, :, ::-1, ::-1]
    s = keeping(keeping(q @ k.swapaxes(-1, -2)) * work(scale))
    s = xp.where(keep, s, work(-np.inf))
    m = xp.max(s, axis=-1, keepdims=True)
    m = xp.where(xp.isneginf(m), work(0), m)
    p = xp.exp(s - m)
    total = xp.sum(p, axis=-1, keepdims=True)
    alive = total > 0
    lse = xp.where(alive, m + xp.log(xp.where(alive, total, work(1))), work(-np.inf))[..., 0]
    p = keeping(p / xp.where(alive, total, work(1)))
    out = p @ v
    dp = keeping(dout @ v.swapaxes(-1, -2))
    delta = xp.sum(p * dp, axis=-1, keepdims=True)
    if low:  # however it is summed, delta differs from dP by about a rounding
        delta += work(np.finfo(work).eps) * xp.sum(xp.abs(dout * out), axis=-1, keepdims=True)
    ds = keeping(keeping(p * (dp - delta)) * work(scale))
    dq = ds @ k
    dk, dv = (_group_sum(x.swapaxes(-1, -2) @ y, heads_kv) for x, y in ((ds, q), (p, dout)))
    if low:
        out, dq = out[..., ::-1], dq[..., ::-1]
        dk, dv = dk[:, :, ::-1, ::-1], dv[:, :, ::-1, ::-1]
    out, dq, dk, dv = (keeping(x).transpose(0, 2, 1, 3) for x in (out, dq, dk, dv))
    return out, lse, dq, dk, dv
