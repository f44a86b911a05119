"""Where ALiBi comes by a product in the Hopper forward; the family ``ramp`` runs it."""

from dataclasses import replace

from score_cases import code_of
from sm90_runs import ALONE, HALVES

from nbflash import scores
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.cuda.score_params import STEEPEST


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
