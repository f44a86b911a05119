"""Forward and backward by mma, over all that they are made of."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import poisoned_rows
from faults.sm80 import BACKWARD, CHAIN, CONFIG, DQ_PART, EXECUTOR, FORWARD, MUTANTS, WALK
from mutant_family import Family

import masks
from nbflash import reference, scores, testing
from nbflash.cuda import simulator as sim
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward as problem_of

NAMES, FACTORS = ("out", "lse", "dq", "dk", "dv"), (2, 2, 3, 3, 3)
SEED = 3, 2**40 + 5
SCORES = {"softcap": scores.softcap(5.0), "alibi": scores.alibi(2)}


@dataclass(frozen=True)
class Case:
    """One problem, as small as it can be and still tell.

    ``form``: "forward", "one-pass" or "two-passes"; of what ``hide`` names, what nothing attends
    is ``garbage``.
    """

    form: str
    mask: str
    nq: int
    nk: int
    heads: tuple = (2, 1)
    batch: int = 1
    head_dim: int = 16
    dtype: type = np.float16
    warps: int = 1
    m_tiles: int = 1
    width: int = 16
    stages: int = 2
    vector_red: bool = True
    hide: str = ""
    garbage: float = np.nan
    scale: float | None = None
    dropout: float = 0.0
    score: str = ""
    race: bool = False

    def __str__(self):
        words = [f"{self.form}-{self.mask}-{self.nq}x{self.nk}"]
        for key, value in vars(self).items():
            usual = vars(Case).get(key, value)
            if value is not usual and value != usual:
                words.append(f"{key}={value}".replace(" ", ""))
        return " ".join(words)


F, ONE, TWO = "forward", "one-pass", "two-passes"
BOTH = (
    Case("", "causal", 20, 37),
    Case("", "window", 17, 20, (1, 1), m_tiles=2, stages=3),
    Case("", "checkerboard", 20, 40, (1, 1), width=48, warps=2, head_dim=24, race=True),
    Case("", "per-batch-per-head", 17, 33, (4, 2), batch=2, head_dim=8),
    Case("", "dead-last", 20, 40, (2, 2), head_dim=40, warps=2, stages=3, vector_red=False),
    Case("", "dense", 32, 64, (2, 1), stages=3, race=True, width=32),
    Case("", "dead-keys", 20, 40, hide="qkvo", garbage=-np.inf),
    Case("", "dead-scattered", 20, 40, hide="qkvo", m_tiles=2, head_dim=32),
    Case("", "tree", 20, 36, (1, 1), scale=-0.4),
    Case("", "causal", 33, 40, (1, 1), dropout=0.3, width=32, m_tiles=2),
    Case("", "dense", 32, 64, (1, 1), dropout=0.3, width=64, warps=2),
    Case("", "strided", 20, 36, (1, 1), score="softcap"),
    Case("", "window", 33, 40, (2, 2), score="alibi", m_tiles=2),
    Case("", "dead-keys", 40, 70, (1, 1), warps=2, hide="qkvo", race=True),
    Case("", "scattered", 40, 70, (1, 1), warps=2, m_tiles=2, width=32),
    Case("", "by-head", 20, 37, (2, 1)),
)
FORWARD_CASES = tuple(replace(case, form=F) for case in BOTH)
BACKWARD_CASES = tuple(replace(case, form=form) for case in BOTH for form in (ONE, TWO))
ONE_STAGE = (
    Case(ONE, "causal", 33, 40, stages=1, race=True, width=32),
    Case(ONE, "checkerboard", 20, 70, (1, 1), warps=2, width=64, head_dim=64, vector_red=False),
    Case(TWO, "causal", 20, 24, (1, 1), head_dim=136, stages=1),
    Case(TWO, "causal", 40, 40, (1, 1), stages=1, warps=2, race=True),
)


def relaid(x, axes):
    """The same values with the axes of memory in another order."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


def mask_of(case):
    """Of the gallery, intervals that differ from head to head, or bits without a period of 32."""
    if case.mask == "by-head":
        sizes = case.nq, case.nk
        return masks.per_head([masks.causal(*sizes), masks.window(*sizes, left=3, right=2)])
    if case.mask == "scattered":
        rows, columns = np.ogrid[: case.nq, : case.nk]
        return masks.from_dense((5 * rows + 7 * columns) % 11 < 4)
    return testing.mask_gallery(case.nq, case.nk, batch=case.batch, heads=case.heads[0])[case.mask]


@functools.cache
def problem(case):
    """``mask, (q, k, v, dout), dlse``, each tensor with its own order of axes in memory."""
    heads, heads_kv = case.heads
    mask = mask_of(case)
    sizes = case.batch, case.nq, case.nk, heads, heads_kv, case.head_dim
    q, k, v, dout = testing.make_qkv(*sizes, case.dtype, seed=3)
    keep = np.broadcast_to(mask.dense(), (case.batch, heads, case.nq, case.nk))
    attends = keep.any(3).transpose(0, 2, 1)
    seen = keep.any(2).reshape(case.batch, heads_kv, -1, case.nk).any(2).transpose(0, 2, 1)
    for name, x, used in (("q", q, attends), ("k", k, seen), ("v", v, seen), ("o", dout, attends)):
        if name in case.hide:
            x[~used] = case.garbage
    dlse = np.random.default_rng(5).standard_normal((case.batch, heads, case.nq))
    dlse = np.where(keep.any(3), dlse, 0).astype(np.float32)
    tensors = (
        relaid(q, (0, 2, 1, 3)),
        relaid(k, (1, 0, 2, 3)),
        relaid(v, (2, 1, 0, 3)),
        relaid(dout, (1, 2, 0, 3)),
    )
    return mask, tensors, np.ascontiguousarray(dlse.transpose(1, 2, 0)).transpose(2, 0, 1)


def more_of(case):
    """Dropout and score, as the references take them."""
    more = {"score": SCORES[case.score]} if case.score else {}
    return more | ({"dropout": case.dropout, "seed": SEED} if case.dropout else {})


@functools.cache
def expected(case):
    """Reference and low-precision results of a case, whatever its form."""
    mask, (q, k, v, dout), dlse = problem(case)
    given = case.scale, dlse
    return tuple(
        forward(q, k, v, mask, case.scale, **more_of(case))
        + backward(dout, q, k, v, mask, *given, **more_of(case))
        for forward, backward in (
            (reference.attention, reference.attention_backward),
            (testing.low_precision, testing.low_precision_backward),
        )
    )


def executor_of(modules, case, q, k, v, mask):
    """What runs a case with the kernels of ``modules``."""
    config, shape = modules[CONFIG], (case.warps, case.m_tiles, case.width)
    name, d = q.dtype.name, case.head_dim

    def backward(deterministic):
        base = config.Sm80BackwardConfig(name, d, *shape, case.stages)
        how = {"deterministic": deterministic, "vector_red": case.vector_red}
        return config.passes_of(base, **how)

    spec = AttentionSpec(
        problem_of(q, k, v, case.scale), mask, SCORES.get(case.score), case.dropout
    )
    forward = config.Sm80Config(name, d, *shape, max(case.stages, 2))
    return modules[EXECUTOR].Sm80Executor(spec, config=forward, backward=backward)


def results(modules, case, mask, q, k, v, dout, dlse, out=None, lse=None):
    """What the form of a case gives: ``(out, lse)``, or the gradients of those given."""
    executor = executor_of(modules, case, q, k, v, mask)
    seed = SEED if case.dropout else None
    with sim.options(race=case.race):
        if case.form == F:
            out = relaid(testing.poisoned(q.shape, q.dtype), (1, 0, 2, 3))
            lse = testing.poisoned(dlse.shape, np.float32)
            executor.forward(q, k, v, out, lse, seed)
            return out, lse
        dq, dk, dv = (testing.poisoned(x.shape, x.dtype) for x in (q, k, v))
        dq, dv = relaid(dq, (0, 2, 1, 3)), relaid(dv, (2, 0, 1, 3))
        given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), dlse
        executor.backward(*given, dq, dk, dv, case.form == TWO, seed)
    return dq, dk, dv


def check(modules, case):
    """Raise unless the kernels are right on a case."""
    mask, tensors, dlse = problem(case)
    exact, low = expected(case)
    got = results(modules, case, mask, *tensors, dlse, *exact[:2])
    part = slice(0, 2) if case.form == F else slice(2, 5)
    named = zip(NAMES[part], FACTORS[part], got, exact[part], low[part], strict=True)
    for name, factor, *values in named:
        testing.assert_within_reference(*values, name=name, factor=factor)


def check_a_row_of_nan(modules, form, which):
    """Raise unless a row of NaN shows in what depends on it, and only there."""
    case, n = Case(form, "window", 33, 33, (1, 1)), 33
    mask = testing.mask_gallery(n, n)["window"]
    inputs = testing.make_qkv(1, n, n, 1, 1, 16, np.float16)
    zeros = np.zeros((1, 1, n), np.float32)

    def run(q, k, v, dout):
        out, lse = reference.attention(q, k, v, mask)
        if form == F:
            return results(modules, case, mask, q, k, v, dout, zeros)
        return out, lse, *results(modules, case, mask, q, k, v, dout, zeros, out, lse)

    poisoned_rows.check(run, mask, inputs, which, 19)


def check_one_element_of_v(modules):
    """Raise unless NaN in a late, odd column of a key is in that column of who attends it."""
    case, n = Case(F, "window", 33, 33, (1, 1), head_dim=32), 33
    mask = testing.mask_gallery(n, n)["window"]
    q, k, v, dout = testing.make_qkv(1, n, n, 1, 1, case.head_dim, np.float16)
    v[0, 19, 0, 27] = np.nan
    out, _ = results(modules, case, mask, q, k, v, dout, np.zeros((1, 1, n), np.float32))
    attends = mask.dense()[:, 19]
    assert np.isnan(out[0, attends, 0, 27]).all()
    assert np.isfinite(out[0, ~attends]).all()


CASES = {str(case): (check, case) for case in (*FORWARD_CASES, *BACKWARD_CASES, *ONE_STAGE)}
CASES |= {
    f"{form}-nan-{which}": (check_a_row_of_nan, form, which)
    for form, names in ((F, "v"), (ONE, ("q", "k", "dout")), (TWO, ("k", "v")))
    for which in names
}
CASES["forward-nan-element"] = (check_one_element_of_v,)
OF_FORWARD = tuple(name for name in CASES if name.startswith(F))
OF_BACKWARD = tuple(name for name in CASES if not name.startswith(F))


def reach(target):
    """Names of the cases of the directions that the module ``target`` serves."""
    if target == FORWARD:
        return OF_FORWARD
    return OF_BACKWARD if target in (BACKWARD, DQ_PART, WALK) else tuple(CASES)


def case_of(run, *arguments):
    return lambda modules: run(modules, *arguments)


BY_LSE = "a query that attends a key of NaN has an LSE of NaN, which makes its P NaN"
SURVIVORS = {
    "mma.poison: no unit is poisoned": BY_LSE,
    "sm80.backward: units not poisoned": BY_LSE,
    "mma.softmax: grown in one lane": "no collective depends on it: lanes may take two branches",
    "sm80.row_kernels: a row that attends nothing": "all its pairs are masked, whatever its shift",
}

FAMILY = Family(
    "sm80",
    CHAIN,
    {name: case_of(*how) for name, how in CASES.items()},
    MUTANTS,
    generate=(FORWARD, WALK, BACKWARD),
    reach=reach,
    survivors=SURVIVORS,
)
