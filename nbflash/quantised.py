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
    stored = np.rint(stored) if dtype.kind == "i" else stored
    return np.clip(stored, -limit, limit).astype(dtype), scale


def dequantise(stored, scale, real):
    """``stored · scale`` in the dtype ``real``; scale (heads,) or (tokens, heads)."""
    with np.errstate(invalid="ignore", over="ignore"):
        return stored.astype(real) * scale.astype(real)[..., None]
