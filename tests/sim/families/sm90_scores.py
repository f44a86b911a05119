"""Score functions in the Hopper forward."""

from faults.scores import COMPUTE, HOPPER, PLACE, SCORE, WHOLE
from faults.scores import HALVES as HALVES_MODULE
from mutant_family import Family
from score_cases import NAMES, scores_for
from sm90_runs import ALONE, HALVES, check, inputs

import masks
from nbflash.cuda import simulator as sim

T = 64
WIDE = 72  # more than a panel: S begins as ALiBi
FWD = "nbflash.backends.sm90.forward.kernel"
CHAIN = (SCORE, PLACE, WHOLE, HALVES_MODULE, COMPUTE, FWD)


CASES = {f"{name}-{i}": (name, i) for name in NAMES for i in range(2 + (name == "alibi"))}


def case_of(name, number):
    """A score in whole tiles, in halves, and, ALiBi, in wide heads."""

    def run_case(modules):
        nq, nk = T + 9, 2 * T - 3
        causal, dense = masks.causal(nq, nk), masks.dense(nq, nk)
        configs = (ALONE, causal, 16), (HALVES, dense, 16), (ALONE, causal, WIDE)
        config, mask, head_dim = configs[number]
        q, k, v, _ = inputs(nq, nk, batch=2, heads=(2, 1), head_dim=head_dim)
        how = {"scale": 0.4, "score": scores_for(nq, nk, 2)[name]}
        check(config, mask, q, k, v, spec_of=modules[FWD].fwd_sm90_spec, **how)

    return run_case


FAMILY = Family(
    "sm90_scores",
    CHAIN,
    {name: case_of(*case) for name, case in CASES.items()},
    HOPPER,
    errors=(sim.SimError, AssertionError, LookupError, TypeError),
)
