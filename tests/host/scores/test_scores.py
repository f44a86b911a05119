"""Score functions on the CPU and in the reference: values, gradients, errors."""

import functools
import math
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from central_differences import assert_central_differences

import masks
import nbflash
from nbflash import reference, scores
from nbflash.testing import (
    assert_blocks_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
)

RESULTS, FACTORS = ("out", "lse", "dq", "dk", "dv"), (2, 2, 3, 3, 3)
BLOCK = 64
HEADS = 4


def quadratic(s, b, h, q_idx, kv_idx, weight, by_head):
    return by_head[h] * s + weight * s * s / (1 + b) + 0.01 * (q_idx - kv_idx)


def quadratic_slope(s, b, h, q_idx, kv_idx, weight, by_head):
    return by_head[h] + 2 * weight * s / (1 + b)


def scores_for(nq, nk):
    rng = np.random.default_rng(0)
    by_head = rng.standard_normal(HEADS)
    return {
        "softcap": scores.softcap(1.5),
        "alibi": scores.alibi([0.5, 0.25, 0.1, 0.0]),
        "relative": scores.relative(rng.standard_normal((HEADS, 9))),
        "bias": scores.bias(rng.standard_normal((1, HEADS, nq, nk))),
        "custom": scores.custom(quadratic, quadratic_slope, (0.1, by_head)),
        "composed": scores.compose(scores.softcap(2), scores.alibi(0.1), scores.softcap(3)),
    }


NAMES = tuple(scores_for(1, 1))


def check(score, mask, inputs, names=RESULTS):
    """Run on the CPU and hold every block to its budget."""
    q, k, v, dout = inputs
    out, lse = nbflash.attention(q, k, v, mask, score=score, return_lse=True)
    got = out, lse, *nbflash.attention_backward(dout, q, k, v, out, lse, mask, score=score)
    ref = reference.attention(q, k, v, mask, None, score)
    ref += reference.attention_backward(dout, q, k, v, mask, None, None, score)
    low = low_precision(q, k, v, mask, None, score)
    low += low_precision_backward(dout, q, k, v, mask, None, None, score)
    for name, factor, *values in zip(RESULTS, FACTORS, got, ref, low, strict=True):
        if name in names:
            axis = 2 if name == "lse" else 1
            assert_blocks_within_reference(*values, BLOCK, name=name, factor=factor, axis=axis)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name):
    """Aligned at the end, ragged, with rows and columns that see nothing, one token too."""
    for nq, nk in ((40, 130), (130, 40), (1, 3)):
        score, inputs = scores_for(nq, nk)[name], make_qkv(2, nq, nk, HEADS, 2, 16)
        for mask in (masks.dense(nq, nk), masks.causal(nq, nk), masks.window(nq, nk, left=9)):
            check(score, mask, inputs)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes(dtype):
    """One function for all: the half types compute in float32."""
    score = scores.compose(scores.softcap(2), scores.alibi(0.1), scores.softcap(3))
    check(score, masks.causal(100), make_qkv(1, 100, 100, HEADS, 2, 16, dtype))


def test_gradients_equal_central_differences():
    q, k, v, dout = make_qkv(1, 5, 7, HEADS, 2, 4, np.float64)
    mask, dlse = masks.causal(5, 7), np.random.default_rng(1).standard_normal((1, HEADS, 5))
    for score in scores_for(5, 7).values():
        gradients = reference.attention_backward(dout, q, k, v, mask, None, dlse, score)
        attention = functools.partial(reference.attention, mask=mask, score=score)
        assert_central_differences(attention, (q, k, v), gradients, dout, dlse)


def test_softcap_bounds_and_alibi_decays():
    q, k, v, _ = make_qkv(1, 8, 8, 1, 1, 4, np.float64)
    _, lse = nbflash.attention(100 * q, k, v, score=scores.softcap(2), return_lse=True)
    assert (abs(lse) <= 2 + math.log(8)).all()
    out = nbflash.attention(q, k, v, causal=True, score=scores.alibi(1e4))
    np.testing.assert_array_equal(out, v)


def test_masked_scores_stay_masked():
    """Whatever a function makes of a score that is hidden: 2 for softcap, NaN for a logarithm."""
    q, k, v, dout = make_qkv(1, 40, 40, 1, 1, 8)
    k[:, 20:], v[:, 20:] = np.nan, np.inf
    mask = masks.from_function(lambda q, kv: (kv < 20) & (q >= 0), 40, 40)
    score = scores.compose(scores.softcap(2), scores.custom(_log, _log_slope))
    out, lse = nbflash.attention(q, k, v, mask, score=score, return_lse=True)
    _, dk, dv = nbflash.attention_backward(dout, q, k, v, out, lse, mask, score=score)
    assert not dk[:, 20:].any()
    assert not dv[:, 20:].any()
    clean = q, k[:, :20], v[:, :20]
    exact, _ = reference.attention(*clean, None, None, score)
    low, _ = low_precision(*clean, None, None, score)
    assert_blocks_within_reference(out, exact, low, BLOCK, name="out", axis=1)


@pytest.mark.parametrize("signs", [(1,), (-1,), (-1, -1), (1, -1), (-1, 1)])
def test_moves_of_the_yardstick_add_up(signs):
    """Of a single key the LSE is its score; a function that falls must not take moves back."""
    q, k, v, _ = make_qkv(1, 100, 1, 2, 2, 128)
    score = scores.compose(*(scores.custom(_times, _by_times, (sign,)) for sign in signs))
    _, ref = reference.attention(q, k, v, score=score)
    _, lse = low_precision(q, k, v, score=score)
    units = (lse - ref) / np.spacing(abs(ref).astype(np.float32))
    assert abs(np.median(abs(units)) - 2 * (1 + len(signs))) < 1  # two of the product's


def _times(s, b, h, q_idx, kv_idx, factor):
    return factor * s


def _by_times(s, b, h, q_idx, kv_idx, factor):
    return factor


def _indexed(s, b, h, q_idx, kv_idx, table, at):
    return s + table[at]


def _plus_three(s, b, h, q_idx, kv_idx):
    return s + 3.0


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_numbers_of_numpy_keep_their_type(impl):
    """An index by value."""
    q, k, v, _ = make_qkv(1, 6, 6, HEADS, 2, 8)
    both = (
        scores.custom(_indexed, params=(np.array([0.0, 3.0]), np.int64(1))),
        scores.custom(_plus_three),
    )
    got, expected = (nbflash.attention(q, k, v, score=score, impl=impl) for score in both)
    np.testing.assert_array_equal(got, expected)


def _steps(s, b, h, q_idx, kv_idx, weight):
    return s - (q_idx * weight - kv_idx * weight) * 1e-3 / weight


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    "weight", [np.int32(2**30), np.int16(300), np.uint8(200), np.uint64(3), np.float16(1.1)]
)
def test_numbers_of_numpy_do_not_wrap(weight, impl):
    """The reference counts in Python's numbers, kernels in 64 bits."""
    q, k, v, _ = make_qkv(1, 6, 6, HEADS, 2, 8, np.float64)
    both = (scores.custom(_steps, params=(x,)) for x in (weight, weight.item()))
    got, exact = (nbflash.attention(q, k, v, score=x, impl=impl, return_lse=True)[1] for x in both)
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["f4", np.float16, ml_dtypes.bfloat16, ">f4", ">i4", np.int16])
def test_arrays_of_other_types(dtype, impl):
    """And their gradients."""
    q, k, v, dout = make_qkv(1, 6, 6, HEADS, 2, 8, np.float64)
    array, results = np.arange(36).reshape(1, 1, 6, 6), []
    for x in (dtype, np.float64):
        score = scores.bias(array.astype(x))
        out, lse = nbflash.attention(q, k, v, score=score, impl=impl, return_lse=True)
        given = dout, q, k, v, out, lse
        results.append((lse, nbflash.score_backward(*given, score=score, impl=impl)[0]))
    for got, exact in zip(*results, strict=True):
        np.testing.assert_array_equal(got, exact)


def _over_distance(s, b, h, q_idx, kv_idx):
    return s / abs(q_idx - kv_idx)


def _over_distance_slope(s, b, h, q_idx, kv_idx):
    return 1 / abs(q_idx - kv_idx)


def _by_parts(s, b, h, q_idx, kv_idx):
    return s + q_idx // abs(q_idx - kv_idx) - q_idx % abs(q_idx - kv_idx)


@pytest.mark.parametrize(
    ("fn", "grad"), [(_over_distance, _over_distance_slope), (_by_parts, lambda *place: 1.0)]
)
def test_a_function_without_a_value_where_pairs_are_hidden(fn, grad):
    mask = masks.from_function(lambda i, j: i != j, 20, 20)
    check(scores.custom(fn, grad), mask, make_qkv(1, 20, 20, HEADS, 2, 8))


def _log(s, b, h, q_idx, kv_idx):
    return math.log(3 + s)


def _log_slope(s, b, h, q_idx, kv_idx):
    return 1 / (3 + s)


def test_plans_know_their_score():
    q, k, v, dout = make_qkv(1, 20, 20, 2, 1, 8)
    plain, capped = nbflash.plan(q, k, v), nbflash.plan(q, k, v, score=scores.softcap(1))
    assert capped is nbflash.plan(q, k, v, score=scores.softcap(1))
    assert capped is not nbflash.plan(q, k, v, score=scores.softcap(2)) is not plain
    out, pullback = capped.vjp(q, k, v)
    _, lse = capped(q, k, v)
    expected = nbflash.attention_backward(dout, q, k, v, out, lse, score=scores.softcap(1))
    for a, b in zip(pullback(dout), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_equal_scores_have_equal_contents():
    """Whatever the order in memory. A key has 16 bytes of an array, not the array."""
    table = np.random.default_rng(0).standard_normal((HEADS, 9))
    score = scores.relative(table)
    assert score == scores.relative(np.asfortranarray(table))
    assert hash(score) == hash(scores.relative(np.asfortranarray(table)))
    assert score != scores.relative(np.nextafter(table, 1))
    assert score != scores.relative(table.astype(np.float32))
    assert scores.alibi(0.1) != scores.alibi(0.2)
    large = scores.bias(np.zeros((1, 1, 64, 64)))
    assert large.nbytes == 64 * 64 * 8
    assert len(pickle.dumps(large._key)) < large.nbytes


def test_the_shape_of_a_parameter_counts():
    """Its bytes do not tell it."""
    one, other = (scores.custom(_indexed, params=(np.zeros(n), 0)) for n in ((2, 3), (3, 2)))
    assert one != other


def test_a_function_without_a_gradient_has_no_backward_pass():
    q, k, v, dout = make_qkv(1, 6, 6, 1, 1, 8)
    score = scores.custom(_log)
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True)
    with pytest.raises(ValueError, match=r"_log, .*test_scores.py:\d+.* has no gradient"):
        nbflash.attention_backward(dout, q, k, v, out, lse, score=score)


def _two(s, b):
    return s


def _unknown(s, b, h, q_idx, kv_idx):
    return s + kv_idx.page


def test_what_cannot_be_compiled_is_named():
    q, k, v, _ = make_qkv(1, 6, 6, 1, 1, 8)
    with pytest.raises(
        TypeError, match=r"score: _unknown, .*test_scores.py:\d+ cannot be compiled"
    ):
        nbflash.attention(q, k, v, score=scores.custom(_unknown))


def _nothing(s, b, h, q_idx, kv_idx):
    pass


def _complex(s, b, h, q_idx, kv_idx):
    return 1j * s


def _undefined(s, b, h, q_idx, kv_idx):
    return s + slope  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (_nothing, "must return a number, got None"),
        (_complex, r"must return a number, got \(?.*j"),
        (_undefined, "cannot be computed: name 'slope' is not defined"),
        (_unknown, "cannot be computed: 'int' object has no attribute 'page'"),
    ],
)
def test_the_reference_names_what_fails(fn, match):
    """A function, or its gradient."""
    q, k, v, dout = make_qkv(1, 6, 6, 1, 1, 8)
    match = rf"score: {fn.__name__}, .*test_scores.py:\d+ {match}"
    with pytest.raises(TypeError, match=match):
        nbflash.attention(q, k, v, score=scores.custom(fn), impl="reference")
    score = scores.custom(_log, fn)
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True, impl="reference")
    with pytest.raises(TypeError, match=match):
        nbflash.attention_backward(dout, q, k, v, out, lse, score=score, impl="reference")


def _raises_late(s, b, h, q_idx, kv_idx):
    if q_idx > 3:
        raise ValueError("too far")
    return s


def _nothing_late(s, b, h, q_idx, kv_idx):
    return None if q_idx > 3 else s


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("fn", [_raises_late, _nothing_late])
def test_what_fails_for_some_queries_is_named(fn, impl):
    """In the message or in a note; of a gradient, `cpu` knows the function that it belongs to."""
    q, k, v, dout = make_qkv(1, 6, 6, 1, 1, 8)
    with pytest.raises((TypeError, ValueError)) as forward:
        nbflash.attention(q, k, v, score=scores.custom(fn), impl=impl)
    out, lse = nbflash.attention(q, k, v, score=scores.custom(_log), return_lse=True, impl=impl)
    score = scores.custom(_log, fn)
    with pytest.raises((TypeError, ValueError)) as backward:
        nbflash.attention_backward(dout, q, k, v, out, lse, score=score, impl=impl)
    for failed, named in ((forward, fn), (backward, fn if impl == "reference" else _log)):
        text = "\n".join([str(failed.value), *getattr(failed.value, "__notes__", ())])
        assert re.search(rf"{named.__name__}, .*test_scores.py:\d+", text)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("fn", [_nothing, _complex])
def test_what_is_no_number_is_named(fn, impl):
    q, k, v, _ = make_qkv(1, 6, 6, 1, 1, 8)
    match = rf"score: {fn.__name__}, .*test_scores.py:\d+ must return a number, got"
    with pytest.raises(TypeError, match=match):
        nbflash.attention(q, k, v, score=scores.custom(fn), impl=impl)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: scores.custom(_two), TypeError, r"fn must take \(s, b, h, q_idx, kv_idx\)"),
        (lambda: scores.custom(_log, _two), TypeError, "grad must take"),
        (lambda: scores.custom(_log, params=(1.0,)), TypeError, r"params\[0\]"),
        (lambda: scores.custom("x"), TypeError, "fn must be a Python function"),
        (lambda: scores.custom(None), TypeError, "fn must be a Python function, got NoneType"),
        (lambda: scores.custom(_log, None, "x"), TypeError, "params must be a tuple, got str"),
        (
            lambda: scores.custom(_log, params=["x"]),
            TypeError,
            r"params\[0\] must be a NumPy or CuPy",
        ),
        (lambda: scores.softcap(0), ValueError, "cap must be positive and finite, got 0"),
        (lambda: scores.softcap("x"), TypeError, "cap must be a number"),
        (lambda: scores.alibi(None), TypeError, "slopes must be .* a number: None is no number"),
        (lambda: scores.alibi("x"), TypeError, "slopes must be .* a number: could not convert"),
        (lambda: scores.alibi(np.longdouble(1)), TypeError, "slopes must be of float32, .* integ"),
        (lambda: scores.alibi([1, np.inf]), ValueError, r"slopes must be finite, got \[ 1. inf\]"),
        (lambda: scores.alibi([[1.0]]), ValueError, "slopes must have shape .heads,."),
        (lambda: scores.relative(np.zeros((2, 4))), ValueError, "odd number of columns"),
        (lambda: scores.bias(np.zeros(3)), ValueError, "array must have shape .batch or 1, heads"),
        (lambda: scores.bias(np.zeros((1,) * 4, complex)), TypeError, "bool, got complex128"),
        (lambda: scores.bias(np.ones((1,) * 4, bool)), TypeError, "got bool; masks.from_dense"),
        (lambda: scores.compose(1), TypeError, "compose takes scores, got int"),
    ],
)
def test_bad_scores(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("score", "error", "match"),
    [
        (scores.alibi([1.0, 2.0]), ValueError, "alibi has heads=2, got inputs with heads=4"),
        (scores.relative(np.zeros((3, 5))), ValueError, "relative has heads=3"),
        (scores.bias(np.zeros((1, 1, 7, 6))), ValueError, "bias has nq=7, got inputs with nq=6"),
        (quadratic, TypeError, "score must be made by nbflash.scores, got function"),
    ],
)
def test_scores_that_do_not_fit(score, error, match):
    q, k, v, _ = make_qkv(1, 6, 6, 4, 2, 8)
    with pytest.raises(error, match=match):
        nbflash.attention(q, k, v, score=score)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(20, 20), (4, 1, 20)])
def test_a_bias_of_fewer_axes_is_of_the_last_ones(impl, shape):
    q, k, v, dout = make_qkv(2, 20, 20, 4, 2, 8)
    array = np.random.default_rng(4).standard_normal(shape)
    whole = array.reshape((1,) * (4 - len(shape)) + shape)
    got, want = (
        nbflash.plan(q, k, v, score=scores.bias(x), impl=impl).vjp(q, k, v, with_score=True)
        for x in (array, whole)
    )
    np.testing.assert_array_equal(got[0], want[0])
    (ours,), (theirs,) = got[1](dout)[3], want[1](dout)[3]
    assert ours.shape == shape
    np.testing.assert_array_equal(ours, theirs.reshape(shape))
