"""Results that are known bit for bit: saturated softmax, ties, means. No tolerance anywhere."""

import math

import numpy as np
import pytest
from simt_runs import DTYPES, Geometry, run

import masks
from nbflash.testing import code_word_oracle, mask_gallery, small_integers

FORMS = {
    "atomic": Geometry(p_over_k=True),
    "deterministic": Geometry(tx=4, deterministic=True),
    "vectors": Geometry(rm=8, vectors=True, vector_red=True, chunks=2, send_v=True),
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "nq", "nk", "head_dim"),
    [
        ("dense", 1, 1, 8),
        ("causal", 7, 8, 16),
        ("butterfly", 17, 17, 8),
        ("checkerboard", 9, 33, 32),
        ("dead-scattered", 17, 9, 16),
    ],
)
def test_saturated_softmax_gathers(name, nq, nk, head_dim, dtype, form):
    mask = mask_gallery(nq, nk)[name]
    words = code_word_oracle(nq, head_dim, nk, mask, DTYPES[dtype])
    out, lse, dq, dk, dv = run(
        FORMS[form], mask, words.q, words.k, words.v, words.dout, scale=words.scale
    )
    np.testing.assert_array_equal(out, words.out)
    np.testing.assert_array_equal(lse, words.lse.astype(lse.dtype))
    np.testing.assert_array_equal(dv, words.dv)
    assert not dq.any()
    assert not dk.any()


@forms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_ties_share_evenly(seed, dtype, form):
    """Each query meets one, two or four equal keys at score 0 and others far below.

    The weights are powers of two and all sums are over small integers, so every result is
    exact, dK too. The last coordinate takes the common part of the scores away.
    """
    rng = np.random.default_rng(seed)
    nq, groups, bits = 19, 5, 7
    signs = 1 - 2 * (np.arange(groups)[:, None] >> np.arange(bits) % 3 & 1)
    group_of = rng.permutation(np.repeat(np.arange(groups), 4))
    nk, target = len(group_of), rng.integers(0, groups, nq)
    keep = rng.random((nq, nk)) < 0.5
    for row, group in enumerate(target):
        mine = rng.permutation(np.flatnonzero(group_of == group))
        keep[row, mine] = np.arange(4) < 2 ** rng.integers(0, 3)
    q = np.concatenate([128 * signs[target], np.ones((nq, 1))], axis=1)
    k = np.concatenate([signs[group_of], np.full((nk, 1), -128.0 * bits)], axis=1)
    v, dout = rng.integers(-3, 4, (nk, bits + 1)), rng.integers(-3, 4, (nq, bits + 1))
    weight = keep & (group_of == target[:, None])
    count = weight.sum(axis=1, keepdims=True)
    p = weight / count
    exact = p @ v
    ds = p * (dout @ v.T - (dout * exact).sum(axis=1, keepdims=True))
    scale = math.log(2)
    inputs = [x.astype(DTYPES[dtype])[None, :, None] for x in (q, k, v, dout)]
    mask = masks.from_dense(keep)
    out, lse, dq, dk, dv = run(FORMS[form], mask, *inputs, scale=scale)
    ln2 = np.float32(scale)
    np.testing.assert_array_equal(out[0, :, 0], exact.astype(out.dtype))
    np.testing.assert_array_equal(lse[0, 0], np.log2(count[:, 0]).astype(np.float32) * ln2)
    np.testing.assert_array_equal(dv[0, :, 0], (p.T @ dout).astype(dv.dtype))
    np.testing.assert_array_equal(
        dk[0, :, 0], ((ds.T @ q).astype(np.float32) * ln2).astype(dk.dtype)
    )
    assert (ds != 0).any()
    if FORMS[form].deterministic:  # atomics add up what each tile has rounded
        assert not dq.any()


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_zero_queries_take_the_mean(count, dtype, form):
    """Q = 0: the mean over ``count`` attended keys, and dQ over small integers without rounding."""
    rng, nq, nk = np.random.default_rng(count), 17, 19
    keep = rng.permuted(np.tile(np.arange(nk) < count, (nq, 1)), axis=1)
    _, k, v, dout = small_integers(1, nq, nk, 2, 1, 8, DTYPES[dtype], seed=count)
    q = np.zeros_like(dout)
    out, lse, dq, dk, dv = run(FORMS[form], masks.from_dense(keep), q, k, v, dout, scale=0.5)
    k64, v64, d64 = (
        np.broadcast_to(x.astype(np.float64)[0].transpose(1, 0, 2), (2, x.shape[1], 8))
        for x in (k, v, dout)
    )
    p = keep / count
    exact = p @ v64
    ds = p * (d64 @ v64.swapaxes(1, 2) - (d64 * exact).sum(axis=-1, keepdims=True))
    np.testing.assert_array_equal(out[0].transpose(1, 0, 2), exact.astype(out.dtype))
    np.testing.assert_array_equal(dq[0].transpose(1, 0, 2), (0.5 * (ds @ k64)).astype(dq.dtype))
    np.testing.assert_array_equal(dv[0, :, 0], (p.T @ d64).sum(axis=0).astype(dv.dtype))
    ln2 = lse.dtype.type(math.log(2))
    np.testing.assert_array_equal(lse, np.full_like(lse, math.log2(count) * ln2))
    assert not dk.any()
