"""Inputs and float64 results on the device, for calls too large to check on the host.

What :mod:`experiments.harness.oracle` does with NumPy, on a sample of query rows of a few heads.
bfloat16 is taken and made by its bits, so that the array library needs no arithmetic of that type.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import FACTOR

GRADIENTS = ("dq", "dk", "dv")


def random_inputs(xp, shape, dtype, seed):
    """Standard normal q, k, v and dout; bfloat16 are float32 draws cut off."""
    rng = xp.random.default_rng(seed)
    found = []
    for _ in range(4):
        x = rng.standard_normal(shape, dtype=np.float32)
        if dtype.name == "bfloat16":
            x, bits = xp.empty(shape, dtype), x.view(np.uint32) >> 16
            x.view(np.uint16)[...] = bits
        found.append(x.astype(dtype, copy=False))
    return found


def sampled(xp, dout, rows):
    """``dout`` with zeros outside the sampled rows."""
    only, rows = xp.zeros_like(dout), xp.asarray(rows)
    bits = np.dtype(f"u{dout.itemsize}")
    only.view(bits)[:, rows] = dout.view(bits)[:, rows]
    return only


def poison(xp, *like):
    """Leave NaN in the memory that the next arrays of these sizes get from the library's pool."""
    held = [xp.empty_like(x) for x in like]
    for x in held:
        x.view(np.uint8)[...] = 0xFF


def widened(xp, x):
    """A torch tensor, or an array of the library ``xp``, as a float32 array of that library."""
    if hasattr(x, "detach"):
        x = xp.from_dlpack(x.detach().float())
    if x.dtype.name == "bfloat16":
        bits = xp.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32)
    return x.astype(np.float32)


def rounded(xp, x, dtype):
    """float64 values as the storage type holds them."""
    if dtype.name != "bfloat16":
        return x.astype(dtype).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def unchanged(s, keep):
    """A score function that is none, and its slope."""
    return s, 1.0


@dataclass(frozen=True)
class Between:
    """What is done to the scores between the two products; all arrays as S, (planes, rows, keys).

    Attributes
    ----------
    scored : callable
        ``scored(s, keep) -> (s', ∂s'/∂s)``, in the dtype of ``s``.
    factors : array
        What dropout multiplies P with.
    sink : array (planes, 1, 1), optional
        Logit of one more key, whose value is 0.
    """

    scored: object = unchanged
    factors: object = 1.0
    sink: object = None


def attention(xp, q, k, v, dout, keep, stored, between):
    """Output and gradients by the equations, of arrays (planes, tokens, head_dim).

    Parameters
    ----------
    keep : bool array that broadcasts to (planes, queries, keys)
    stored : callable
        What becomes of S, P, dP and dS, which a plain program keeps in the storage type.
    between : Between

    Returns
    -------
    dict of out, dq, dk and dv
    """
    scale = q.shape[-1] ** -0.5
    s, slope = between.scored(stored(scale * (q @ k.swapaxes(1, 2))), keep)
    s = xp.where(keep, stored(s), s.dtype.type(-np.inf))
    top = s.max(axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(xp.isfinite(top), top, 0))
    total = p.sum(axis=-1, keepdims=True)
    p = p / xp.where(total == 0, 1, total)
    if between.sink is not None:
        p = p / (1 + xp.exp(xp.asarray(between.sink, s.dtype) - (top + xp.log(total))))
    p, factors = stored(p), xp.asarray(between.factors, s.dtype)
    dropped, dp = stored(p * factors), stored(dout @ v.swapaxes(1, 2) * factors)
    ds = stored(scale * slope * p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
    dk, dv = ds.swapaxes(1, 2) @ q, dropped.swapaxes(1, 2) @ dout
    return {"out": dropped @ v, "dq": ds @ k, "dk": dk, "dv": dv}


def plain(xp, *inputs, dtype, between):
    """`attention` as a plain program computes it: float32 throughout, or in it and stored."""
    if dtype == np.float32:
        *arrays, keep = inputs
        arrays = [x.astype(np.float32) for x in arrays]
        return attention(xp, *arrays, keep, stored=lambda x: x, between=between)
    return attention(xp, *inputs, stored=partial(rounded, xp, dtype=dtype), between=between)


class DeviceOracle:
    """Dense masked attention in float64 for some rows of some heads, and what error is allowed.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    arrays : q, k, v, dout in the public layout
    mask : masks.Mask
    rows : int array
        Query rows. dK and dV are those of a dout that is 0 elsewhere.
    planes : list of (batch entry, head)
    feature : features.Feature, optional
    """

    def __init__(self, xp, arrays, mask, rows, planes, feature=None):
        self._xp, self._rows, self._planes = xp, xp.asarray(rows), planes
        q, k, v, dout = arrays
        keep = xp.asarray(mask(rows[:, None], np.arange(mask.shape[1])))
        inputs = self._at_rows(q), self._whole(k), self._whole(v), self._at_rows(dout), keep
        stored = partial(rounded, xp, dtype=q.dtype)
        between = feature.between(xp, planes, rows, k.shape[1]) if feature else Between()
        self._exact = attention(xp, *inputs, stored=lambda x: x, between=between)
        low = plain(xp, *inputs, dtype=q.dtype, between=between)
        self._budget = {
            key: FACTOR[key] * self._error(stored(x), self._exact[key]) for key, x in low.items()
        }

    def _whole(self, x):
        """The chosen heads, (planes, tokens, head_dim) in float64."""
        heads = [widened(self._xp, x[b, :, h]) for b, h in self._planes]
        return self._xp.stack(heads).astype(np.float64)

    def _at_rows(self, x):
        return self._whole(x)[:, self._rows]

    def _error(self, got, exact):
        """Relative error in the Frobenius norm; the absolute one where all is zero."""
        size = float((exact**2).sum()) ** 0.5
        return float(((got - exact) ** 2).sum()) ** 0.5 / (size or 1.0)

    def check(self, **got):
        """The largest relative error of whole results in the public layout.

        Parameters
        ----------
        **got : arrays or torch tensors
            Any of out, dq, dk and dv.

        Raises
        ------
        OutOfBudget
            If an element is not finite, or an error is more than `FACTOR` times that of a plain
            computation in the storage type.
        """
        worst = 0.0
        for key, x in got.items():
            if not bool(self._xp.isfinite(widened(self._xp, x)).all()):
                raise OutOfBudget(f"{key} is not finite")
            picked = self._whole(x) if key in ("dk", "dv") else self._at_rows(x)
            error = self._error(picked, self._exact[key])
            if not error <= self._budget[key]:
                raise OutOfBudget(f"{key}: error {error:.2e}, allowed {self._budget[key]:.2e}")
            worst = max(worst, error)
        return worst
