"""The public API with the Hopper kernels in the simulator: what binds and launches them."""

import numpy as np
import pytest
from sm90_bwd_runs import FACTOR
from sm90_runs import BLOCK

import masks
import nbflash
from nbflash import reference, testing

NAMES = "out", "lse", "dq", "dk", "dv"


def inputs(nq, nk, heads=(2, 1), head_dim=16, dtype=np.float16, batch=1):
    return testing.make_qkv(batch, nq, nk, *heads, head_dim, dtype)


def check(mask, q, k, v, dout, *, dlse=None, out=None, **options):
    """Forward and backward within their budgets, in one pass and in two; the lse has gaps."""
    state = {name: options[name] for name in ("score", "dropout", "seed") if name in options}
    given = {"score": None, "dropout": 0.0, "seed": None, **options, "impl": "sm90"}
    result, lse = nbflash.attention(q, k, v, mask, return_lse=True, out=out, **given)
    saved = testing.poisoned((*lse.shape[:2], lse.shape[2] + 3), lse.dtype)[..., :-3]
    saved[...] = lse
    gradients = [
        nbflash.attention_backward(
            dout, q, k, v, result, saved, mask, dlse=dlse, deterministic=deterministic, **given
        )
        for deterministic in (False, True)
    ]
    exact = reference.attention(q, k, v, mask, **state)
    low = testing.low_precision(q, k, v, mask, **state)
    for name, axis, *values in zip(NAMES, (1, 2), (result, lse), exact, low, strict=False):
        testing.assert_blocks_within_reference(*values, BLOCK, name=name, axis=axis)
    exact = reference.attention_backward(dout, q, k, v, mask, dlse=dlse, **state)
    low = testing.low_precision_backward(dout, q, k, v, mask, dlse=dlse, **state)
    for found in gradients:
        for name, *values in zip(NAMES[2:], found, exact, low, strict=True):
            testing.assert_blocks_within_reference(*values, BLOCK, name=name, factor=FACTOR)


def test_grouped_heads_of_any_length():
    """Fewer queries than keys, dlse, dO on its side, out with gaps."""
    q, k, v, dout = inputs(20, 90, batch=2)
    dout = np.ascontiguousarray(dout.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    dlse = np.random.default_rng(0).standard_normal((2, 2, 20), np.float32)
    out = testing.poisoned((2, 20, 2, 24), q.dtype)[..., :16]
    check(masks.causal(20, 90), q, k, v, dout, dlse=dlse, out=out)


def test_an_out_that_no_tensor_map_describes():
    """A row stride that is no multiple of 16 bytes: through a copy."""
    q, k, v, _ = inputs(70, 70)
    out = testing.poisoned((1, 70, 2, 18), q.dtype)[..., 1:17]
    got = nbflash.attention(q, k, v, causal=True, impl="sm90", out=out)
    assert got is out
    np.testing.assert_array_equal(out, nbflash.attention(q, k, v, causal=True, impl="sm90"))


@pytest.mark.design
@pytest.mark.parametrize("steps", [(292, 32, 16), (328, 36, 16), (360, 40, 20)], ids=str)
def test_an_out_of_which_one_stride_is_off(steps):
    """No multiple of 8 elements, which the others are."""
    q, k, v, _ = inputs(9, 20, batch=2)
    memory = testing.poisoned(2 * steps[0], q.dtype)
    out = np.lib.stride_tricks.as_strided(memory, q.shape, [2 * n for n in (*steps, 1)])
    got = nbflash.attention(q, k, v, impl="sm90", out=out)
    np.testing.assert_array_equal(got, nbflash.attention(q, k, v, impl="sm90"))


def test_an_out_that_goes_backwards():
    """A tensor map has no strides below 0: through a copy."""
    q, k, v, _ = inputs(9, 20)
    out = testing.poisoned(q.shape, q.dtype)[:, ::-1]
    got = nbflash.attention(q, k, v, impl="sm90", out=out)
    assert got is out
    np.testing.assert_array_equal(out, nbflash.attention(q, k, v, impl="sm90"))


def test_an_axis_of_length_one_has_any_stride():
    """Nothing steps along it, and a map with a stride of 18 bytes would be refused."""
    q, k, v, dout = inputs(20, 20, heads=(1, 1))
    given = q, k, v, dout
    odd = [np.lib.stride_tricks.as_strided(x, x.shape, (18, 32, 18, 2)) for x in given]
    out, lse = nbflash.attention(q, k, v, causal=True, impl="sm90", return_lse=True)
    got = nbflash.attention(*odd[:3], causal=True, impl="sm90")
    np.testing.assert_array_equal(got, out)
    options = {"causal": True, "impl": "sm90", "deterministic": True}
    want, got = (
        nbflash.attention_backward(dout, *x, out, lse, **options) for *x, dout in (given, odd)
    )
    np.testing.assert_array_equal(got, want)


def test_queries_of_all_sequences_that_attend_nothing():
    """Whole row tiles of the pass over rows; there are more queries than keys."""
    q, k, v, dout = inputs(200, 20, batch=2)
    plan = nbflash.plan(q, k, v, causal=True, impl="sm90")
    out, lse = plan(q, k, v)
    dq, *others = (testing.poisoned(x.shape, x.dtype) for x in (q, k, v))
    plan._executor.backward(dout, q, k, v, out, lse, np.zeros_like(lse), dq, *others, True)
    assert not dq[:, :180].any()
    assert dq[:, 181:].any(axis=(2, 3)).all()
    assert np.isfinite(dq).all()


def test_dropout():
    """With a dO that is nowhere aligned."""
    q, k, v, dout = inputs(70, 100, heads=(2, 2))
    wide = testing.poisoned((1, 70, 2, 18), q.dtype)
    wide[..., 1:17] = dout
    check(masks.dense(70, 100), q, k, v, wide[..., 1:17], dropout=0.25, seed=(3, 2**63 + 5))


@pytest.mark.parametrize("name", ["alibi", "bias"])
def test_score_functions(name):
    """Parameters by value and by address."""
    q, k, v, dout = inputs(70, 70)
    bias = np.random.default_rng(0).standard_normal((1, 2, 70, 70), np.float32)
    score = nbflash.scores.alibi(2) if name == "alibi" else nbflash.scores.bias(bias)
    check(masks.causal(70), q, k, v, dout, score=score)


def test_wide_heads_in_two_passes():
    """Beyond head_dim 128 there is no kernel for one pass, and other rows of the tables."""
    q, k, v, dout = inputs(20, 70, heads=(1, 1), head_dim=136)
    check(masks.dense(20, 70), q, k, v, dout)


def test_what_it_cannot_run_is_named():
    q, k, v, _ = inputs(8, 8)
    reasons = nbflash.why_not("sm90", *(x.astype(np.float32) for x in (q, k, v)))
    assert reasons == ["needs float16 or bfloat16, got float32"]
    assert nbflash.why_not("sm90", q, k, v) == []
