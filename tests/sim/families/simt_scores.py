"""Score functions in the SIMT kernels."""

from dataclasses import replace
from unittest.mock import patch

from faults.scores import BWD, FWD, SCORE, SIMT
from mutant_family import Family
from score_cases import HEADS, NAMES, scores_for
from simt_runs import Geometry, check

from nbflash.backends.simt import executor as simt
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

TILE = Geometry()  # 8 × 8
CHAIN = (SCORE, FWD, BWD, "nbflash.cuda.score_params", simt.__name__)
CASES = (((9, 20), "causal"), ((17, 9), "dense"))


def case_of(name):
    """One score in both forms of the backward."""

    def run_case(modules):
        with patch("simt_runs.SimtExecutor", modules[simt.__name__].SimtExecutor):
            for i, (lengths, mask_name) in enumerate(CASES):
                mask, inputs = (
                    mask_gallery(*lengths)[mask_name],
                    make_qkv(1, *lengths, HEADS, 2, 8, seed=i),
                )
                geometry, score = replace(TILE, deterministic=bool(i)), scores_for(*lengths)[name]
                check(geometry, mask, *inputs, scale=0.6, score=score)

    return run_case


FAMILY = Family(
    "simt_scores",
    CHAIN,
    {name: case_of(name) for name in NAMES},
    SIMT,
    errors=(sim.SimError, AssertionError, LookupError, TypeError),
)
