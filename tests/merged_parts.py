"""Attention over parts of the keys, merged by their LSE and differentiated through both results.

Every tier holds its implementations to it: out and lse of a part get gradients of their own, and
what comes of them for all parts together must be the gradients of the whole attention.
"""

import numpy as np

import masks
from nbflash import reference, testing

# A gradient goes through one more product and one more rounded operand than the output.
FACTOR = 3.0


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
