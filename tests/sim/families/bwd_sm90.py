"""The backward on Hopper in one pass.

Not mutated, for nothing changes:

* the wait for empty dO: its consumers release it together with Q, which the loader has waited for;
* the bytes between panels of dS: a part has one;
* shift −∞ of a query that attends nothing: all that it meets is hidden;
* what the warpgroups still tell each other of dS at the end of a block.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
from faults.sm90_backward import (
    CHAIN,
    COMPUTE,
    CONFIG,
    CONVERT,
    KERNEL,
    LOAD,
    MUTANTS,
    ROWS,
    SURVIVORS,
    TILE,
)
from mutant_family import Family
from sm90_bwd_runs import ALONE, BROAD, FACTOR, TALL, run
from sm90_runs import DTYPES

import masks
from nbflash import reference, testing
from nbflash.backends.sm90.backward.config import Sm90BackwardConfig
from nbflash.cuda import simulator as sim

DEEP = replace(TALL, stages=3)
EDGE = replace(ALONE, full_tiles=True, edge=True)


@dataclass(frozen=True)
class Case:
    """One problem; ``bad`` is a row of q, v or dout that is NaN, or one of k that is −∞.

    With ``hide``, what nothing attends, or what attends nothing, is NaN. With ``low`` scores are so
    far below 0 that 2^shift overflows.
    """

    name: str
    config: Sm90BackwardConfig
    mask: str
    nq: int
    nk: int
    heads: tuple = (1, 1)
    batch: int = 1
    dtype: str = "float16"
    scale: float = 0.3
    blocks: int = 1
    bad: tuple = ()
    hide: bool = False
    low: bool = False
    race: bool = False
    seed: int = 0

    def __str__(self):
        return self.name


CASES = (
    Case("small", ALONE, "dense", 3, 5),
    Case("tall", TALL, "causal", 193, 129, dtype="bfloat16"),
    Case("tall-small", TALL, "causal", 140, 70, dtype="bfloat16"),
    Case("bits", ALONE, "per-head", 70, 129, (2, 1)),
    Case("broad", BROAD, "window", 129, 129),
    Case("heads", ALONE, "per-batch-per-head", 70, 65, (4, 2), 2, blocks=3, hide=True),
    Case("hidden", BROAD, "dead-scattered", 129, 129, blocks=2, hide=True),
    Case("empty", ALONE, "vertical-slash", 20, 200, (2, 2), 2, blocks=2),
    Case("bad-k", BROAD, "full-first", 72, 256, dtype="bfloat16", bad=("k", 143), race=True),
    Case("bad-k-calm", BROAD, "full-first", 72, 192, dtype="bfloat16", bad=("k", 143)),
    Case("bad-q", ALONE, "window", 129, 129, bad=("q", 100)),
    Case("bad-v", ALONE, "window", 129, 129, blocks=4, bad=("v", 66)),
    Case("bad-dout", ALONE, "window", 129, 129, bad=("dout", 66)),
    Case("race", ALONE, "dense", 129, 129, race=True, seed=1),
    Case("tall-race", TALL, "causal", 193, 129, race=True, seed=1),
    Case("deep", DEEP, "dead-scattered", 20, 300, race=True, seed=3),
    Case("full", replace(ALONE, full_tiles=True), "dense", 65, 128, (2, 1)),
    Case("edge", EDGE, "dense", 65, 70, (2, 1), 2, blocks=2, low=True),
)


def gallery(case):
    """The mask; "full-first" has columns of a full tile and a masked one."""
    if case.mask == "full-first":
        return masks.from_function(lambda q, k: (q < 64) | (q % 64 >= k % 8), case.nq, case.nk)
    return testing.mask_gallery(case.nq, case.nk, batch=case.batch, heads=case.heads[0])[case.mask]


@functools.cache
def problem(case):
    """``mask, clean, inputs, results, hit``: rows of dq, dk and dv that meet what is bad."""
    (heads, heads_kv), d = case.heads, case.config.head_dim
    mask = gallery(case)
    clean = testing.make_qkv(
        case.batch, case.nq, case.nk, heads, heads_kv, d, DTYPES[case.dtype], seed=3
    )
    if case.low:
        for x, sign in zip(clean[:2], (1, -1), strict=True):
            x[...] = sign * (abs(x) + 5)
    keep = np.broadcast_to(mask.dense(), (case.batch, heads, case.nq, case.nk))
    which, at = case.bad or ("", -1)
    if which == "k":
        clean[0][..., -1], clean[1][..., -1] = np.abs(clean[0][..., -1]) + 1, 0
    out, lse = (x.copy() for x in reference.attention(*clean[:3], mask, case.scale))
    dirty = {name: x.copy() for name, x in zip(("q", "k", "v", "dout"), clean, strict=True)}
    rows = np.zeros(keep.shape[:3], bool)
    if which in ("k", "v"):
        rows = keep[..., at]
    elif which:
        rows[..., at] = keep[:, :, at].any(-1)
    keys = (keep & rows[..., None]).any(2)
    if which == "k":
        dirty["k"][:, at, :, -1] = -np.inf
        keys[..., :at], keys[..., at + 1 :] = False, False
    elif which:
        dirty[which][:, at] = np.nan
        out[rows.transpose(0, 2, 1)] = np.nan if which != "dout" else 1
    if which == "q":
        lse[rows] = np.nan
    if case.hide:
        unseen = ~keep.any(2).reshape(case.batch, heads_kv, -1, case.nk).any(2).transpose(0, 2, 1)
        idle = ~keep.any(3).transpose(0, 2, 1)
        for name in dirty:
            dirty[name][unseen if name in "kv" else idle] = np.nan
    keys = keys.reshape(case.batch, heads_kv, -1, case.nk).any(2).transpose(0, 2, 1)
    return mask, clean, tuple(dirty.values()), (out, lse), (rows.transpose(0, 2, 1), keys, keys)


@functools.cache
def expected(case):
    """Gradient of dLSE; the gradients in float64 and in low precision, without what is bad."""
    mask, (q, k, v, dout), *_ = problem(case)
    shape = case.batch, case.heads[0], case.nq
    dlse = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    arguments = dout, q, k, v, mask, case.scale, dlse
    low = testing.low_precision_backward(*arguments)
    return dlse, reference.attention_backward(*arguments), low


def check(case, modules):
    """Raise unless the kernels of ``modules`` are right on ``case``."""
    mask, _, inputs, results, hits = problem(case)
    dlse, *yardsticks = expected(case)
    config = modules[CONFIG].Sm90BackwardConfig(**vars(case.config))
    with sim.options(race=case.race, seed=case.seed):
        got = run(
            config,
            mask,
            inputs,
            scale=case.scale,
            blocks=case.blocks,
            results=results,
            dlse=dlse,
            statistics=modules[ROWS].statistics_sm90_spec,
            convert_dq=modules[CONVERT].convert_dq_sm90_spec,
            spec_of=modules[KERNEL].bwd_sm90_spec,
        )
    for name, x, exact, low, hit in zip(("dq", "dk", "dv"), got, *yardsticks, hits, strict=True):
        assert np.isnan(x[hit].astype(np.float32)).any(-1).all()
        testing.assert_within_reference(x[~hit], exact[~hit], low[~hit], name=name, factor=FACTOR)


def case_of(case):
    return lambda modules: check(case, modules)


FAMILY = Family(
    "bwd_sm90",
    CHAIN,
    {case.name: case_of(case) for case in CASES},
    MUTANTS,
    generate=(LOAD, TILE, COMPUTE, KERNEL),
    elsewhere=("load_keys",),
    survivors=SURVIVORS,
)
