"""Dropout in the SIMT kernels, in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from dropout_cases import HOW, SEED
from simt_runs import DTYPES, RESULTS, Geometry, assert_close, check, expected, run

import masks
import nbflash
from nbflash import scores
from nbflash.backends.simt.configs import SimtBackwardConfig, SimtConfig
from nbflash.cuda import simulator as sim
from nbflash.definitions import philox
from nbflash.testing import make_qkv, mask_gallery

TILE = Geometry()  # 8 × 8
SHAPES = (TILE, Geometry(tx=4), Geometry(rm=8), Geometry(ty=1, rm=8, rn=8))
MASKS = tuple(mask_gallery(8))
# N below a tile, one over, several; more queries than keys and fewer.
LENGTHS = ((1, 3), (5, 8), (17, 9), (9, 23))


@pytest.mark.parametrize("i", range(4 * len(MASKS)))
def test_forward_and_backward(i):
    """Every mask at every length; tiles, dtypes, probabilities and forms are dealt out."""
    lengths, name = LENGTHS[i % 4], MASKS[i // 4]
    geometry = replace(SHAPES[i % 3], deterministic=bool(i % 2), vectors=bool(i // 2 % 2))
    mask = mask_gallery(*lengths, batch=2, heads=4)[name]
    dtype = DTYPES[tuple(DTYPES)[(i + i // 4) % 4]]
    inputs = make_qkv(mask.batch or 1, *lengths, 4, 2, 8, dtype, i)
    with sim.options(seed=i):
        check(geometry, mask, *inputs, dropout=(0.1, 0.5, 0.9)[i % 3], seed=SEED)


@pytest.mark.parametrize("deterministic", [False, True])
def test_garbage_where_nothing_attends(deterministic):
    """In hidden keys and in queries that see nothing, beside scores that dropout makes 0."""
    geometry = replace(TILE, deterministic=deterministic)
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < 18) & (q > 1), 9, 20)
    clean = make_qkv(1, 9, 20, 4, 2, 8)
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, 18], [3, 19], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    got = run(geometry, mask, *dirty, **HOW)
    assert_close(got, *expected(mask, *clean, **HOW))
    assert not got[RESULTS.index("dk")][:, [3, 18]].any()


@pytest.mark.parametrize("geometry", SHAPES, ids=str)
def test_the_mask_is_that_of_any_tile(geometry):
    """Equal scores and a unit matrix for V or dO: the results are the elements of P themselves."""
    nq, nk, heads = 17, 41, 2
    q, k = (np.zeros((2, n, heads, nk), np.float32) for n in (nq, nk))
    v, dout = k.copy(), q.copy()
    for x in (v, dout):
        x[:] = np.eye(*x.shape[1::2])[:, None]
    kept = philox.kept((2, heads, nq, nk), 0.3, SEED)
    for deterministic in (False, True):
        form = replace(geometry, deterministic=deterministic)
        got = run(form, masks.dense(nq, nk), q, k, v, dout, dropout=0.3, seed=SEED)
        out, dv = got[RESULTS.index("out")], got[RESULTS.index("dv")]
        np.testing.assert_array_equal(out != 0, kept.transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(dv[..., :nq] != 0, kept.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_after_a_score_function(deterministic):
    """Which leaves its derivative where dS comes, in the way of dropout."""
    score = scores.compose(scores.softcap(2), scores.alibi(0.1))
    geometry = replace(TILE, deterministic=deterministic)
    check(geometry, masks.causal(17), *make_qkv(1, 17, 17, 2, 1, 8), score=score, **HOW)


def test_a_state_in_memory():
    """Is read when the kernels run, and means what two numbers do."""
    inputs, how = make_qkv(1, 9, 9, 2, 2, 8), {"dropout": 0.5}
    state = np.array([7, 0], np.int64)
    for offset in (0, 1):
        state[1] = offset
        got = run(TILE, masks.causal(9), *inputs, seed=state, **how)
        expected = run(TILE, masks.causal(9), *inputs, seed=(7, offset), **how)
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_public_call_and_its_pullback():
    q, k, v, dout = make_qkv(1, 20, 20, 2, 1, 8)
    plan = nbflash.plan(q, k, v, causal=True, dropout=0.5, impl="simt")
    expected = nbflash.plan(q, k, v, causal=True, dropout=0.5, impl="cpu")
    for seed in (3, SEED):
        results = [p.vjp(q, k, v, seed=seed) for p in (plan, expected)]
        (out, pullback), (cpu_out, cpu_pullback) = results
        np.testing.assert_array_equal(out == 0, cpu_out == 0)
        for x, y in zip(pullback(dout), cpu_pullback(dout), strict=True):
            np.testing.assert_array_equal(x == 0, y == 0)


@pytest.mark.parametrize("cls", [SimtConfig, SimtBackwardConfig])
def test_fragments_of_more_scores_than_bits_are_refused(cls):
    shape = {"dtype": "float32", "head_dim": 8, "tx": 2, "ty": 2, "rm": 16, "rn": 8}
    assert cls(**shape).rm == 16
    with pytest.raises(ValueError, match=r"dropout needs rm \* rn of at most 64"):
        cls(**shape, dropout=True)
