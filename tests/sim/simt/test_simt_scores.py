"""Score functions in the SIMT kernels, in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from score_cases import HEADS, NAMES, scores_for
from simt_runs import DTYPES, RESULTS, Geometry, assert_close, check, expected, run

import masks
import nbflash
from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

TILE = Geometry()  # 8 × 8
MASKS = tuple(mask_gallery(8))
# N below a tile, one over, several; more queries than keys and fewer.
LENGTHS = ((1, 3), (5, 8), (17, 9), (9, 23))


def make_case(lengths, mask_name, seed, dtype="float32"):
    mask = mask_gallery(*lengths, batch=2, heads=HEADS)[mask_name]
    return mask, make_qkv(mask.batch or 1, *lengths, HEADS, 2, 8, DTYPES[dtype], seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_forward_and_backward(name, lengths):
    """Every score at every length; masks, dtypes and forms of the backward are dealt out."""
    start = NAMES.index(name) + len(NAMES) * LENGTHS.index(lengths)
    for i in range(start, len(MASKS), 3):
        geometry = replace(TILE, deterministic=bool(i % 2), vectors=bool(i % 3))
        mask, inputs = make_case(lengths, MASKS[i], i, tuple(DTYPES)[(start + i) % 4])
        with sim.options(seed=i):
            score, scale = scores_for(*lengths)[name], -0.4 if i % 5 == 0 else None
            check(geometry, mask, *inputs, scale=scale, score=score)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_garbage_where_nothing_attends(name, deterministic):
    """Whatever a function makes of a hidden NaN: its keys, and queries that see nothing."""
    geometry, score = replace(TILE, deterministic=deterministic), scores_for(9, 20)[name]
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < 18) & (q > 1), 9, 20)
    clean = make_qkv(1, 9, 20, HEADS, 2, 8)
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, 18], [3, 19], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    got = run(geometry, mask, *dirty, score=score)
    assert_close(got, *expected(mask, *clean, score=score))
    assert not got[RESULTS.index("dk")][:, [3, 18]].any()


def test_no_functions_are_no_score():
    inputs = make_qkv(1, 9, 9, 2, 2, 8)
    plain, none = (run(TILE, masks.causal(9), *inputs, score=s) for s in (None, scores.compose()))
    for a, b in zip(plain, none, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_public_functions_take_a_score():
    q, k, v, dout = inputs = make_qkv(1, 9, 20, HEADS, 2, 8)
    score = scores_for(9, 20)["custom"]
    out, lse = nbflash.attention(q, k, v, impl="simt", score=score, return_lse=True)
    gradients = nbflash.attention_backward(dout, q, k, v, out, lse, impl="simt", score=score)
    assert_close((out, lse, *gradients), *expected(masks.dense(9, 20), *inputs, score=score))
