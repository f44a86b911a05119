"""Values of axes that faults have hidden behind, through the public API; rows of many full tiles.

The grids have them with small tiles: see `axes`.
"""

import numpy as np
import poisoned_rows
import pytest
import sm90_runs
from sm90_bwd_runs import FACTOR

import masks
import nbflash
from nbflash import reference, scores, testing

N = 20, 37
# Slopes that raise what is far away; and a plane for all heads before one for each.
FALLING = scores.alibi([-0.4, 0.3])
PLANES = masks.per_batch(
    [masks.causal(*N), masks.per_head([masks.dense(*N), masks.window(*N, left=9, right=2)])]
)
CASES = {"slopes": (masks.causal(*N), FALLING), "planes": (PLANES, None)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("impl", ["sm80", "sm90"])
def test_both_directions(impl, case):
    mask, score = CASES[case]
    q, k, v, dout = testing.make_qkv(mask.batch or 1, *N, 2, 2 - bool(score), 16, np.float16)
    got = nbflash.attention(q, k, v, mask, score=score, return_lse=True, impl=impl)
    got += nbflash.attention_backward(dout, q, k, v, *got, mask, score=score, impl=impl)
    exact, low = (
        (*forward(q, k, v, mask, score=score), *backward(dout, q, k, v, mask, score=score))
        for forward, backward in (
            (reference.attention, reference.attention_backward),
            (testing.low_precision, testing.low_precision_backward),
        )
    )
    for name, *values in zip(poisoned_rows.NAMES, got, exact, low, strict=True):
        testing.assert_within_reference(*values, name=name, factor=FACTOR)


@pytest.mark.parametrize("config", [sm90_runs.ALONE, sm90_runs.HALVES], ids=["whole", "halves"])
@pytest.mark.parametrize("tiles", [33, 35])
def test_rows_of_an_odd_number_of_tiles_above_32(tiles, config):
    nk = tiles * config.tile_n
    sm90_runs.check(config, masks.dense(9, nk), *sm90_runs.inputs(9, nk)[:3])
