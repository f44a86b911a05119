"""The specification itself: against differences, against a row-by-row sum, and at its corners."""

import itertools
import math

import numpy as np
import pytest
from central_differences import assert_central_differences

from nbflash import reference, scores
from nbflash.testing import (
    assert_within_reference,
    code_word_oracle,
    low_precision,
    low_precision_backward,
    make_qkv,
    small_integers,
)

EPS = np.finfo(np.float64).eps


def _masks(batch, heads, nq, nk):
    """None, causal (bottom-right), banded, causal with an empty first row, per head, per batch."""
    rows, cols = np.arange(nq)[:, None] + nk - nq, np.arange(nk)
    rng = np.random.default_rng(nq * nk)
    return {
        "none": None,
        "causal": cols <= rows,
        "band": abs(rows - cols) <= 1,
        "dead-row": (cols <= rows) & (rows > nk - nq),
        "per-head": rng.random((1, heads, nq, nk)) < 0.5,
        "per-batch": rng.random((batch, 1, nq, nk)) < 0.5,
    }


# One position, nq below nk, nq above nk (causal leaves empty rows at the top), equal; a key/value
# head of its own, shared by two and shared by all three query heads.
SHAPES = [(1, 1, 1, 1, 1, 3), (2, 2, 5, 2, 1, 3), (1, 5, 3, 3, 1, 2), (2, 4, 4, 4, 2, 1)]
MASKS = ["none", "causal", "band", "dead-row", "per-head", "per-batch"]
CASES = list(itertools.product(SHAPES, MASKS))
IDS = ["x".join(map(str, shape)) + f"-{mask}" for shape, mask in CASES]


def _case(shape, mask, seed=0):
    batch, nq, nk, heads, heads_kv, head_dim = shape
    arrays = make_qkv(batch, nq, nk, heads, heads_kv, head_dim, np.float64, seed)
    return *arrays, _masks(batch, heads, nq, nk)[mask]


@pytest.mark.parametrize(
    ("scale", "loss"),
    [(None, "out"), (0.7, "out and lse"), (-1.3, "out and lse"), (0.9, "lse")],
    ids=["", "dlse", "negative", "dlse-alone"],
)
@pytest.mark.parametrize(("shape", "mask"), CASES, ids=IDS)
def test_gradients_equal_central_differences(shape, mask, scale, loss):
    q, k, v, dout, keep = _case(shape, mask)
    batch, nq, _, heads, _, _ = shape
    dout = dout * ("out" in loss)
    dlse = np.random.default_rng(1).standard_normal((batch, heads, nq)) * ("lse" in loss)

    given = dlse if "lse" in loss else None
    grads = reference.attention_backward(dout, q, k, v, keep, scale, given)
    attention = lambda q, k, v: reference.attention(q, k, v, keep, scale)
    assert_central_differences(attention, (q, k, v), grads, dout, dlse)


@pytest.mark.parametrize(("shape", "mask"), CASES, ids=IDS)
def test_forward_equals_a_sum_over_attended_keys(shape, mask):
    q, k, v, _, keep = _case(shape, mask)
    batch, nq, nk, heads, heads_kv, head_dim = shape
    keep = np.broadcast_to(True if keep is None else keep, (batch, heads, nq, nk))
    out64, lse64 = np.zeros(q.shape), np.full((batch, heads, nq), -np.inf)
    for b, h, i in np.ndindex(batch, heads, nq):
        kv = h // (heads // heads_kv)
        attended = [j for j in range(nk) if keep[b, h, i, j]]
        scores = [math.fsum(q[b, i, h] * k[b, j, kv]) / math.sqrt(head_dim) for j in attended]
        if attended:
            weights = [math.exp(s) for s in scores]
            total = math.fsum(weights)
            lse64[b, h, i] = math.log(total)
            for w, j in zip(weights, attended, strict=True):
                out64[b, i, h] += w / total * v[b, j, kv]
    out, lse = reference.attention(q, k, v, keep)
    out_low, lse_low = low_precision(*(x.astype(np.float32) for x in (q, k, v)), keep)
    assert_within_reference(out.astype(np.float32), out64, out_low, "out")
    assert_within_reference(lse.astype(np.float32), lse64, lse_low, "lse")
    assert np.abs(out - out64).max() <= nk * head_dim * EPS * np.abs(v).max()


def test_results_are_float64_in_the_public_layout():
    q, k, v, dout = make_qkv(2, 3, 5, 4, 2, 8, np.float16)
    out, lse = reference.attention(q, k, v)
    dq, dk, dv = reference.attention_backward(dout, q, k, v)
    assert {x.dtype for x in (out, lse, dq, dk, dv)} == {np.dtype(np.float64)}
    assert (out.shape, lse.shape) == ((2, 3, 4, 8), (2, 4, 3))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_small_cases_by_hand():
    q, k, v, _ = make_qkv(1, 2, 1, 1, 1, 4, np.float64)
    out, lse = reference.attention(q, k, v, scale=2.0)
    assert np.array_equal(out, np.broadcast_to(v, out.shape))  # a single key is copied
    assert_within_reference(lse[0, 0], 2 * q[0, :, 0] @ k[0, 0, 0], lse[0, 0], "lse of one key")
    q, k, v, _ = small_integers(1, 3, 8, 1, 1, 4, np.float64)
    out, lse = reference.attention(q, k, v, scale=0.0)  # all scores equal: the mean of v
    assert np.array_equal(out, np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape))
    assert np.array_equal(lse, np.full((1, 1, 3), math.log(8)))
    ones = np.ones_like(v)
    assert np.allclose(reference.attention(q, k, ones)[0], 1, rtol=0, atol=8 * EPS)


def test_code_words_are_gathered_bit_for_bit():
    case = code_word_oracle(9, 5, nk=17)
    out, lse = reference.attention(case.q, case.k, case.v, scale=case.scale)
    dq, dk, dv = reference.attention_backward(case.dout, case.q, case.k, case.v, scale=case.scale)
    assert np.array_equal(out, case.out)
    assert np.array_equal(lse, case.lse)
    assert np.array_equal(dv, case.dv)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_shared_heads_equal_repeated_heads(group):
    heads = 6
    q, k, v, dout = make_qkv(2, 5, 7, heads, heads // group, 4, np.float64)
    k_all, v_all = (np.repeat(x, group, axis=2) for x in (k, v))
    for one, all_ in zip(
        reference.attention(q, k, v), reference.attention(q, k_all, v_all), strict=True
    ):
        assert np.array_equal(one, all_)
    dq, dk, dv = reference.attention_backward(dout, q, k, v)
    dq_all, dk_all, dv_all = reference.attention_backward(dout, q, k_all, v_all)
    assert np.array_equal(dq, dq_all)
    for got, full in ((dk, dk_all), (dv, dv_all)):
        assert np.array_equal(got, full.reshape(2, 7, heads // group, group, 4).sum(axis=3))


def test_rows_that_attend_nothing():
    q, k, v, dout = make_qkv(2, 6, 5, 2, 1, 3, np.float64)
    keep = np.ones((6, 5), bool)
    keep[[0, 3, 5]] = False
    out, lse = reference.attention(q, k, v, keep)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, keep)
    dead = [0, 3, 5]
    assert not out[:, dead].any()
    assert np.array_equal(np.isneginf(lse), np.broadcast_to(~keep.any(axis=1), lse.shape))
    assert not dq[:, dead].any()
    # what only dead rows could reach is untouched: the same gradients without them
    alive = [1, 2, 4]
    alive_grads = reference.attention_backward(dout[:, alive], q[:, alive], k, v)
    for got, want in zip((dq[:, alive], dk, dv), alive_grads, strict=True):
        low = low_precision_backward(dout[:, alive], q[:, alive], k, v)
        low = dict(zip([x.shape for x in low], low, strict=False))[got.shape]
        assert_within_reference(got, want, low, "gradient without the dead rows")


def test_attended_scores_of_minus_infinity_weigh_nothing():
    """An additive -inf in the scores is a mask: alone in a row it leaves a row of weight zero."""
    q, k, v, dout = make_qkv(1, 2, 3, 1, 1, 2, np.float64)
    q[..., 0] = 1.0
    k[0, :2, 0, 0] = -np.inf
    out, lse = reference.attention(q, k, v, np.array([[True, True, False], [True, True, True]]))
    assert np.array_equal(out[0, :, 0], [[0, 0], v[0, 2, 0]])
    assert lse[0, 0, 0] == -np.inf
    _, _, dv = reference.attention_backward(dout, q, k, v)
    assert np.array_equal(dv[0, :2], np.zeros((2, 1, 2)))


@pytest.mark.parametrize(("nq", "nk"), [(0, 4), (4, 0), (0, 0)])
def test_empty_sequences(nq, nk):
    q, k, v, dout = make_qkv(1, nq, nk, 2, 1, 3, np.float64)
    out, lse = reference.attention(q, k, v)
    assert np.array_equal(out, np.zeros((1, nq, 2, 3)))
    assert np.array_equal(lse, np.full((1, 2, nq), -np.inf))
    for grad, x in zip(reference.attention_backward(dout, q, k, v), (q, k, v), strict=True):
        assert np.array_equal(grad, np.zeros_like(x))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_the_mask_leaves_out_never_arrives(poison):
    """Poisoned keys that nobody attends and poisoned queries that attend nothing."""
    q, k, v, dout = make_qkv(2, 6, 7, 2, 2, 3, np.float64)
    keep = np.tril(np.ones((6, 7), bool))
    keep[2] = False
    keep[:, [1, 6]] = False
    clean_out, clean_lse = reference.attention(q, k, v, keep)
    clean = reference.attention_backward(dout, q, k, v, keep)
    for x in (k, v):
        x[:, [1, 6]] = poison
    for x in (q, dout):
        x[:, 2] = poison
    out, lse = reference.attention(q, k, v, keep)
    assert np.array_equal(out, clean_out)
    assert np.array_equal(lse, clean_lse)
    for got, want in zip(reference.attention_backward(dout, q, k, v, keep), clean, strict=True):
        assert np.array_equal(got, want)


def test_a_key_poisons_only_the_rows_that_attend_it():
    q, k, v, dout = make_qkv(1, 5, 5, 1, 1, 3, np.float64)
    keep = np.tril(np.ones((5, 5), bool))
    clean_out, _ = reference.attention(q, k, v, keep)
    v_bad = v.copy()
    v_bad[0, 3, 0, 1] = np.nan
    out, lse = reference.attention(q, k, v_bad, keep)
    assert np.array_equal(np.argwhere(np.isnan(out[0, :, 0])), [[3, 1], [4, 1]])
    elsewhere = ~np.isnan(out)
    assert np.array_equal(out[elsewhere], clean_out[elsewhere])
    assert np.isfinite(lse).all()

    for infinity in (np.inf, -np.inf):
        v_bad[0, 3, 0, 1] = infinity
        out, _ = reference.attention(q, k, v_bad, keep)
        assert np.array_equal(np.argwhere(out[0, :, 0] == infinity), [[3, 1], [4, 1]])
        assert np.array_equal(out[elsewhere], clean_out[elsewhere])

    k_bad = k.copy()
    k_bad[0, 3, 0, 1] = np.nan
    out, lse = reference.attention(q, k_bad, v, keep)
    assert np.isnan(out[0, 3:]).all()
    assert np.isnan(lse[0, 0, 3:]).all()
    assert np.array_equal(out[0, :3], clean_out[0, :3])
    _, dk, dv = reference.attention_backward(dout, q, k_bad, v, keep)
    dq, _, _ = reference.attention_backward(dout, q, k_bad, v, keep)
    assert np.isfinite(dq[0, :3]).all()
    assert np.isnan(dq[0, 3:]).all()
    # rows 3 and 4 attend keys 0..4: every key's gradient has a NaN term
    assert np.isnan(dk[0]).all()
    assert np.isnan(dv[0]).all()

    q_bad = q.copy()
    q_bad[0, 1] = np.nan  # row 1 attends keys 0 and 1 alone
    _, dk, dv = reference.attention_backward(dout, q_bad, k, v, keep)
    for grad in (dk, dv):
        assert np.isnan(grad[0, :2]).all()
        assert np.isfinite(grad[0, 2:]).all()


@pytest.mark.parametrize("mask", MASKS)
def test_the_order_of_keys_and_queries_does_not_matter(mask):
    shape = (2, 9, 11, 2, 1, 4)
    q, k, v, dout, keep = _case(shape, mask)
    keep = np.broadcast_to(True if keep is None else keep, (2, 2, 9, 11))
    rng = np.random.default_rng(3)
    rows, cols = rng.permutation(9), rng.permutation(11)
    permuted = q[:, rows], k[:, cols], v[:, cols], keep[:, :, rows][..., cols]
    out, lse = reference.attention(q, k, v, keep)
    out_p, lse_p = reference.attention(*permuted)
    out_low, lse_low = low_precision(q, k, v, keep)
    assert_within_reference(out_p, out[:, rows], out_low[:, rows], "out")
    assert_within_reference(lse_p, lse[:, :, rows], lse_low[:, :, rows], "lse")
    grads = reference.attention_backward(dout, q, k, v, keep)
    grads_p = reference.attention_backward(dout[:, rows], *permuted)
    lows = low_precision_backward(dout, q, k, v, keep)
    for got, want, low, order in zip(grads_p, grads, lows, (rows, cols, cols), strict=True):
        assert_within_reference(got, want[:, order], low[:, order], "gradient")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cuts", [(4,), (0, 3, 8)], ids=["two-parts", "four-parts-one-empty"])
def test_parts_merge_by_their_lse(mask, cuts):
    q, k, v, _, keep = _case((2, 6, 9, 2, 2, 4), mask)
    keep = np.broadcast_to(True if keep is None else keep, (2, 2, 6, 9))
    edges = (0, *cuts, 9)
    parts = [
        reference.attention(q, k[:, a:b], v[:, a:b], keep[..., a:b])
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = reference.attention(q, k, v, keep)
    out_low, lse_low = low_precision(q, k, v, keep)
    merged_out, merged_lse = reference.merge(parts)
    # each part is rounded on its own before the weights are
    factor = 2 * len(parts)
    assert_within_reference(merged_out, out, out_low, "out", factor)
    assert_within_reference(merged_lse, lse, lse_low, "lse", factor)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_a_merge_equal_central_differences(mask):
    """Of every out and lse of two parts, one of which may attend nothing in a row."""
    q, k, v, dout, keep = _case((1, 4, 5, 2, 2, 2), mask)
    keep = np.broadcast_to(True if keep is None else keep, (1, 2, 4, 5))
    parts = [
        reference.attention(q, k[:, at], v[:, at], keep[..., at])
        for at in (slice(0, 2), slice(2, 5))
    ]
    dlse = np.random.default_rng(2).standard_normal((1, 2, 4))

    def merged(*arrays):
        return reference.merge([arrays[:2], arrays[2:]])

    gradients = itertools.chain(*reference.merge_backward(dout, dlse, parts))
    assert_central_differences(merged, [*itertools.chain(*parts)], [*gradients], dout, dlse)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_dlse_counts_where_something_is_attended(garbage):
    """In a row that attends nothing, or scores of -inf alone, it is ignored; elsewhere it shows."""
    q, k, v, dout = make_qkv(1, 4, 5, 1, 1, 2, np.float64)
    q[..., 0], k[0, :2, 0, 0] = 1.0, -np.inf
    keep = np.ones((4, 5), bool)
    keep[1], keep[2, 2:] = False, False
    dlse = np.zeros((1, 1, 4))
    clean = reference.attention_backward(dout, q, k, v, keep, dlse=dlse)
    dlse[..., [1, 2]] = garbage
    dirty = reference.attention_backward(dout, q, k, v, keep, dlse=dlse)
    dlse[..., 3] = garbage
    dq, dk, dv = reference.attention_backward(dout, q, k, v, keep, dlse=dlse)
    for a, b in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(dq[:, :3], clean[0][:, :3])
    np.testing.assert_array_equal(dv, clean[2])
    assert not np.isfinite(dq[:, 3]).any()
    assert not np.isfinite(dk[:, 2:]).any()


@pytest.mark.parametrize("shift", [-1000.0, -120.0, 120.0, 1000.0])
def test_a_shift_of_all_scores_moves_the_lse_alone(shift):
    """An extra feature, 1 in q and ``shift`` in k, adds ``shift`` to every score."""
    q, k, v, dout, keep = _case((1, 7, 9, 2, 2, 4), "dead-row")
    pad = [(0, 0)] * 3 + [(0, 1)]
    q1, k1, v1, dout1 = (
        np.pad(x, pad, constant_values=c) for x, c in ((q, 1), (k, shift), (v, 0), (dout, 0))
    )
    out, lse = reference.attention(q, k, v, keep, scale=1.0)
    out1, lse1 = reference.attention(q1, k1, v1, keep, scale=1.0)
    # the shifted scores are rounded at the size of the shift
    rounding = EPS * abs(shift)
    assert np.abs(out1[..., :4] - out).max() <= 4 * rounding * np.abs(v).max()
    alive = np.isfinite(lse)
    assert np.array_equal(np.isfinite(lse1), alive)
    assert np.abs(lse1[alive] - lse[alive] - shift).max() <= 4 * rounding
    grads = reference.attention_backward(dout, q, k, v, keep, scale=1.0)
    grads1 = reference.attention_backward(dout1, q1, k1, v1, keep, scale=1.0)
    size = np.abs(dout).max() * np.abs(v).max() * 7 * max(np.abs(q).max(), np.abs(k).max())
    for got, want in zip(grads1, grads, strict=True):
        assert np.abs(got[..., :4] - want).max() <= 16 * rounding * size


def test_a_mask_object_is_asked_for_its_dense_form():
    class Lower:
        def dense(self):
            return np.tril(np.ones((4, 4), bool))

    q, k, v, dout = make_qkv(1, 4, 4, 2, 1, 3, np.float64)
    for got, want in zip(
        reference.attention(q, k, v, Lower()),
        reference.attention(q, k, v, Lower().dense()),
        strict=True,
    ):
        assert np.array_equal(got, want)
    for got, want in zip(
        reference.attention_backward(dout, q, k, v, Lower()),
        reference.attention_backward(dout, q, k, v, Lower().dense()),
        strict=True,
    ):
        assert np.array_equal(got, want)


def test_inputs_are_left_alone():
    q, k, v, dout = make_qkv(1, 4, 4, 2, 1, 3, np.float64)
    before = [x.copy() for x in (q, k, v, dout)]
    reference.attention(q, k, v)
    reference.attention_backward(dout, q, k, v)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v, dout), before, strict=True))


def test_nothing_is_dropped_unless_asked_for():
    q, k, v, dout = make_qkv(1, 3, 5, 2, 1, 4, np.float64)
    score = scores.bias(np.ones((2, 3, 5)))
    given = {"mask": np.tri(3, 5, 2, bool), "score": score}
    for function, arrays in (
        (reference.attention, (q, k, v)),
        (reference.attention_backward, (dout, q, k, v)),
        (reference.score_backward, (dout, q, k, v)),
        (reference.score_gradient, (dout, q, k, v)),
    ):
        for x, y in zip(
            function(*arrays, **given), function(*arrays, **given, dropout=0.0), strict=True
        ):
            np.testing.assert_array_equal(x, y)
