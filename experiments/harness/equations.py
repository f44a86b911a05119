"""The dense equations of attention on NumPy or CuPy: exactly, and as a plain program computes them.

bfloat16 is taken and made by its bits, so that the array library needs no arithmetic of that type.
"""

from dataclasses import dataclass
from functools import partial
from operator import matmul

import numpy as np


def widened(xp, x):
    """A torch tensor, or an array of the library ``xp``, as an array of at least float32."""
    if hasattr(x, "detach"):
        x = xp.from_dlpack(x.detach().float())
    if x.dtype.name == "bfloat16":
        bits = xp.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32)
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def rounded(xp, x, dtype):
    """float64 values as the storage type holds them."""
    if dtype.name != "bfloat16":
        return x.astype(dtype).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def in_order(a, b):
    """``a @ b``, one term of every sum after the other, from the last to the first."""
    total = a[..., -1, None] * b[..., None, -1, :]
    for i in reversed(range(a.shape[-1] - 1)):
        total += a[..., i, None] * b[..., None, i, :]
    return total


def perturbed(xp, s, head_dim):
    """Scores 0.2 √head_dim units in their last place off, up and down in turn."""
    size = abs(s)
    signs = 1 - 2 * ((xp.arange(s.shape[-2])[:, None] + xp.arange(s.shape[-1])) % 2)
    units = max(1, round(0.2 * head_dim**0.5)) * signs.astype(s.dtype)
    return s + units * (xp.nextafter(size, s.dtype.type(np.inf)) - size)


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


def identity(x):
    """The argument."""
    return x


@dataclass(frozen=True)
class Arithmetic:
    """How a program computes the equations; unless given, as exactly as its dtype allows.

    Attributes
    ----------
    perturbed, stored : callable
        What becomes of the scores, and of S, P, dP and dS.
    product : callable
        The matrix product of sums over a sequence.
    rounding : float
        Of rowsum(dO ∘ O), relative to rowsum |dO ∘ O|.
    """

    perturbed: object = identity
    stored: object = identity
    product: object = matmul
    rounding: float = 0.0


def attention(xp, q, k, v, dout, keep, between, how=Arithmetic()):
    """Output, LSE and gradients by the equations, of arrays (planes, tokens, head_dim).

    Parameters
    ----------
    keep : bool array that broadcasts to (planes, queries, keys)
    between : Between
    how : Arithmetic

    Returns
    -------
    dict of out, lse, dq, dk and dv
    """
    scale, stored = q.shape[-1] ** -0.5, how.stored
    s, slope = between.scored(stored(how.perturbed(scale * (q @ k.swapaxes(1, 2)))), keep)
    s = xp.where(keep, stored(s), s.dtype.type(-np.inf))
    top = s.max(axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(xp.isfinite(top), top, 0))
    total = p.sum(axis=-1, keepdims=True)
    p = p / xp.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + xp.log(total)
    if between.sink is not None:
        p = p / (1 + xp.exp(xp.asarray(between.sink, s.dtype) - lse))
    p, factors = stored(p), xp.asarray(between.factors, s.dtype)
    dropped, dp = stored(p * factors), stored(dout @ v.swapaxes(1, 2) * factors)
    out, delta = how.product(dropped, v), (p * dp).sum(axis=-1, keepdims=True)
    if how.rounding:
        delta = delta + how.rounding * abs(dout * out).sum(axis=-1, keepdims=True)
    ds = stored(scale * slope * p * (dp - delta))
    dq, dk = how.product(ds, k), how.product(ds.swapaxes(1, 2), q)
    dv = how.product(dropped.swapaxes(1, 2), dout)
    return {"out": out, "lse": lse[..., 0], "dq": dq, "dk": dk, "dv": dv}


def plain(xp, q, k, v, dout, keep, between, lse, dtype):
    """`attention` of float64 arrays as a plain program computes it in a storage type.

    This is `nbflash.testing.low_precision` on either library. float16 and bfloat16 round what is
    stored. float32 and float64 sum one term after the other, as every online softmax does in some
    order, over scores that are off by what a random walk of roundings makes of them. Gradients
    start from the exact ``lse`` half a unit in its last place off.
    """
    arrays = q, k, v, _from_public_lse(xp, dout, lse, dtype)
    if dtype.itemsize < 4:
        how = Arithmetic(stored=partial(rounded, xp, dtype=dtype))
        return attention(xp, *arrays, keep, between, how)
    moves = partial(perturbed, xp, head_dim=q.shape[-1])
    how = Arithmetic(moves, product=in_order, rounding=float(np.finfo(dtype).eps))
    return attention(xp, *(x.astype(dtype) for x in arrays), keep, between, how)


def _from_public_lse(xp, dout, lse, dtype):
    """The dout whose exact gradients are those that start from an LSE half an ulp off.

    The public LSE is rounded to float32, or float64 for float64 inputs. That scales row i of
    P = exp(S - LSE), and with it row i of dS and dO, by one factor, which is 1 ± 5e-7 for a float32
    LSE of 8 to 16. The yardstick takes part in that rounding, up and down in turn.
    """
    size = abs(xp.where(xp.isfinite(lse), lse, 0)).astype(np.promote_types(dtype, np.float32))
    ulp = (xp.nextafter(size, size.dtype.type(np.inf)) - size).astype(np.float64)
    signs = 1 - 2 * (xp.arange(lse.shape[-1]) % 2)
    return dout * xp.exp(signs * ulp / 2)[..., None]
