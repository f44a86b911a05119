"""A row of NaN in one of the inputs: which results show it, and which may not.

Every tier holds its implementations to it.
"""

import numpy as np

from nbflash import reference, testing

NAMES = ("out", "lse", "dq", "dk", "dv")
FACTORS = (2, 2, 3, 3, 3)
INPUTS = ("q", "k", "v", "dout")
MASKS = ("window", "butterfly", "dead-scattered", "checkerboard")


def check(run, mask, inputs, which, at, names=NAMES, must=True, **how):
    """Raise unless NaN stands exactly where the reference has it, and the rest within its budget.

    Parameters
    ----------
    run : callable
        ``run(q, k, v, dout)`` returns the results of ``names``, or the first few of them, on the
        host.
    mask : masks.Mask
        Some rows do not meet ``at``.
    inputs : tuple
        q, k, v and dout.
    which : str
        The input whose row, or key, ``at`` becomes NaN.
    at : int
    must : bool
        Some results show it, and some of each do not.
    how
        Arguments of the reference.
    """
    dirty = [x.copy(order="K") for x in inputs]
    dirty[INPUTS.index(which)][:, at] = np.nan
    forward = reference.attention, reference.attention_backward
    exact, honest = (_results(*forward, mask, *x, **how) for x in (inputs, dirty))
    low = _results(testing.low_precision, testing.low_precision_backward, mask, *inputs, **how)
    assert not must or any(np.isnan(x).any() for x in honest)
    named = zip(NAMES, FACTORS, exact, low, honest, strict=True)
    for (name, factor, *values, shown), got in zip(
        [x for x in named if x[0] in names], run(*dirty), strict=False
    ):
        hit = np.isnan(shown)
        assert not must or not hit.all()
        np.testing.assert_array_equal(np.isnan(got), hit, err_msg=name)
        testing.assert_within_reference(got[~hit], *(x[~hit] for x in values), name, factor)


def _results(forward, backward, mask, q, k, v, dout, **how):
    return *forward(q, k, v, mask, **how), *backward(dout, q, k, v, mask, **how)


def unused(mask, batch, heads, heads_kv):
    """Rows (batch, nq, heads) and keys (batch, nk, heads_kv) that take part in nothing."""
    keep = np.broadcast_to(mask.dense(), (batch, heads, *mask.shape))
    rows = ~keep.any(axis=3).transpose(0, 2, 1)
    groups = keep.any(axis=2).reshape(batch, heads_kv, -1, mask.shape[1])
    return rows, ~groups.any(axis=2).transpose(0, 2, 1)
