"""Gradients of a score's arrays in the SIMT kernel."""

import functools
from dataclasses import dataclass

import numpy as np
from faults.score_gradients import CHAIN, EXECUTOR, KERNEL, MUTANTS
from mutant_family import Family
from score_gradient_runs import DROPOUT, HEADS, OUTSIDE, check_outside, run
from score_gradients import expected, hold, learned_scores
from simt_runs import Geometry

from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery


@dataclass(frozen=True)
class Case:
    """One problem, as small as it can be and still tell. Tiles are 8 queries by 16 keys."""

    name: str
    mask: str
    nq: int
    nk: int
    batch: int = 1
    head_dim: int = 8
    dtype: str = "float32"
    dropout: bool = False
    hide: bool = False  # NaN in dead keys; where P is 0, dP is no number
    race: bool = False

    def __str__(self):
        words = f"{self.name}-{self.mask}-{self.nq}x{self.nk}-d{self.head_dim}-{self.dtype}"
        return words + "-dropout" * self.dropout + "-hide" * self.hide + "-race" * self.race


CASES = (
    Case("bias", "causal", 5, 5),
    Case("composed", "per-batch-per-head", 9, 21, batch=2),
    Case("custom", "window-causal", 12, 37),
    Case("alibi", "dead-scattered", 9, 20, batch=2),
    Case("bias-of-heads", "dense", 9, 37, dropout=True, head_dim=20),
    Case("bias-of-keys", "dead-keys", 9, 37, hide=True),
    Case("relative", "checkerboard", 12, 37, dtype="bfloat16"),
    Case("from-the-end", "dense", 9, 6),
    Case("composed", "dense", 9, 37, race=True),
)


@functools.cache
def problem(case):
    """The mask, the tensors in orders of axes of their own, the score and what else there is."""
    mask = mask_gallery(case.nq, case.nk, batch=case.batch, heads=HEADS)[case.mask]
    sizes = case.batch, case.nq, case.nk, HEADS, 2, case.head_dim
    orders = (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3)
    inputs = [
        np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        for x, order in zip(make_qkv(*sizes, case.dtype, seed=3), orders, strict=True)
    ]
    dlse = np.random.default_rng(5).standard_normal((case.batch, HEADS, case.nq))
    how = {"scale": 0.6, "dlse": dlse, **(DROPOUT if case.dropout else {})}
    score = learned_scores(case.nq, case.nk, case.batch)[case.name]
    if case.hide:
        score = scores.bias(
            np.where(np.arange(case.nk) == case.nk - 1, -1e4, 0.0)[None, None, None]
        )
    wanted = expected(inputs, mask, score=score, **how)
    if case.hide:
        for x in inputs[1:3]:
            x[:, ~mask.dense().any(0)] = np.nan
        inputs[2][:, -1] = 3e38
    return mask, inputs, score, how, wanted


def check(module, case):
    """Raise unless the kernel is right on ``case``."""
    mask, inputs, score, how, wanted = problem(case)
    with sim.options(race=case.race):
        hold(run(Geometry(rn=8), mask, inputs, score, module=module, **how), *wanted)


def case_of(check, *case):
    return lambda modules: check(modules[EXECUTOR], *case)


FAMILY = Family(
    "score_gradients",
    CHAIN,
    {str(case): case_of(check, case) for case in CASES}
    | {part.__name__.strip("_"): case_of(check_outside, part, 9, 12) for part in OUTSIDE},
    MUTANTS,
    generate=(KERNEL,),
)
