"""Inputs with known answers, error budgets derived from data, and a gallery of masks.

The tests and the experiments share these, so that a number is reported under the same budget that
a test holds it to.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from nbflash import reference
from nbflash.testing.yardstick import low_precision, low_precision_backward, low_score_gradient

__all__ = [
    "CodeWords",
    "assert_blocks_within_reference",
    "assert_within_reference",
    "block_errors",
    "code_word_oracle",
    "error_budget",
    "low_precision",
    "low_precision_backward",
    "low_score_gradient",
    "make_qkv",
    "mask_gallery",
    "poisoned",
    "small_integers",
]


def make_qkv(batch, nq, nk, heads, heads_kv, head_dim, dtype=np.float32, seed=0):
    """Standard normal q, k, v and dout in the public layout.

    Returns
    -------
    q, dout : (batch, nq, heads, head_dim)
    k, v : (batch, nk, heads_kv, head_dim)
    """
    rng = np.random.default_rng(seed)
    q_shape, k_shape = (batch, nq, heads, head_dim), (batch, nk, heads_kv, head_dim)
    shapes = (q_shape, k_shape, k_shape, q_shape)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def small_integers(batch, nq, nk, heads, heads_kv, head_dim, dtype=np.float32, seed=0):
    """q, k, v and dout as in `make_qkv`, but sparse integers in -2..2, four in five of them zero.

    Every product and sum of the matrix products over them is exact in float16, bfloat16 and float32
    (cuDNN's device), and with ``scale = log(2)`` every base-2 score is an integer.
    """
    rng = np.random.default_rng(seed)
    q_shape, k_shape = (batch, nq, heads, head_dim), (batch, nk, heads_kv, head_dim)
    shapes = (q_shape, k_shape, k_shape, q_shape)
    draws = [rng.integers(-2, 3, shape) * (rng.random(shape) < 0.25) for shape in shapes]
    return tuple(x.astype(dtype) for x in draws)


def poisoned(shape, dtype=np.float32):
    """An output array full of NaN: an element that nobody writes fails every comparison."""
    return np.full(shape, np.nan, dtype)


class CodeWords(NamedTuple):
    """Inputs and exact results of `code_word_oracle`, in the public layout, one batch, one head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    scale: float
    out: np.ndarray
    lse: np.ndarray
    dv: np.ndarray


def code_word_oracle(nq, head_dim, nk=None, mask=None, dtype=np.float32, scale=None, seed=0):
    """Inputs whose softmax saturates, so that attention is a gather with a bit-exact result.

    The keys are distinct words over ±1 and each query is 1024 times the word of one key that
    it attends. That key's score leads by at least 2048 · scale, every other weight underflows
    (in float64 too) and ``out[i] == v[target[i]]`` bit for bit, ``dv`` is the scatter-sum of
    ``dout``, and ``dq = dk = 0``. A row that attends nothing has ``out = 0``, ``lse = -inf``.

    Parameters
    ----------
    nq, nk : int
        Query and key counts; ``nk`` defaults to ``nq`` and is at most ``2**head_dim``.
    mask : Mask, bool array (nq, nk), or None
    scale : float, optional
        Default ``log(2)``, which makes every base-2 score an integer and so leaves nothing
        to round, whichever way an implementation folds the scale into its exponent.

    Returns
    -------
    CodeWords
        ``lse`` is float64: ``1024 · scale · head_dim`` for a row that attends something.
    """
    nk = nq if nk is None else nk
    scale = math.log(2.0) if scale is None else scale
    if nk > 2**head_dim:
        raise ValueError(f"{nk=} distinct words do not fit in {head_dim=} signs")
    rng = np.random.default_rng(seed)
    bits = np.arange(nk)[:, None] >> (np.arange(head_dim) % max(1, (nk - 1).bit_length())) & 1
    words = (1 - 2 * bits) * rng.choice([-1, 1], head_dim)
    keep = reference._attended(mask, (nq, nk))
    attends = keep.any(axis=1)
    target = np.argmax(np.where(keep, rng.random((nq, nk)), -1.0), axis=1)
    v = rng.choice([-3, -2, -1, 1, 2, 3], (nk, head_dim))
    dout = rng.integers(-3, 4, (nq, head_dim))
    out = np.where(attends[:, None], v[target], 0)
    dv = np.zeros((nk, head_dim))
    np.add.at(dv, target[attends], dout[attends])
    q, k, v, dout, out, dv = (
        x.astype(dtype)[None, :, None] for x in (1024 * words[target], words, v, dout, out, dv)
    )
    lse = np.where(attends, 1024.0 * scale * head_dim, -np.inf)[None, None]
    return CodeWords(q, k, v, dout, scale, out, lse, dv)


def error_budget(ref64, low, factor=2.0, reduce=None):
    """``factor · (max|low - ref64| + eps(low.dtype) · max|ref64|)`` over the finite elements.

    ``reduce`` may take the place of the maximum over all elements.
    """
    reduce = _largest if reduce is None else reduce
    eps = float(np.spacing(np.ones((), np.asarray(low).dtype)))
    finite = np.isfinite(ref64)
    ref64 = np.where(finite, ref64, 0.0)
    low = np.where(finite, np.asarray(low, np.float64), 0.0)
    return factor * (reduce(np.abs(low - ref64)) + eps * reduce(np.abs(ref64)))


def assert_within_reference(got, ref64, low, name="result", factor=2.0):
    """Fail unless ``got`` is about as close to the reference as plain working precision is.

        max|got - ref64| <= factor · (max|low - ref64| + eps(low.dtype) · max|ref64|)

    An infinity must stand in ``got`` exactly where it stands in ``ref64``, with its sign. A NaN in
    ``got``, in ``ref64`` or in the finite part of ``low`` fails: the last two mean that the test's
    own data cannot decide anything.

    Parameters
    ----------
    got, ref64, low : arrays of one shape
        Result, float64 reference, and the same computation done plainly (`low_precision`).
    name : str
        Stands first in the message.
    factor : float

    Returns
    -------
    float
        ``max|got - ref64|`` over the finite elements.

    Raises
    ------
    AssertionError
        With the largest error, the budget and the first or worst position.
    """
    return _check(got, ref64, low, name, factor, _largest)


def assert_blocks_within_reference(got, ref64, low, tile, name="result", factor=2.0, axis=1):
    """`assert_within_reference` for each run of ``tile`` positions along ``axis``, each head apart.

    Every block is held to its own budget, so that one wrong tile of small numbers cannot hide
    behind large numbers elsewhere. Use ``axis=1`` for (batch, n, heads, head_dim) and ``axis=2``
    for an LSE (batch, heads, n).
    """
    by_block = functools.partial(_largest_by_block, tile=tile, axis=axis)
    return _check(got, ref64, low, f"{name} by blocks of {tile}", factor, by_block)


def block_errors(got, ref64, tile, axis=1):
    """Largest absolute error in each run of ``tile`` positions along ``axis``.

    Equal infinities count as no error; a NaN anywhere makes its block NaN.

    Returns
    -------
    float64 array
        ``axis`` shrunk to its number of blocks; for a 4-D array the last axis (head_dim) is gone.
    """
    got, ref64 = np.asarray(got, np.float64), np.asarray(ref64, np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got == ref64, 0.0, np.abs(got - ref64))
    return _largest_by_block(error, tile, axis)


def _largest(x):
    return float(np.max(x, initial=0.0))


def _largest_by_block(x, tile, axis):
    if x.ndim == 4:
        x = np.max(x, axis=-1, initial=0.0)
    starts = np.arange(0, x.shape[axis], tile)
    return np.maximum.reduceat(x, starts, axis=axis) if len(starts) else x


def _check(got, ref64, low, name, factor, reduce):
    shapes = [np.shape(x) for x in (got, ref64, low)]
    if len(set(shapes)) > 1:
        raise AssertionError(f"{name}: shapes of got, ref64 and low differ: {shapes}")
    got, ref64 = np.asarray(got, np.float64), np.asarray(ref64, np.float64)
    if np.isnan(ref64).any():
        raise AssertionError(f"{name}: the reference holds NaN, the comparison means nothing")
    finite = np.isfinite(ref64)
    if not np.isfinite(np.asarray(low, np.float64)[finite]).all():
        raise AssertionError(f"{name}: the low-precision yardstick is not finite on this data")
    wrong = np.where(finite, ~np.isfinite(got), got != ref64)
    if wrong.any():
        raise AssertionError(
            f"{name}: {wrong.sum()} of {got.size} elements are NaN or infinite, or should be, "
            f"first {_describe(np.argmax(wrong), got, ref64)}"
        )
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, ref64, 0.0))
    largest, budget = (
        np.ravel(x) for x in (reduce(error), error_budget(ref64, low, factor, reduce))
    )
    if np.any(largest > budget):
        worst = np.argmax(largest - budget)
        raise AssertionError(
            f"{name}: error {largest[worst]:.3e} exceeds the budget {budget[worst]:.3e}, "
            f"largest error {_describe(np.argmax(error), got, ref64)}"
        )
    return _largest(error)


def _describe(flat, got, ref64):
    index = tuple(int(i) for i in np.unravel_index(flat, got.shape))
    return f"at {index}: got {got[index]:.9g}, reference {ref64[index]:.9g}"


def mask_gallery(nq, nk=None, *, batch=2, heads=2):
    """One mask of every pattern and tile kind, by name, each of shape (nq, nk).

    Blocks are a sixth of the longer side, so that no usual tile size divides them. Some rows or
    keys, or all, are dead in ``causal`` (where nq > nk), ``documents``, ``padding``, ``dead-*``
    and ``empty``. ``per-*`` and ``padding`` vary over `batch` entries and `heads` query heads.

    Parameters
    ----------
    nq, nk : int
        At least 1; `nk` defaults to `nq`.
    """
    import masks

    nk = nq if nk is None else nk
    n = max(nq, nk)
    block, third, third_k = -(-n // 6), -(-nq // 3), -(-nk // 3)
    side = math.isqrt(n - 1) + 1
    causal, dense = masks.causal(nq, nk), masks.dense(nq, nk)

    def fit(square):
        """The first nq rows and nk columns of a mask that only comes square."""
        return square if square.shape == (nq, nk) else masks.from_dense(square.dense()[:nq, :nk])

    def where(predicate):
        return masks.from_function(predicate, nq, nk)

    butterfly, local = fit(masks.butterfly(n, block)), fit(masks.local(n, block))
    plain = {
        "dense": dense,
        "causal": causal,
        "window": masks.window(nq, nk, left=n // 5, right=n // 7),
        "window-causal": masks.window(nq, nk, left=n // 4, right=0),
        "prefix": masks.prefix(nq, third_k, nk=nk),
        "documents": masks.documents([third, nq - third, 0], [nk - third_k, 0, third_k]),
        "documents-causal": masks.documents(
            [nq - third, third], [third_k, nk - third_k], causal=True
        ),
        "chunked": masks.chunked(nq, block, nk=nk),
        "sinks": masks.sinks(nq, block // 2 + 1, block, nk=nk),
        "butterfly": butterfly,
        "butterfly-causal": butterfly & causal,
        "local": local,
        "butterfly-or-local-causal": (butterfly | local) & causal,
        "random": fit(masks.random(n, block, 0.3, seed=1)),
        "strided": fit(masks.strided(n, 1, block // 2 + 1, 2)),
        "dilated": fit(masks.dilated(n, 5, 3)),
        "fixed": fit(masks.fixed(n, block, 2)),
        "global-local": fit(masks.global_local(n, block)),
        "bigbird": fit(masks.bigbird(n, block // 2 + 1)),
        "vertical-slash": fit(masks.vertical_slash(n, sorted({0, n // 2}), sorted({0, n // 3}))),
        "axial": fit(masks.axial(side, side)),
        "neighborhood": fit(masks.neighborhood((side, side), min(3, side))),
        "tree": fit(masks.tree([(i - 1) // 2 for i in range(nq)], prefix=max(nk - nq, 0))),
        "checkerboard": where(lambda q, kv: (q + kv) % 2 == 0),
        "dead-first": where(lambda q, kv: (q >= third) & (kv >= 0)),
        "dead-last": where(lambda q, kv: (q < nq - third) & (kv <= q)),
        "dead-scattered": where(lambda q, kv: (q % 3 != 1) & ((5 * q + 7 * kv) % 11 < 5)),
        "dead-keys": where(lambda q, kv: (kv >= third_k) & (kv % 3 != 1) & (q >= 0)),
        "empty": ~dense,
    }
    cycle = [causal, plain["dead-scattered"], butterfly, ~dense, dense]
    first, second = ([cycle[(i + s) % 5] for i in range(heads)] for s in (0, 1))
    return plain | {
        "padding": masks.padding(np.linspace(nk - third_k, 0, batch, dtype=int), nq, nk),
        "per-head": masks.per_head(first),
        "per-batch": masks.per_batch([cycle[i % 5] for i in range(batch)]),
        "per-batch-per-head": masks.per_batch(
            [masks.per_head(first if i % 2 else second) for i in range(batch)]
        ),
    }
