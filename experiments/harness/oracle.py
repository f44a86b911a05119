"""Correctness before speed: results against float64 on a sample of query rows.

Row ``i`` of out, LSE and dQ depends on query ``i`` alone, so the exact results of a sample of rows
cost O(rows · N). dK and dV sum over all rows; with a dout that is zero outside the sample they sum
over the sample alone and are compared in full. The sample takes at least one random row from every
row of tiles; where the blocks of the mask are whole tiles, every live tile takes part with it.
"""

from dataclasses import dataclass

import numpy as np

from experiments.harness.equations import Between, attention, plain, rounded, widened
from experiments.harness.errors import OutOfBudget
from nbflash.testing import assert_within_reference, error_budget

GRADIENTS = ("dq", "dk", "dv")

#: Times the error of the plain computation: what flash-attention's own tests allow.
FACTOR = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}


@dataclass(frozen=True)
class Verdict:
    """Error of an array and its budget: both absolute, or both relative."""

    array: str
    error: float
    budget: float


def nearest(verdicts):
    """The one nearest to its budget."""
    return max(verdicts, key=lambda v: v.error / v.budget if v.budget else 0.0)


def verdict_of(got, exact, low, array, factor=2.0):
    """The verdict of `nbflash.testing.assert_within_reference`; OutOfBudget where that fails."""
    try:
        error = assert_within_reference(got, exact, low, array, factor)
    except AssertionError as failure:
        raise OutOfBudget(str(failure)) from None
    return Verdict(array, error, error_budget(exact, low, factor))


def sample_rows(nq, limit, seed=0, tile_m=None):
    """Sorted query rows to check: all of them, or a random one from each of many stretches.

    Parameters
    ----------
    limit : int
        Equal stretches to begin with, and the number of rows unless ``tile_m`` adds to it.
    tile_m : int, optional
        Stretches also end where rows of tiles of this height do: none of them is left out.
    """
    if nq <= limit:
        return np.arange(nq)
    edges = np.linspace(0, nq, limit + 1).astype(np.int64)
    if tile_m is not None:
        edges = np.union1d(edges, np.arange(0, nq, tile_m))
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])


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


class Largest:
    """Budget of the largest absolute error of an array: `nbflash.testing.error_budget`."""

    arrays = ("out", "lse", *GRADIENTS)

    def __init__(self, backend, key, exact, low, dtype):
        self._numpy, self._key = backend.numpy, key
        self._exact, self._low = backend.numpy(exact), backend.numpy(low).astype(dtype)

    def verdict(self, got):
        key = self._key
        return verdict_of(self._numpy(got), self._exact, self._low, key, FACTOR[key])


class Relative:
    """Budget of the relative error of an array in the Frobenius norm, taken on the device.

    The LSE is left out: roundings average out in it, but not what an approximate tanh is off by.
    """

    arrays = ("out", *GRADIENTS)

    def __init__(self, backend, key, exact, low, dtype):
        self._key, self._exact = key, exact
        self._budget = FACTOR[key] * self._error(rounded(backend.xp, low, dtype))

    def verdict(self, got):
        error = self._error(got)
        if not error <= self._budget:
            raise OutOfBudget(f"{self._key}: error {error:.2e}, allowed {self._budget:.2e}")
        return Verdict(self._key, error, self._budget)

    def _error(self, got):
        """The absolute one where all is zero."""
        exact = self._exact
        size = float((exact**2).sum()) ** 0.5
        return float(((got - exact) ** 2).sum()) ** 0.5 / (size or 1.0)


class Oracle:
    """Exact results for the sampled rows of one problem and one mask, and the error allowed.

    Parameters
    ----------
    backend : Backend
    arrays : q, k, v, dout in the public layout, in the dtype that is tested
    mask : masks.Mask or None
    rows : int array
        From `sample_rows`. dK and dV are those of a dout that is 0 elsewhere.
    planes : list of (batch entry, query head), optional
        All of them unless given; where query heads share those of k and v, all that share one.
    feature : features.Feature, optional
        What is computed beside plain attention.
    measure : {Largest, Relative}
        What is taken for the error of an array, and of which arrays.
    """

    def __init__(self, backend, arrays, mask, rows, planes=None, feature=None, measure=Largest):
        q, k, v, dout = arrays
        (batch, _, heads, _), (_, nk, heads_kv, _) = q.shape, k.shape
        group, xp = heads // heads_kv, backend.xp
        self.arrays = measure.arrays
        self.rows, self.xp, self._rows = rows, xp, xp.asarray(rows)
        self._planes = planes or [(b, h) for b in range(batch) for h in range(heads)]
        shared = [(b, h // group) for b, h in self._planes]
        self._kv_planes = shared[::group]
        keep = np.ones((len(rows), nk), bool)
        if mask is not None:
            keep = mask(rows[:, None], np.arange(nk))
        k, v = (self._whole(x, shared) for x in (k, v))
        inputs = self._sampled(q), k, v, self._sampled(dout), xp.asarray(keep)
        between = feature.between(xp, self._planes, rows, nk) if feature else Between()
        found = attention(xp, *inputs, between)
        low = plain(xp, *inputs, between, found["lse"], q.dtype)
        self._held = {}
        for key in measure.arrays:
            pair, dtype = (found.pop(key), low.pop(key)), q.dtype
            if key in ("dk", "dv"):
                pair = [x.reshape(-1, group, *x.shape[1:]).sum(axis=1) for x in pair]
            if key == "lse":
                dtype = np.promote_types(dtype, np.float32)
            self._held[key] = measure(backend, key, *pair, dtype)

    def check(self, **got):
        """Hold whole results in the public layout to their budgets.

        Parameters
        ----------
        **got : arrays or torch tensors
            Any of out, lse and dq, and dk and dv from a sampled dout.

        Returns
        -------
        list of Verdict

        Raises
        ------
        OutOfBudget
            If one of them exceeds its budget, or has an element that is not finite and ought to be.
        """
        verdicts = []
        for key, x in got.items():
            if key != "lse" and not bool(self.xp.isfinite(widened(self.xp, x)).all()):
                raise OutOfBudget(f"{key} is not finite")
            verdicts.append(self._held[key].verdict(self._picked(key, x)))
        return verdicts

    def forget(self, *names):
        """Drop what is not needed again: dK and dV are as large as K and V."""
        for name in names:
            del self._held[name]

    def _picked(self, key, x):
        """What is compared of a whole result, in float64."""
        if key == "lse":
            return self._sampled(x.swapaxes(1, 2)[..., None])[..., 0]
        return self._whole(x, self._kv_planes) if key in ("dk", "dv") else self._sampled(x)

    def _sampled(self, x):
        return self._whole(x, self._planes)[:, self._rows]

    def _whole(self, x, planes):
        """The heads of some planes, (planes, tokens, head_dim) in float64."""
        heads = [widened(self.xp, x[b, :, h]) for b, h in planes]
        return self.xp.stack(heads).astype(np.float64)
