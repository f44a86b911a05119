"""Score functions in the SIMT kernels."""

from dataclasses import replace
from unittest.mock import patch

from faults.scores import BWD, FWD, PARAMS, SCORE, SIMT
from mutant_family import Family
from score_cases import HEADS, NAMES, scores_for
from simt_runs import Geometry, check

from nbflash import scores
from nbflash.backends.simt import executor as simt
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

TILE = Geometry()  # 8 × 8
CHAIN = (SCORE, FWD, BWD, PARAMS, simt.__name__)
# The two forms of the backward.
CASES = (
    ((9, 20), "causal", "float32", 0.6),
    ((17, 9), "dense", "float64", -0.6),
)


# Slopes below zero have no form of their own.
RISING = {"rising": scores.alibi([-0.5, 0.5, 0, 1])}


def case_of(name):
    """One score in both forms of the backward."""

    def run_case(modules):
        with patch("simt_runs.SimtExecutor", modules[simt.__name__].SimtExecutor):
            for i, (lengths, mask_name, dtype, scale) in enumerate(CASES):
                mask = mask_gallery(*lengths)[mask_name]
                inputs = make_qkv(1, *lengths, HEADS, 2, 8, dtype, seed=i)
                geometry = replace(TILE, deterministic=bool(i))
                score = (scores_for(*lengths) | RISING)[name]
                check(geometry, mask, *inputs, scale=scale, score=score)

    return run_case


FAMILY = Family(
    "simt_scores",
    CHAIN,
    {name: case_of(name) for name in (*NAMES, *RISING)},
    SIMT,
    errors=(sim.SimError, AssertionError, LookupError, TypeError),
)
