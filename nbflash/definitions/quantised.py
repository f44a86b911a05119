"""int8 and fp8 (e4m3) storage of keys and values: ``x ≈ stored · scale``."""

import numpy as np

#: Largest magnitude that each dtype stores, by name.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantise(x, dtype):
    """``x`` (..., head_dim) rounded to ``dtype`` under the largest magnitude of its last axis.

    Returns
    -------
    stored : ``dtype`` (..., head_dim)
    scale : float32 (...)
        NaN or infinite where ``x`` holds such a value: all of that head and token reads as NaN.
    """
    dtype = np.dtype(dtype)
    limit = np.float32(LIMITS[dtype.name])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        x = x.astype(np.float32)
        scale = np.abs(x).max(axis=-1) / limit
        stored = np.nan_to_num(x / scale[..., None])  # 0 / 0 is stored as 0
    stored = np.clip(stored, -limit, limit)
    return _ROUNDED[dtype.name](stored, dtype), scale


def _int8(x, dtype):
    return np.rint(x).astype(dtype)


def _float8(x, dtype):
    """float32 up to 448 rounded to e4m3, to even: CuPy has views of that dtype and no cast to it.

    |x| = n · 2^(e − 3)      n an integer, 8 to 16, below 8 for the least e, −6 only
    code = 8 (e + 6) + n     of which 16 is 8 of the next exponent
    """
    size, sign = np.abs(x), x.view(np.int32) >> 24 & 128
    e = np.maximum((size.view(np.int32) >> 23) - 127, -6)
    n = np.rint(size * ((130 - e) << 23).view(np.float32)).astype(np.int32)
    return (8 * (e + 6) + n + sign).astype(np.uint8).view(dtype)


_ROUNDED = {"int8": _int8, "float8_e4m3fn": _float8}


def dequantise(stored, scale, real):
    """``stored · scale`` in the dtype ``real``; scale (heads,) or (tokens, heads)."""
    with np.errstate(invalid="ignore", over="ignore"):
        return stored.astype(real) * scale.astype(real)[..., None]
