"""Gradients of a score's arrays on the CPU and in the reference: values, errors, determinism."""

from types import SimpleNamespace

import numpy as np
import pytest
from central_differences import assert_central_differences
from score_cases import HEADS, quadratic, quadratic_slope
from score_gradients import (
    NAMES,
    by_head_part,
    expected,
    hold,
    learned_scores,
    table_part,
)

import masks
import nbflash
from nbflash import reference, scores
from nbflash.backends.cpu.score_gradient import grouped
from nbflash.backends.registry import BACKENDS
from nbflash.inputs.problem import check_forward
from nbflash.testing import make_qkv

MASKS = ("dense", "causal", "window")
DROPOUT = {"dropout": 0.3, "seed": (5, 6)}


def mask_of(name, nq, nk):
    if name == "window":
        return masks.window(nq, nk, left=9, right=0)
    return getattr(masks, name)(nq, nk)


def gradients(inputs, mask, score, dlse=None, **how):
    """Those of the CPU after a forward pass of the reference."""
    q, k, v, dout = inputs
    results = reference.attention(q, k, v, mask, score=score, **how)
    out, lse = (x.astype(q.dtype) for x in results)
    return nbflash.score_backward(dout, q, k, v, out, lse, mask, score=score, dlse=dlse, **how)


@pytest.mark.parametrize("name", NAMES)
def test_every_array(name):
    """Aligned at the end, ragged, with rows and columns that see nothing, one token too."""
    for i, (nq, nk) in enumerate(((40, 130), (130, 40), (1, 3))):
        score, inputs = learned_scores(nq, nk, 2)[name], make_qkv(2, nq, nk, HEADS, 2, 16)
        dlse = np.random.default_rng(i).standard_normal((2, HEADS, nq)).astype(np.float32)
        last = DROPOUT if name == "bias-of-heads" else {}
        for mask_name, how in zip(MASKS, ({}, {"scale": -0.4}, last), strict=True):
            mask = mask_of(mask_name, nq, nk)
            got = gradients(inputs, mask, score, dlse, **how)
            hold(got, *expected(inputs, mask, dlse=dlse, score=score, **how))


def scores_of(arrays):
    """A chain with every kind of array; alibi, which needs no slope of its own, comes last."""
    bias, table, by_head, of_pairs, slopes = arrays
    parts = (None, by_head_part, table_part)
    return scores.compose(
        scores.bias(bias),
        scores.softcap(2),
        scores.relative(table),
        scores.custom(quadratic, quadratic_slope, (0.1, by_head, of_pairs), parts),
        scores.softcap(3),
        scores.alibi(slopes),
    )


def test_long_sums_are_of_float64():
    """Of two keys P = 1/2 and dS = ±dO/2: float32 would lose the ones beside 2^24."""
    n, zeros = 4096, np.zeros((1, 2, 1, 1), np.float32)
    dout = np.full((1, n, 1, 1), 2, np.float32)
    dout[0, [0, -1], 0, 0] = 2**25, -(2**25)
    v, out = zeros + np.float32([1, -1]).reshape(zeros.shape), np.zeros_like(dout)
    lse = np.full((1, 1, n), np.log(2), np.float32)
    score = scores.bias(np.zeros((1, 1, 1, 2), np.float32))
    (got,) = nbflash.score_backward(dout, out, zeros, v, out, lse, score=score, impl="cpu")
    np.testing.assert_array_equal(got.ravel(), [n - 2, 2 - n])


@pytest.mark.parametrize("shape", [(2, HEADS, 4, 6), (1, 1, 4, 1), (2, 1, 1, 6)], ids=str)
def test_gradients_equal_central_differences(shape):
    """A step of eps^(1/3) leaves an error of about eps^(2/3) of the loss's magnitude.

    Queries see a key behind their own, too.
    """
    rng = np.random.default_rng(2)
    nq, nk = 4, 6
    shapes = shape, (HEADS, 5), (HEADS,), (nq, nk), (HEADS,)
    arrays = [rng.standard_normal(s) for s in shapes]
    q, k, v, dout = make_qkv(2, nq, nk, HEADS, 2, 4, np.float64)
    mask, dlse = masks.window(nq, nk, left=9, right=1), rng.standard_normal((2, HEADS, nq))

    def attention(*arrays):
        return reference.attention(q, k, v, mask, 0.7, scores_of(arrays))

    score, how = scores_of(arrays), {"scale": 0.7, "impl": "reference"}
    out, lse = nbflash.attention(q, k, v, mask, score=score, return_lse=True, **how)
    found = nbflash.score_backward(dout, q, k, v, out, lse, mask, score=score, dlse=dlse, **how)
    assert {x.dtype for x in found} == {np.dtype(np.float64)}
    assert_central_differences(attention, arrays, found, dout, dlse)


def test_what_is_masked_gets_exactly_zero():
    """Whatever is there, NaN and infinity too."""
    q, k, v, dout = clean = make_qkv(1, 40, 40, HEADS, 2, 8)
    mask = masks.from_function(lambda q, kv: (kv < 20) & (q > 4), 40, 40)
    k[:, 20:], v[:, 20:], q[:, :5], dout[:, :5] = np.nan, np.inf, np.nan, np.nan
    score = learned_scores(40, 40)["bias"]
    (got,) = gradients((q, k, v, dout), mask, score)
    assert not got[..., 20:].any()
    assert not got[:, :, :5].any()
    clean = [np.nan_to_num(x, posinf=0) for x in clean]
    hold((got,), *expected(clean, mask, score=score))


def test_a_plan_and_its_pullback():
    q, k, v, dout = make_qkv(1, 20, 20, HEADS, 2, 8)
    score = learned_scores(20, 20)["bias"]
    plan = nbflash.plan(q, k, v, score=score)
    (out, lse), pullback = plan.vjp(q, k, v, return_lse=True, with_score=True)
    dlse = np.ones_like(lse)
    (bias,) = plan.score_backward(dout, q, k, v, out, lse, dlse=dlse)
    *others, (again,) = pullback(dout, dlse)
    np.testing.assert_array_equal(bias, again)
    assert len(others) == 3
    assert bias.dtype == np.float32
    assert bias.flags.c_contiguous


def test_nothing_to_attend():
    q, k, v, dout = make_qkv(1, 5, 5, HEADS, 2, 8)
    score = learned_scores(5, 0)["alibi"]
    (got,) = gradients((q, k[:, :0], v[:, :0], dout), None, score)
    assert not got.any()


def test_a_number_is_a_constant():
    """And of an array with None there is no gradient: those of the others remain."""
    inputs = make_qkv(1, 9, 9, HEADS, 2, 8)
    by_head, table = np.ones(HEADS), np.ones((9, 9))
    parts = (None, None, table_part)
    custom = scores.custom(quadratic, quadratic_slope, (0.1, by_head, table), parts)
    (got,) = gradients(inputs, None, scores.compose(scores.alibi(0.1), custom))
    assert got.shape == (9, 9)
    assert scores.alibi(0.1) != scores.alibi([0.1])


def _index_alone(s, b, h, q_idx, kv_idx, table):
    return q_idx, kv_idx, 1


def _no_pair(s, b, h, q_idx, kv_idx, table):
    return 1.0


def _plus(s, b, h, q_idx, kv_idx, table):
    return s + table[q_idx, kv_idx]


def _slope(s, b, h, q_idx, kv_idx, table):
    return 1.0


TABLE = np.zeros((6, 6))


@pytest.mark.parametrize(
    ("score", "error", "match"),
    [
        (None, ValueError, "score must have an array with a gradient, got None"),
        (scores.softcap(2), ValueError, r"Score\(softcap\(2\)\) has no array with a gradient"),
        (scores.alibi(2), ValueError, r"Score\(alibi\) has no array with a gradient"),
        (
            scores.custom(_plus, _slope, (TABLE,)),
            ValueError,
            r"custom\(_plus, .*test_score_gradients.py:\d+\) has arrays without gradients: pass",
        ),
        (
            scores.custom(_plus, None, (TABLE,), (_index_alone,)),
            ValueError,
            r"custom\(_plus, .*\) has no gradient: pass grad",
        ),
        (
            scores.custom(_plus, _slope, (TABLE,), (_no_pair,)),
            TypeError,
            r"score: _no_pair, .*test_score_gradients.py:\d+ must return an index and a number",
        ),
    ],
)
def test_scores_without_gradients(score, error, match):
    inputs = make_qkv(1, 6, 6, 1, 1, 8)
    with pytest.raises(error, match=match):
        gradients(inputs, None, score)


def test_the_reference_names_what_is_no_pair():
    q, k, v, dout = make_qkv(1, 6, 6, HEADS, 2, 8)
    how = {"score": scores.custom(_plus, _slope, (TABLE,), (_no_pair,)), "impl": "reference"}
    out, lse = nbflash.attention(q, k, v, return_lse=True, **how)
    with pytest.raises(TypeError, match=r"_no_pair, .*py:\d+ must return an index of 2 and"):
        nbflash.score_backward(dout, q, k, v, out, lse, **how)


def _behind(s, b, h, q_idx, kv_idx, table):
    return (q_idx, kv_idx + 1), 1


def _before(s, b, h, q_idx, kv_idx, table):
    return (-1 - table.shape[0] + q_idx // 9, kv_idx), 1


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("part", [_behind, _before])
def test_an_index_outside_its_array(part, impl):
    q, k, v, dout = make_qkv(1, 6, 6, HEADS, 2, 8)
    score = scores.custom(_plus, _slope, (TABLE,), (part,))
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True, impl=impl)
    match = rf"a wrong index, returned by {part.__name__}, .*gradients.py:\d+ for shape \(6, 6\)"
    with pytest.raises(IndexError, match=match):
        nbflash.score_backward(dout, q, k, v, out, lse, score=score, impl=impl)


def _row(s, b, h, q_idx, kv_idx, table):
    return q_idx, 1


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_an_index_without_an_axis(impl):
    q, k, v, dout = make_qkv(1, 6, 6, HEADS, 2, 8)
    score = scores.custom(_plus, _slope, (TABLE,), (_row,))
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True, impl=impl)
    with pytest.raises(TypeError, match=r"_row, .*gradients.py:\d+"):
        nbflash.score_backward(dout, q, k, v, out, lse, score=score, impl=impl)


def test_an_array_without_elements():
    inputs = make_qkv(1, 6, 6, HEADS, 2, 8)
    score = scores.custom(_first, _slope, (np.zeros(0),), (_first_part,))
    with pytest.raises(ValueError, match=r"array of shape \(0,\) with a gradient, and no element"):
        gradients(inputs, None, score)


def _first(s, b, h, q_idx, kv_idx, table):
    return s


def _first_part(s, b, h, q_idx, kv_idx, table):
    return 0, 1


def _two(s, b):
    return b, s


@pytest.mark.parametrize(
    ("params", "parts", "error", "match"),
    [
        ((TABLE,), (_two,), TypeError, r"param_grads\[0\] must take \(s, b, h, q_idx, kv_idx, pa"),
        ((TABLE,), ("x",), TypeError, r"param_grads\[0\] must be a Python function, got str"),
        ((TABLE,), (), TypeError, "param_grads must be a tuple of 1 functions or None"),
        ((TABLE,), _slope, TypeError, "param_grads must be a tuple of 1 functions or None"),
        ((0.1,), (_slope,), ValueError, r"param_grads\[0\] needs an array of floating point"),
        ((TABLE.astype(int),), (_slope,), ValueError, r"param_grads\[0\] needs an array of fl"),
    ],
)
def test_bad_param_grads(params, parts, error, match):
    with pytest.raises(error, match=match):
        scores.custom(_plus, _slope, params, parts)


def test_hopper_leaves_it_to_the_kernel_without_tensor_cores():
    assert [
        BACKENDS[impl].score_backward_impl for impl in ("sm90", "simt", "cpu", "reference")
    ] == [
        "simt",
        "simt",
        "cpu",
        "reference",
    ]


def test_rows_that_one_of_two_arrays_has_in_common_are_of_one_group():
    """Threads add to arrays without atomics: no two of them may have an element in common."""
    q, k, v, _ = make_qkv(2, 9, 12, 4, 2, 8)
    problem = check_forward(q, k, v)
    by_head = scores.Part(None, (4, 1), ("heads", "nk"))
    by_query = scores.Part(None, (9, 1), ("nq", "nk"))
    work = np.array([(row, head) for head in range(8) for row in range(3)])
    for parts, count in (([by_head], 4), ([by_query], 3), ([by_head, by_query], 1)):
        ordered, starts = grouped(work, 4, parts, problem)
        assert len(starts) - 1 == count
        assert sorted(map(tuple, ordered)) == sorted(map(tuple, work))


def test_which_arrays_have_an_element_for_every_score():
    """An axis of one score needs none in the array; one of several needs as many."""
    problem = SimpleNamespace(batch=1, heads=4, nq=5, nk=6)
    whole = scores.Part(None, (4, 5, 6), ("heads", "nq", "nk"))
    assert whole.alone(problem)
    assert not whole.alone(SimpleNamespace(batch=2, heads=4, nq=5, nk=6))
    assert not whole._replace(shape=(1, 5, 6)).alone(problem)
    assert not whole._replace(shape=(4, 5), axes=("heads", "nq")).alone(problem)


def test_the_reference_backend_takes_the_gradient_of_the_lse():
    q, k, v, dout = make_qkv(1, 9, 9, 2, 1, 8)
    score = scores.relative(np.zeros((2, 5), np.float32))
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True)
    dlse = np.linspace(-1, 1, lse.size, dtype=np.float32).reshape(lse.shape)
    how = {"score": score, "dlse": dlse}
    (got,) = nbflash.score_backward(dout, q, k, v, out, lse, **how, impl="reference")
    (want,) = reference.score_backward(dout, q, k, v, masks.dense(9, 9), 8**-0.5, **how)
    assert np.array_equal(got, want.astype(np.float32))
