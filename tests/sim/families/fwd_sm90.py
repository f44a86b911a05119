"""The forward on Hopper, of both mainloops."""

import functools
from dataclasses import dataclass, replace

import numpy as np
from faults.sm90_forward import (
    CHAIN,
    CONFIG,
    FORMS,
    FWD,
    HALVES_OF,
    MUTANTS,
    PRODUCER,
    RECOVERY_OF,
    WHOLE_OF,
)
from mutant_family import Family
from sm90_runs import ALONE, DTYPES, HALVES, HALVES_PAIR, PAIR, ordered, precise, raise_scores, run

import masks
from nbflash import reference, testing
from nbflash.backends.sm90.forward.config import Sm90Config
from nbflash.cuda import simulator as sim

TRIPLE, WIDE = replace(PAIR, consumers=3), replace(HALVES_PAIR, tile_n=128)
AHEAD = replace(HALVES, k_stages=2, v_stages=3)
WORDS = replace(ALONE, tile_n=112)
STRAIGHT = replace(HALVES, q_stages=1)


# More than 2^32 and 2^216 beyond all scores before, in base 2 and at a scale of 0.3.
LEVELS = (64, 75), (128, 600)


@dataclass(frozen=True)
class Case:
    """One problem; V has a NaN in the keys ``bad`` and, with ``hide``, where nothing attends.

    ``levels`` raise the scores (`raise_scores`); ``strided`` inputs have other orders in memory.
    """

    name: str
    config: Sm90Config
    mask: str
    nq: int
    nk: int
    heads: tuple = (1, 1)
    batch: int = 1
    head_dim: int = 16
    dtype: str = "float16"
    scale: float = 0.3
    blocks: int = 1
    grows: float = 1.0
    spikes: tuple = ()
    apart: float = 0.0
    levels: tuple = ()
    strided: bool = False
    hide: bool = False
    bad: tuple = ()
    race: bool = False
    seed: int = 0

    def __str__(self):
        return self.name


CASES = (
    Case("bad", ALONE, "dead-scattered", 70, 135, head_dim=72, dtype="bfloat16", bad=(5, 70, 130)),
    Case("pair", PAIR, "window-causal", 129, 65, head_dim=72, scale=-0.3),
    Case("rows", ALONE, "causal", 200, 200, head_dim=72, race=True),
    Case("triple", TRIPLE, "dense", 5, 65),
    Case("zero", ALONE, "dense", 3, 1, scale=0.0),
    Case("grows-whole", ALONE, "dense", 20, 193, grows=9),
    Case("late-whole", ALONE, "staggered", 64, 129, apart=6),
    Case("outgrown-whole", ALONE, "dense", 76, 193, levels=((64, 70), (128, 140))),
    Case("lost", ALONE, "checkerboard", 76, 193, dtype="bfloat16", levels=LEVELS),
    Case("lost-full", ALONE, "dense", 69, 135, levels=((64, 600), (128, 1200))),
    Case("lost-ragged", ALONE, "dense", 69, 71, levels=((64, 600),)),
    Case("lost-late", ALONE, "staggered", 64, 193, dtype="bfloat16", levels=LEVELS),
    Case(
        "lost-heads",
        ALONE,
        "per-batch-per-head",
        *(76, 150),
        heads=(4, 2),
        batch=2,
        scale=-0.3,
        blocks=2,
        levels=((64, 500),),
        strided=True,
    ),
    Case(
        "lost-two",
        ALONE,
        "per-batch-per-head",
        *(70, 135),
        heads=(2, 1),
        batch=2,
        scale=-0.3,
        levels=((64, 500),),
        strided=True,
    ),
    # A weight between the largest of float16 and what four lanes' sums would allow.
    Case("limit", WORDS, "dense", 8, 121, levels=((120, 32),)),
    Case("words", WORDS, "dead-scattered", 70, 230, bad=(100, 116, 220)),
    Case(
        "straight-whole",
        replace(ALONE, q_stages=1),
        "per-batch-per-head",
        *(76, 65),
        heads=(2, 1),
        batch=2,
        blocks=2,
    ),
    Case("ahead-whole", replace(AHEAD, halves=False), "window", 129, 321, bad=(100,)),
    Case("grows", HALVES, "dense", 20, 193, grows=9),
    Case("spikes", HALVES, "dense", 20, 193, spikes=(47, 95, 111, 159, 175)),
    Case("outgrown", HALVES, "dense", 76, 193, levels=((32, 70), (96, 140))),
    Case("lost-halves", HALVES, "checkerboard", 76, 193, dtype="bfloat16", levels=LEVELS),
    Case("late-grows", HALVES, "staggered", 64, 193, levels=LEVELS),
    Case("late", HALVES, "staggered", 64, 129, apart=6),
    Case("few", STRAIGHT, "causal", 20, 20, blocks=3),
    Case("heads", HALVES, "per-batch-per-head", 76, 65, heads=(2, 1), batch=2, blocks=3, hide=True),
    Case("straight", STRAIGHT, "per-batch-per-head", 76, 65, heads=(2, 1), batch=2, blocks=2),
    Case("race", HALVES, "causal", 65, 129, bad=(100,), race=True),
    Case("empty", HALVES, "dead-last", 150, 20, heads=(2, 1), batch=2, blocks=2),
    Case("ahead", AHEAD, "window", 129, 321, bad=(100,)),
    Case("short", HALVES_PAIR, "dense", 65, 20, heads=(6, 2)),
    Case("wide", WIDE, "global-local", 129, 129, bad=(100,)),
    Case("narrow", AHEAD, "causal", 70, 80, head_dim=48, scale=-0.3),
    Case("wide-heads", HALVES_PAIR, "window-causal", 150, 65, head_dim=72, scale=-0.3),
    Case("pair-race", HALVES_PAIR, "window", 129, 129, race=True, seed=1),
    Case("many", ALONE, "many", 33 * 64, 33 * 64 + 5),
    Case("two", ALONE, "dense", 330, 100),
    Case("three", replace(ALONE, q_stages=3), "dense", 330, 100),
    Case("four", replace(HALVES, q_stages=4), "window", 430, 430, race=True),
)


def gallery(case):
    """The mask; "staggered" has rows whose first keys come a tile after their neighbours', in its
    first half or its second, "many" 32 rows of a tile and one of 34."""
    if case.mask == "many":
        seen = lambda q, k: (k < 5) | (q >= 32 * 64) & (k != 32 * 64 - 3)
        return masks.from_function(seen, case.nq, case.nk)
    if case.mask == "staggered":
        late = lambda q, k: k >= (72 + q // 32 % 2 * 32) * ((q // 8 + q // 16) % 2)
        return masks.from_function(late, case.nq, case.nk)
    return testing.mask_gallery(case.nq, case.nk, batch=case.batch, heads=case.heads[0])[case.mask]


@functools.cache
def problem(case):
    """``mask, (q, k, v), hit``: the rows that meet the bad key."""
    heads, heads_kv = case.heads
    mask = gallery(case)
    shape = case.batch, case.nq, case.nk, heads, heads_kv, case.head_dim
    q, k, v, _ = testing.make_qkv(*shape, DTYPES[case.dtype], seed=3)
    q *= np.linspace(case.grows, 1, case.nq).astype(q.dtype)[:, None, None]
    k *= np.linspace(1, case.grows, case.nk).astype(k.dtype)[:, None, None]
    for i, key in enumerate(case.spikes):
        k[:, key] *= 8 * i + 8
    if case.apart:  # scores far below 0 that are much alike
        q[...], k[...] = q / 16 + case.apart, k / 16 - case.apart
    if case.levels:
        raise_scores(q, k, case.levels, case.scale)
    if case.strided:
        q, k = ordered(q, 0, 2, 1, 3), ordered(k, 1, 0, 2, 3)
    keep = np.broadcast_to(mask.dense(), (case.batch, heads, case.nq, case.nk))
    seen = keep.any(2).reshape(case.batch, heads_kv, -1, case.nk).any(2).transpose(0, 2, 1)
    bad = ~seen & case.hide | np.isin(np.arange(case.nk), case.bad)[:, None]
    key, column = np.ogrid[: case.nk, : case.head_dim]
    v[bad[..., None] & (key % case.head_dim == column)[:, None]] = np.nan
    return mask, (q, k, v), keep[..., case.bad].any(-1)


@functools.cache
def expected(case):
    """Reference and low-precision results, the NaN of V taken for 0."""
    mask, (q, k, v), _ = problem(case)
    v = np.nan_to_num(v.astype(np.float32)).astype(v.dtype)
    yardstick = precise if case.levels else testing.low_precision
    return (
        reference.attention(q, k, v, mask, case.scale),
        yardstick(q, k, v, mask, case.scale),
    )


def check(case, spec_of):
    """Raise unless the kernel is right on ``case``."""
    mask, values, hit = problem(case)
    with sim.options(race=case.race, seed=case.seed):
        out, lse = run(
            case.config, mask, *values, scale=case.scale, blocks=case.blocks, spec_of=spec_of
        )
    (exact, exact_lse), (low, low_lse) = expected(case)
    rows = hit.transpose(0, 2, 1)
    assert np.isnan(out[rows].astype(np.float32)).any(-1).all()
    testing.assert_within_reference(out[~rows], exact[~rows], low[~rows], name="out")
    testing.assert_within_reference(lse[~hit], exact_lse[~hit], low_lse[~hit], name="lse")


def reach(target):
    """Names of the cases that run a module: only one form of the mainloop, if it is of that one."""
    forms = {HALVES_OF: {True}, WHOLE_OF: {False}, RECOVERY_OF: {False}}.get(target, {True, False})
    return [case.name for case in CASES if case.config.halves in forms]


def case_of(case):
    def run_case(modules):
        config, spec = modules[CONFIG].Sm90Config, modules[FWD].fwd_sm90_spec
        check(case, lambda cfg: spec(config(**vars(cfg))))

    return run_case


FAMILY = Family(
    "fwd_sm90",
    CHAIN,
    {case.name: case_of(case) for case in CASES},
    MUTANTS,
    generate=(*PRODUCER, *FORMS, FWD),
    reach=reach,
)
