"""Score functions in the Hopper forward."""

from dataclasses import dataclass
from unittest.mock import patch

from faults.scores import COMPUTE, FWD_SM90, HOOKS, HOPPER, PARAMS, PLACE, RAMP, SCORE, WHOLE
from faults.scores import HALVES as HALVES_MODULE
from mutant_family import Family
from score_cases import NAMES, scores_for
from sm90_runs import ALONE, HALVES, check, inputs, precise, raise_scores

import masks
from nbflash import scores
from nbflash.backends.sm90.forward.config import Sm90Config
from nbflash.cuda import simulator as sim

T = 64
WIDE = 72  # more than a panel: S begins as ALiBi
CHAIN = (SCORE, PARAMS, PLACE, HOOKS, RAMP, WHOLE, HALVES_MODULE, COMPUTE, FWD_SM90)


@dataclass(frozen=True)
class Case:
    """A score; ``levels`` raise the scores (`raise_scores`)."""

    score: str
    config: Sm90Config = ALONE
    head_dim: int = 16
    nq: int = T + 9
    nk: int = 2 * T - 3
    batch: int = 2
    levels: tuple = ()

    def run(self, modules):
        nq, nk = self.nq, self.nk
        q, k, v, _ = inputs(nq, nk, batch=self.batch, heads=(2, 1), head_dim=self.head_dim)
        found = scores_for(nq, nk, 2)
        found["behind-bias"] = scores.compose(found["bias"], found["alibi"])
        how = {"scale": 0.4, "score": found[self.score]}
        mask = masks.causal(nq, nk)
        if self.levels:
            raise_scores(q, k, self.levels, 0.4)
            how["yardstick"], mask = precise, masks.dense(nq, nk)
        with patch("sm90_runs.score_params", modules[PARAMS]):
            check(self.config, mask, q, k, v, spec_of=modules[FWD_SM90].fwd_sm90_spec, **how)


CASES = {
    **{f"{name}-whole": Case(name) for name in NAMES},
    **{f"{name}-halves": Case(name, HALVES) for name in NAMES},
    "alibi-wide": Case("alibi", head_dim=WIDE),
    "behind-bias": Case("behind-bias", head_dim=WIDE),
    # The diagonal's tile comes first.
    "lost": Case("alibi", ALONE, WIDE, 9, T + 9, 1, levels=((0, 600), (T, 0))),
}
FAMILY = Family(
    "sm90_scores",
    CHAIN,
    {name: case.run for name, case in CASES.items()},
    HOPPER,
    errors=(sim.SimError, AssertionError, LookupError, TypeError),
)
