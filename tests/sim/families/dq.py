"""The pass over rows, for dQ, on Hopper."""

import functools
from dataclasses import dataclass, replace

import numpy as np
from faults.sm90_dq import CHAIN, COMPUTE, CONFIG, KERNEL, LOAD, MUTANTS, STATISTICS
from mutant_family import Family
from mutants import TWO_STAGES
from sm90_bwd_runs import FACTOR
from sm90_dq_runs import ALONE, DEEP, PAIR, check_statistics, run
from sm90_runs import DTYPES

from nbflash import reference, testing
from nbflash.backends.sm90.backward.dq_config import Sm90DqConfig
from nbflash.cuda import simulator as sim

BOTH = replace(PAIR, k_stages=3, q_stages=2, do_stages=2, stats_m=64)


@dataclass(frozen=True)
class Case:
    """One problem; with ``bad``, K of that key is infinite where its weight is 0."""

    name: str
    config: Sm90DqConfig
    mask: str
    nq: int
    nk: int
    heads: tuple = (1, 1)
    batch: int = 1
    head_dim: int = 16
    dtype: str = "float16"
    scale: float = 0.3
    blocks: int = 1
    bad: int | None = None
    hide: bool = False
    race: bool = False
    seed: int = 0

    def __str__(self):
        return self.name


CASES = (
    Case("bad", ALONE, "dead-scattered", 70, 199, head_dim=72, dtype="bfloat16", bad=70),
    Case("heads", ALONE, "per-batch-per-head", 76, 65, (4, 2), 2, blocks=3, hide=True),
    Case("hidden", PAIR, "padding", 129, 129, (2, 1), 2, hide=True),
    Case("pair", PAIR, "window-causal", 129, 65, head_dim=72, scale=-0.3),
    Case("both", BOTH, "window", 300, 129, (2, 1), head_dim=72, race=True, seed=1),
    Case("race", ALONE, "causal", 129, 257, race=True),
    Case("deep", DEEP, "causal", 200, 513, race=True, seed=2),
    Case("empty", ALONE, "dead-last", 150, 20, (2, 1), 2, blocks=2),
    Case("many", ALONE, "dense", 65, 321, (2, 1), race=True, seed=3),
)


@functools.cache
def problem(case):
    """``mask, clean, inputs, results, hit``: the rows that meet the bad key."""
    heads, batch = case.heads, case.batch
    mask = testing.mask_gallery(case.nq, case.nk, batch=batch, heads=heads[0])[case.mask]
    shape = batch, case.nq, case.nk, *heads, case.head_dim
    q, k, v, dout = testing.make_qkv(*shape, DTYPES[case.dtype], seed=3)
    hit = np.zeros((batch, case.nq, heads[0]), bool)
    keep = np.broadcast_to(mask.dense(), (batch, heads[0], case.nq, case.nk))
    if case.bad is not None:
        q[..., 0], k[..., 0] = np.abs(q[..., 0]) + 1, 0
        hit = keep[..., case.bad].transpose(0, 2, 1)
    clean = q, k, v, dout
    results = reference.attention(q, k, v, mask, case.scale)
    k, v = k.copy(), v.copy()
    if case.bad is not None:
        k[:, case.bad, :, 0] = -np.inf
    if case.hide:
        unseen = ~keep.any(2).reshape(batch, heads[1], -1, case.nk).any(2).transpose(0, 2, 1)
        k[unseen], v[unseen] = np.nan, np.nan
    return mask, clean, (q, k, v, dout), results, hit


@functools.cache
def expected(case):
    """dQ in float64 and in low precision, without what is bad."""
    mask, (q, k, v, dout), *_ = problem(case)
    arguments = dout, q, k, v, mask, case.scale
    return reference.attention_backward(*arguments)[0], testing.low_precision_backward(*arguments)[
        0
    ]


def check(case, spec_of, config_of):
    """Raise unless the kernel is right on ``case``."""
    mask, _, inputs, results, hit = problem(case)
    config = config_of(**vars(case.config))
    options = {"scale": case.scale, "blocks": case.blocks, "results": results}
    with sim.options(race=case.race, seed=case.seed):
        dq = run(config, mask, inputs, spec_of=spec_of, **options)
    exact, low = expected(case)
    assert np.isnan(dq[hit].astype(np.float32)).any(-1).all()
    testing.assert_within_reference(dq[~hit], exact[~hit], low[~hit], name="dq", factor=FACTOR)


def check_left(spec_of, config_of):
    """Raise unless the statistics for the next pass are right."""
    shape = 2, 69, 80, 2, 1, 72
    mask, inputs = testing.mask_gallery(69, 80)["causal"], testing.make_qkv(*shape, np.float16)
    check_statistics(config_of(**vars(BOTH)), mask, inputs, spec_of=spec_of)


def case_of(check, *case):
    def run_case(modules):
        check(*case, modules[KERNEL].bwd_sm90_dq_spec, modules[CONFIG].Sm90DqConfig)

    return run_case


FAMILY = Family(
    "dq",
    CHAIN,
    {"left": case_of(check_left)} | {case.name: case_of(check, case) for case in CASES},
    MUTANTS,
    generate=(LOAD, STATISTICS, COMPUTE, KERNEL),
    survivors={"backward.dq_consumer: compute_stream: mbarrier_arrive 3 stage shifted": TWO_STAGES},
)
