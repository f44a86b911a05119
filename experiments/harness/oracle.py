"""Correctness before speed: results against the float64 reference on a sample of query rows.

Row ``i`` of out, LSE and dQ depends on query ``i`` alone, so the reference of a sample of rows
costs O(rows · N). dK and dV sum over all rows; with a dout that is zero outside the sample they sum
over the sample alone and are compared in full. The sample takes at least one random row from every
row of tiles; where the blocks of the mask are whole tiles, every live tile takes part with it.
"""

from dataclasses import dataclass

import numpy as np

from experiments.harness.errors import OutOfBudget
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    error_budget,
    low_precision,
    low_precision_backward,
)

#: Times the error of the plain computation: what flash-attention's own tests allow.
FACTOR = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}


@dataclass(frozen=True)
class Verdict:
    """Largest error of a pass relative to its budget, both absolute, and for which array."""

    array: str
    error: float
    budget: float


def nearest(verdicts):
    """The one nearest to its budget."""
    return max(verdicts, key=lambda v: v.error / v.budget if v.budget else 0.0)


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


class Oracle:
    """Reference results and budgets for the sampled rows of one problem and one mask.

    Parameters
    ----------
    q, k, v, dout : NumPy arrays (batch, seqlen, heads, head_dim), in the dtype that is tested
    mask : Mask or None
    rows : int array
        From `sample_rows`.
    """

    def __init__(self, q, k, v, dout, mask, rows):
        keep = None if mask is None else mask(rows[:, None], np.arange(k.shape[1]))
        inputs, dout = (q[:, rows], k, v, keep), dout[:, rows]
        grads = ("dq", "dk", "dv")
        self.rows = rows
        self.exact = dict(zip(("out", "lse"), reference.attention(*inputs), strict=True))
        self.exact |= zip(grads, reference.attention_backward(dout, *inputs), strict=True)
        self.low = dict(zip(("out", "lse"), low_precision(*inputs), strict=True))
        dout = _from_public_lse(dout, self.exact["lse"])
        self.low |= zip(grads, low_precision_backward(dout, *inputs), strict=True)

    def check(self, name, **got):
        """Hold results to their budgets.

        Parameters
        ----------
        name : str
            The configuration, for the message.
        **got : NumPy arrays
            Any of out, lse and dq at the sampled rows, and dk and dv from a sampled dout.

        Returns
        -------
        Verdict
            Of the array nearest to its budget.

        Raises
        ------
        OutOfBudget
            If one of them exceeds its budget or is not finite where the reference is.
        """
        verdicts = []
        for key, array in got.items():
            exact, low = self.exact[key], self.low[key]
            try:
                error = assert_within_reference(array, exact, low, key, FACTOR[key])
            except AssertionError as failure:
                raise OutOfBudget(f"{name}: no timing is reported, {failure}") from None
            verdicts.append(Verdict(key, error, error_budget(exact, low, FACTOR[key])))
        return nearest(verdicts)

    def forget(self, *names):
        """Drop references that are not needed again: dK and dV are as large as K and V."""
        for name in names:
            del self.exact[name], self.low[name]


def _from_public_lse(dout, lse):
    """The dout whose exact gradients are those that start from an LSE half an ulp off.

    The public LSE is rounded to float32, or float64 for float64 inputs. That scales row i of
    P = exp(S - LSE), and with it row i of dS and dO, by one factor, which is 1 ± 5e-7 for a float32
    LSE of 8 to 16. The yardstick takes part in that rounding, up and down in turn.
    """
    public = np.float64 if dout.dtype == np.float64 else np.float32
    finite = np.isfinite(lse)
    half_ulp = np.spacing(np.abs(np.where(finite, lse, 0)).astype(public)).astype(np.float64) / 2
    sign = 1 - 2 * (np.arange(lse.shape[-1]) % 2)
    slip = np.exp(np.where(finite, half_ulp * sign, 0))
    return (dout * slip.transpose(0, 2, 1)[..., None]).astype(dout.dtype)


def sampled(dout, rows):
    """``dout`` with zeros outside the sampled rows."""
    only = np.zeros_like(dout)
    only[:, rows] = dout[:, rows]
    return only
