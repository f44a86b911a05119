"""Scores with arrays to learn, for the tests of every implementation, and their yardstick."""

import numpy as np
from score_cases import HEADS, quadratic, quadratic_slope

from nbflash import reference, scores, testing

# Sums over rows and keys go through one more product than the output, as other gradients do.
FACTOR = 3


def by_head_part(s, b, h, q_idx, kv_idx, weight, by_head, table):
    return h, s


def table_part(s, b, h, q_idx, kv_idx, weight, by_head, table):
    return (q_idx, kv_idx), 1


def from_the_end(s, b, h, q_idx, kv_idx, table):
    return s + table[h, (kv_idx - q_idx) % table.shape[1]]


def unit_slope(s, b, h, q_idx, kv_idx, table):
    return 1.0


def from_the_end_part(s, b, h, q_idx, kv_idx, table):
    return (h, kv_idx - q_idx), 1


def learned_scores(nq, nk, batch=1, heads=HEADS):
    """By name; for inputs of these sizes."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.standard_normal(shape)

    custom = scores.custom(
        quadratic,
        quadratic_slope,
        (0.1, normal(heads), normal(nq, nk)),
        param_grads=(None, by_head_part, table_part),
    )
    behind = scores.custom(
        from_the_end,
        unit_slope,
        (normal(heads, max(nq, nk)),),
        param_grads=(from_the_end_part,),
    )
    whole = scores.bias(normal(batch, heads, nq, nk))
    return {
        "alibi": scores.alibi(abs(normal(heads))),
        "alibi-of-all": scores.alibi([0.3]),
        "relative": scores.relative(normal(heads, 7)),
        "bias": whole,
        "bias-of-heads": scores.bias(normal(1, heads, nq, nk)),
        "bias-of-batch": scores.bias(normal(batch, 1, nq, nk)),
        "bias-of-keys": scores.bias(normal(batch, heads, 1, nk)),
        "bias-of-queries": scores.bias(normal(batch, heads, nq, 1)),
        "custom": custom,
        "from-the-end": behind,
        "composed": scores.compose(
            whole,
            scores.relative(normal(heads, 3)),
            scores.softcap(1.5),
            scores.alibi(0.1),
            scores.softcap(2),
        ),
    }


NAMES = tuple(learned_scores(1, 1))


def expected(inputs, mask, scale=None, dlse=None, *, score, dropout=0.0, seed=(0, 0)):
    """The gradients of the reference, and these with the error of the inputs' own dtype.

    For dS' of that see `testing.low_precision_backward`. A sum of thousands of its errors is large
    or almost nothing as it happens: taken is what it is to be expected, of rows independent of
    each other, and of the sum's own roundings, one term after the other.
    """
    q, k, v, dout = inputs
    given, how = (dout, q, k, v, mask, scale, dlse), {"dropout": dropout, "seed": seed}
    exact_s, exact, keep = reference.score_gradient(*given, score=score, **how)
    s, ds, _ = testing.low_score_gradient(*given, score, **how)
    rows = np.ravel_multi_index(np.nonzero(keep)[:3], keep.shape[:3])
    ref, low = reference.score_sums(exact_s, exact, keep, score), []
    for x, (shape, index, factor) in zip(ref, reference.score_terms(s, keep, score), strict=True):
        place = np.ravel_multi_index(index, shape, mode="wrap"), rows
        error = error_of_sums(ds[keep] * factor, exact[keep] * factor, *place, x.size, ds.dtype)
        low.append((x + error.reshape(shape)).astype(ds.dtype))
    return ref, tuple(low)


def error_of_sums(low, exact, element, row, size, dtype):
    """Of ``size`` elements: the root of the squares of each row's error and of every rounding."""
    squares = np.zeros(size)
    (of_rows, _), place = np.unique([element, row], axis=1, return_inverse=True)
    errors = np.bincount(place.ravel(), low - exact, of_rows.size)
    np.add.at(squares, of_rows, errors**2)
    order = np.argsort(element, kind="stable")
    element, exact = element[order], exact[order]
    total, first = np.cumsum(exact), np.searchsorted(element, element)
    partial = total - total[first] + exact[first]
    np.add.at(squares, element, (np.finfo(dtype).eps * partial) ** 2 / 12)
    return np.sqrt(squares)


def hold(got, ref, low):
    """Every gradient to its budget."""
    assert len(got) == len(ref) > 0
    for i, values in enumerate(zip(got, ref, low, strict=True)):
        testing.assert_within_reference(*values, name=f"gradient {i}", factor=FACTOR)
