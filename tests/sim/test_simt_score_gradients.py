"""Gradients of a score's arrays in the SIMT kernel, in the simulator, with faults planted in it."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from mutant_family import Family
from mutants_score_gradients import CHAIN, EXECUTOR, KERNEL, MUTANTS
from score_gradients import NAMES, expected, hold, learned_scores
from simt_runs import DTYPES, Geometry

import masks
import nbflash
from nbflash import reference, scores, testing
from nbflash.backends.simt import score_gradient_host as simt_score
from nbflash.cuda import simulator as sim
from nbflash.inputs.problem import check_forward
from nbflash.testing import make_qkv, mask_gallery

HEADS = 4
TILE = Geometry()  # 8 × 8
MASKS = tuple(mask_gallery(8))
# N below a tile, one over, several; more queries than keys and fewer.
LENGTHS = ((1, 3), (5, 8), (17, 9), (9, 23))
DROPOUT = {"dropout": 0.3, "seed": (5, 6)}


def run(geometry, mask, inputs, score, *, module=simt_score, scale=None, dlse=None, **how):
    """The gradients, on poisoned memory, from the executor of ``module``."""
    q, k, v, dout = inputs
    problem = check_forward(q, k, v, scale)
    clean = [np.nan_to_num(x.astype(np.float64)) for x in (q, k, v)]
    out, lse = reference.attention(*clean, mask, scale, score, **how)
    out, lse = out.astype(q.dtype), lse.astype(problem.lse_dtype)
    fitted = geometry.fitted(problem.dtype, problem.head_dim)
    options = {"dropout": how.get("dropout", 0.0), "backward": fitted.backward(problem)}
    executor = module.SimtScoreBackward(problem, mask, score, **options)
    shapes = [part.shape for parts in score.parts for part in parts]
    sums = tuple(testing.poisoned(shape, problem.lse_dtype) for shape in shapes)
    dlse = np.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)
    executor(dout, q, k, v, out, lse, dlse, sums, how.get("seed"))
    return sums


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_array(name, lengths):
    """Every score at every length; masks, dtypes and what else there is are dealt out."""
    start = NAMES.index(name) + len(NAMES) * LENGTHS.index(lengths)
    for i in range(start, start + len(MASKS), 11):
        mask = mask_gallery(*lengths, batch=2, heads=HEADS)[MASKS[i % len(MASKS)]]
        dtype, batch = tuple(DTYPES.values())[(start + i) % 4], mask.batch or 1 + i % 2
        inputs = make_qkv(batch, *lengths, HEADS, 2, 8, dtype, i)
        score, how = learned_scores(*lengths, batch)[name], DROPOUT if i % 3 == 0 else {}
        how = {**how, "scale": -0.4 if i % 5 == 0 else None}
        with sim.options(seed=i):
            got = run(replace(TILE, vectors=bool(i % 2)), mask, inputs, score, **how)
        hold(got, *expected(inputs, mask, score=score, **how))


@pytest.mark.parametrize("name", NAMES)
def test_garbage_where_nothing_attends(name):
    """Keys that nothing sees, and queries that see nothing, may be NaN; what is theirs is 0."""
    score = learned_scores(9, 20)[name]
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < 18) & (q > 1), 9, 20)
    clean = make_qkv(1, 9, 20, HEADS, 2, 8)
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, 18], [3, 19], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    got = run(TILE, mask, dirty, score)
    hold(got, *expected(clean, mask, score=score))
    if name == "bias":
        assert not got[0][..., [3, 18, 19]].any()
        assert not got[0][..., :2, :].any()


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


def _plus(s, b, h, q_idx, kv_idx, table):
    return s + table[q_idx, kv_idx]


def _one(s, b, h, q_idx, kv_idx, table):
    return 1.0


def _inside(s, b, h, q_idx, kv_idx, table):
    return (q_idx, kv_idx), 1


def _next_row(s, b, h, q_idx, kv_idx, table):
    return (q_idx, kv_idx if 0 < kv_idx < 3 else kv_idx + table.shape[1]), 1


def _row_behind(s, b, h, q_idx, kv_idx, table):
    return (q_idx if 0 < kv_idx < 3 else q_idx + table.shape[0], kv_idx), 1


def _row_before(s, b, h, q_idx, kv_idx, table):
    return (q_idx if 0 < kv_idx < 3 else q_idx - 2 * table.shape[0], kv_idx), 1


OUTSIDE = _next_row, _row_behind, _row_before


def check_outside(module, part, nq, nk):
    """Raise unless scores with an index outside leave NaN at the first element, and no trace."""
    inputs = make_qkv(1, nq, nk, 1, 1, 8)
    exact, got = (
        run(TILE, masks.dense(nq, nk), inputs, score, module=module)[0]
        for score in (
            scores.custom(_plus, _one, (np.zeros((nq, nk)),), (p,)) for p in (_inside, part)
        )
    )
    exact[:, 0], exact[:, 3:], exact[0, 0] = 0, 0, np.nan
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("part", OUTSIDE)
@pytest.mark.parametrize(("nq", "nk"), [(9, 12), (1, 1)])
def test_an_index_outside_its_array(part, nq, nk):
    check_outside(simt_score, part, nq, nk)


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


@FAMILY.each_case
def test_the_cases_of_the_faults_pass(case):
    FAMILY.passes(case)


@FAMILY.each_mutant
def test_mutant_is_caught(mutant, assert_killed):
    assert_killed(FAMILY, mutant)


def test_the_public_function():
    q, k, v, dout = inputs = make_qkv(1, 9, 20, HEADS, 2, 8, np.float64)
    score, how = learned_scores(9, 20)["composed"], {"causal": True, "impl": "simt"}
    out, lse = nbflash.attention(q, k, v, score=score, return_lse=True, **how)
    got = nbflash.score_backward(dout, q, k, v, out, lse, score=score, **how)
    hold(got, *expected(inputs, masks.causal(9, 20), score=score))


def test_a_whole_bias_is_the_gradient_of_the_scores():
    """Whatever is composed before it: dS' itself, the same for the table of one more function."""
    inputs = make_qkv(1, 9, 20, HEADS, 2, 8)
    bias = learned_scores(9, 20)["bias"]
    with_alibi = scores.compose(bias, scores.alibi(np.zeros(HEADS)))
    alone, (first, slopes) = (run(TILE, masks.dense(9, 20), inputs, s) for s in (bias, with_alibi))
    np.testing.assert_array_equal(alone[0], first)
    assert slopes.shape == (HEADS,)
