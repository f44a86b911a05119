"""The kernel that merges two parts, held to `nbflash.merge`, which is NumPy's on host arrays."""

import numpy as np

import nbflash
from nbflash import testing
from nbflash.backends.merging import host as merge_host

NAMES = "out", "lse"


def part(batch, n, heads, head_dim, dtype=np.float32, *, seed=0, empty=0.2):
    """``(out, lse)`` of which some rows attend nothing and hold NaN."""
    rng = np.random.default_rng(seed)
    wide = np.float64 if dtype == np.float64 else np.float32
    out = rng.standard_normal((batch, n, heads, head_dim))
    lse = rng.standard_normal((batch, heads, n))
    lse[rng.random(lse.shape) < empty] = -np.inf
    out[np.isneginf(lse).swapaxes(1, 2)] = np.nan
    return out.astype(dtype), lse.astype(wide)


def at_rows(of, places):
    """Rows of a part."""
    return (of[0][:, places], of[1][:, :, places]) if places is not None else of


def wide(of):
    """A part in float64, with zeros in place of what an empty row holds: no merge reads it."""
    out = np.where(np.isneginf(of[1]).swapaxes(1, 2)[..., None], 0, of[0].astype(np.float64))
    return out, of[1].astype(np.float64)


def merged(a, b, places=None, *, module=merge_host, memory=None):
    """``(out, lse)`` of the kernel, in place of a copy of part a, or of ``memory`` that is."""
    results = memory or tuple(x.copy() for x in a)
    module.merge(results, b, results, places)
    return results


def check_merge(a, b, places=None, **how):
    """Raise unless rows of part a become the merge, and others stay as they are; the results."""
    got = merged(a, b, places, **how)
    rows = at_rows(a, places)
    ref = nbflash.merge(*wide(rows), *wide(b))
    low = nbflash.merge(rows[0], rows[1], b[0].astype(a[0].dtype), b[1])
    for name, *values in zip(NAMES, at_rows(got, places), ref, low, strict=True):
        testing.assert_within_reference(*values, name=name)
    others = np.ones(a[0].shape[1], bool)
    others[slice(None) if places is None else places] = False
    for x, y in zip(at_rows(got, others), at_rows(a, others), strict=True):
        assert x.tobytes() == y.tobytes()
    return got
