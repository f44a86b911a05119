"""Where ALiBi comes by a product in the Hopper forward; the family ``ramp`` runs it."""

from dataclasses import replace

import numpy as np
import pytest
from score_cases import code_of
from sm90_runs import ALONE, HALVES

from nbflash import scores
from nbflash.backends.sm90.forward.alibi_gemm import make_straight
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.cuda.score_params import STEEPEST


@pytest.mark.parametrize("tile_n", [64, 112])
def test_a_tile_is_straight_where_the_diagonal_does_not_cross_it(tile_n):
    config = replace(ALONE, score=code_of(scores.alibi(0.1)), tile_n=tile_n)
    straight = make_straight(config)
    for start in range(-80, tile_n + 20):  # of the first row, on from the first key of the tile
        ahead = np.arange(tile_n) - (start + np.arange(64)[:, None])
        found = straight(np.int32(0), np.int32(0), [(np.int32(0), np.int32(start))], np.int32(0))
        assert found == ((ahead <= 0).all() or (ahead >= 0).all()), start


def test_what_has_a_ramp():
    """Whole tiles of heads of one panel, where the score is ALiBi alone."""
    alibi = code_of(scores.alibi(0.1))
    both = code_of(scores.compose(scores.softcap(2), scores.alibi(0.1)))
    steep = code_of(scores.alibi(STEEPEST * 1.01))
    for config, ramp in (
        (replace(ALONE, score=alibi), True),
        (replace(ALONE, score=steep), False),
        (replace(HALVES, score=alibi), False),
        (replace(ALONE, score=alibi, full_tiles=True), False),
        (replace(ALONE, score=alibi, head_dim=72), False),
        (replace(ALONE, score=both), False),
        (ALONE, False),
    ):
        assert config.ramp is ramp
    for head_dim, tile_n in ((8, 112), (64, 112), (128, 128)):
        config = forward_configs("bfloat16", head_dim, score=alibi)[0]
        assert (config.tile_n, config.ramp, config.why_not()) == (tile_n, head_dim <= 64, [])
