"""Gradients of a score's arrays in the SIMT kernel, in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from score_gradient_runs import DROPOUT, HEADS, OUTSIDE, TILE, check_outside, run
from score_gradients import NAMES, expected, hold, learned_scores
from simt_runs import DTYPES

import masks
import nbflash
from nbflash import scores
from nbflash.backends.simt import score_gradient_host as simt_score
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

MASKS = tuple(mask_gallery(8))
# N below a tile, one over, several; more queries than keys and fewer.
LENGTHS = ((1, 3), (5, 8), (17, 9), (9, 23))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_array(name, lengths):
    """Every score at every length; masks, dtypes and what else there is are dealt out."""
    start = NAMES.index(name) + len(NAMES) * LENGTHS.index(lengths)
    for i in range(start, start + len(MASKS), 11):
        mask = mask_gallery(*lengths, batch=2, heads=HEADS)[MASKS[i % len(MASKS)]]
        dtype, batch = tuple(DTYPES.values())[(start + i) % 4], mask.batch or 1 + i % 2
        inputs = make_qkv(batch, *lengths, HEADS, 2, 8, dtype, i)
        score, how = learned_scores(*lengths, batch)[name], DROPOUT if i % 3 == 0 else {}
        how = {**how, "scale": -0.4 if i % 5 == 0 else None}
        with sim.options(seed=i):
            got = run(replace(TILE, vectors=bool(i % 2)), mask, inputs, score, **how)
        hold(got, *expected(inputs, mask, score=score, **how))


@pytest.mark.parametrize("name", NAMES)
def test_garbage_where_nothing_attends(name):
    """Keys that nothing sees, and queries that see nothing, may be NaN; what is theirs is 0."""
    score = learned_scores(9, 20)[name]
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < 18) & (q > 1), 9, 20)
    clean = make_qkv(1, 9, 20, HEADS, 2, 8)
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, 18], [3, 19], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    got = run(TILE, mask, dirty, score)
    hold(got, *expected(clean, mask, score=score))
    if name == "bias":
        assert not got[0][..., [3, 18, 19]].any()
        assert not got[0][..., :2, :].any()


@pytest.mark.parametrize("part", OUTSIDE)
@pytest.mark.parametrize(("nq", "nk"), [(9, 12), (1, 1)])
def test_an_index_outside_its_array(part, nq, nk):
    check_outside(simt_score, part, nq, nk)


def test_the_public_function():
    q, k, v, dout = inputs = make_qkv(1, 9, 20, HEADS, 2, 8, np.float64)
    score, how = learned_scores(9, 20)["composed"], {"causal": True, "impl": "simt"}
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True, **how)
    got = nbflash.score_backward(dout, q, k, v, out, lse, score=score, **how)
    hold(got, *expected(inputs, masks.causal(9, 20), score=score))


def test_a_whole_bias_is_the_gradient_of_the_scores():
    """Whatever is composed before it: dS' itself, the same for the table of one more function."""
    inputs = make_qkv(1, 9, 20, HEADS, 2, 8)
    bias = learned_scores(9, 20)["bias"]
    with_alibi = scores.compose(bias, scores.alibi(np.zeros(HEADS)))
    alone, (first, slopes) = (run(TILE, masks.dense(9, 20), inputs, s) for s in (bias, with_alibi))
    np.testing.assert_array_equal(alone[0], first)
    assert slopes.shape == (HEADS,)


@pytest.mark.design
@pytest.mark.parametrize("shift", [-1024, 1024])
def test_scores_far_from_zero(shift):
    """2^S' alone is 0 or overflows, and so is 2^-lse."""
    inputs = make_qkv(1, 9, 20, HEADS, 2, 8)
    bias = scores.bias(shift + np.rint(8 * np.random.default_rng(0).standard_normal((9, 20))) / 8)
    got = run(TILE, masks.dense(9, 20), inputs, bias)
    hold(got, *expected(inputs, masks.dense(9, 20), score=bias))


@pytest.mark.design
def test_a_layout_of_dout_alone():
    """Heads outside of tokens; q, k and v have none of its strides."""
    q, k, v, dout = make_qkv(2, 9, 12, 2, 1, 8, np.float32)
    score = scores.bias(np.zeros((1, 2, 9, 12)))
    out, lse = nbflash.attention(q, k, v, score=score, impl="simt", return_lse=True)
    turned = np.ascontiguousarray(dout.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert turned.strides != dout.strides
    (expected,), (got,) = (
        nbflash.score_backward(x, q, k, v, out, lse, score=score, impl="simt")
        for x in (dout, turned)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
