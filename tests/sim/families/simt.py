"""Forward and backward without tensor cores; a fault is tried on the cases of its direction."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import poisoned_rows
from faults.simt_backward import (
    BACKWARD,
    BWD,
    DELTA,
    EXECUTOR,
    GRADIENT,
    GRADIENTS,
    ROUND,
    ROW_KERNELS,
    SURVIVORS,
)
from faults.simt_forward import FORWARD
from faults.simt_tiles import ASYNC, ATOMIC, COPY, GEMM, GUARD, MASK, SOFTMAX, TILES, UNROLL
from mutant_family import Family
from simt_runs import with_alignment

import masks
from nbflash import reference, testing
from nbflash.backends.simt.configs import SimtBackwardConfig, SimtConfig
from nbflash.cuda import simulator as sim
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward as problem_of

FWD = "nbflash.backends.simt.forward"
# In the order of their imports.
CHAIN = (
    UNROLL,
    ATOMIC,
    ASYNC,
    COPY,
    GUARD,
    SOFTMAX,
    MASK,
    GEMM,
    GRADIENT,
    FWD,
    BWD,
    DELTA,
    ROUND,
    EXECUTOR,
)
MUTANTS = [
    *((FWD, mutant) for mutant in FORWARD),
    *TILES,
    *((BWD, mutant) for mutant in BACKWARD),
    *((GRADIENT, mutant) for mutant in GRADIENTS),
    *ROW_KERNELS,
]

GEOMETRY = {"tx": 2, "ty": 2, "rm": 4, "rn": 8}
ROWS_AND_COLUMNS = ({"walk": "rows"}, {"walk": "columns"})
ONE_PASS = ({"walk": "columns", "atomic_dq": True},)
# FlashAttention's own tests allow gradients three times the plain computation's error.
GRADIENT_FACTOR = 3.0


def gallery(name, nq, nk, batch, heads):
    if name == "one-head-dead":
        return masks.per_head([~masks.dense(nq, nk), masks.dense(nq, nk)])
    return testing.mask_gallery(nq, nk, batch=batch, heads=heads)[name]


@dataclass(frozen=True)
class Case:
    """One problem, as small as it can be and still tell. Tiles are 8 queries by 16 keys.

    Of the tensors named in ``hide``, what nothing attends ends with a NaN; ``apart`` puts all
    scores far below 0; ``variant`` changes the configuration.
    """

    mask: str
    nq: int
    nk: int
    heads: tuple = (2, 1)
    batch: int = 1
    head_dim: int = 8
    dtype: str = "float32"
    scale: float = 0.3
    hide: str = ""
    apart: float = 0.0
    race: bool = False
    variant: tuple = ()

    def __str__(self):
        parts = [self.mask, f"{self.nq}x{self.nk}", f"d{self.head_dim}", self.dtype]
        parts += ["apart"] * bool(self.apart) + ["race"] * self.race
        parts += [f"{key}-{value}" for key, value in self.variant]
        return "-".join(parts)

    def config(self, kind, **more):
        return kind(self.dtype, self.head_dim, **{**GEOMETRY, **dict(self.variant), **more})


CASES = (
    Case("causal", 5, 5),
    Case("dense", 9, 21, batch=2),
    Case("one-head-dead", 9, 20),
    Case("dense", 12, 37, race=True),
    Case("dead-scattered", 9, 21, heads=(4, 2), hide="q"),
    Case("dead-last", 9, 20, hide="dout"),
    Case("per-batch-per-head", 9, 17, heads=(4, 2), batch=2),
    Case("padding", 12, 21, batch=2, hide="kv"),
    Case("window-causal", 20, 20),
    Case("dense", 9, 17, head_dim=5),
    Case("dead-keys", 5, 9, head_dim=6, hide="v"),
    Case("causal", 9, 17, head_dim=20),
    Case("causal", 9, 17, dtype="bfloat16"),
    Case("causal", 9, 17, dtype="float16"),
    Case("causal", 12, 20, variant=(("vectors", True), ("chunks", 2))),
    Case("checkerboard", 9, 45, variant=(("rn", 20),)),
    Case("causal", 20, 17, variant=(("rm", 8),)),
)
FORWARD_CASES = (
    *CASES,
    Case("dense", 5, 9, dtype="float64"),
    Case("dense", 5, 17, apart=8),
    Case("causal", 20, 37, variant=(("p_over_k", True),)),
    Case("dense", 12, 37, race=True, variant=(("p_over_k", True),)),
    Case("causal", 40, 40, race=True, variant=(("tx", 8), ("ty", 8), ("rn", 4))),
)
# V is sent asynchronously: with tiles whose V is searched for NaN, and with full ones.
SEND = (("vectors", True), ("send_v", True))
SENDING_CASES = (
    Case("causal", 9, 37, heads=(2, 2), variant=SEND),
    Case("padding", 12, 21, batch=2, hide="kv", variant=SEND),
    Case("dense", 12, 37, race=True, variant=SEND),
    Case("dense", 9, 32, head_dim=16, race=True, variant=(*SEND, ("tx", 4), ("rn", 4))),
    Case("window-causal", 20, 37, variant=(*SEND, ("chunks", 2), ("p_over_k", True))),
    Case("dense", 40, 64, head_dim=32, race=True, variant=(*SEND, ("tx", 8), ("ty", 8), ("rn", 4))),
)
FORWARD_CASES += SENDING_CASES
BACKWARD_CASES = (*CASES, Case("causal", 12, 20, variant=(("vector_red", True),)))


def relaid(x, axes):
    """The same values with the axes of memory in another order."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


@functools.cache
def problem(case):
    """``mask, (q, k, v, dout)``, each tensor with its own order of axes in memory."""
    heads, heads_kv = case.heads
    mask = gallery(case.mask, case.nq, case.nk, case.batch, heads)
    q, k, v, dout = testing.make_qkv(
        *(case.batch, case.nq, case.nk, heads, heads_kv, case.head_dim), case.dtype, seed=3
    )
    keep = np.broadcast_to(mask.dense(), (case.batch, heads, case.nq, case.nk))
    attends = keep.any(3).transpose(0, 2, 1)
    seen = keep.any(2).reshape(case.batch, heads_kv, -1, case.nk).any(2).transpose(0, 2, 1)
    for name, x, used in (
        ("q", q, attends),
        ("dout", dout, attends),
        ("k", k, seen),
        ("v", v, seen),
    ):
        if name in case.hide:
            x[~used, -1] = np.nan
    if case.apart:  # scores that are much alike
        q[...], k[...] = q / 16 + case.apart, k / 16 - case.apart
    return mask, (
        relaid(q, (0, 2, 1, 3)),
        relaid(k, (1, 0, 2, 3)),
        relaid(v, (2, 1, 0, 3)),
        relaid(dout, (1, 2, 0, 3)),
    )


@functools.cache
def gradient_of_lse(case):
    """dlse in an order of its own; NaN where nothing is attended."""
    mask, _ = problem(case)
    shape = case.batch, case.heads[0], case.nq
    dlse = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    dlse[~np.broadcast_to(mask.dense().any(-1), shape)] = np.nan
    return np.ascontiguousarray(dlse.transpose(1, 2, 0)).transpose(2, 0, 1)


@functools.cache
def expected(case):
    """Reference and low-precision results: ``(out, lse)`` and ``(dq, dk, dv)`` of each."""
    mask, (q, k, v, dout) = problem(case)
    dlse = np.nan_to_num(gradient_of_lse(case))
    return (
        reference.attention(q, k, v, mask, case.scale),
        testing.low_precision(q, k, v, mask, case.scale),
        reference.attention_backward(dout, q, k, v, mask, case.scale, dlse),
        testing.low_precision_backward(dout, q, k, v, mask, case.scale, dlse),
    )


def run_forward(executors, config, q, k, v, mask, scale):
    """``(out, lse)`` from the kernels of the module ``executors``."""
    problem = problem_of(q, k, v, scale)
    executor = executors.SimtExecutor(AttentionSpec(problem, mask), config=config)
    out = relaid(testing.poisoned(q.shape, q.dtype), (1, 0, 2, 3))
    lse = testing.poisoned((q.shape[0], q.shape[2], q.shape[1]), problem.lse_dtype)
    executor.forward(q, k, v, out, lse)
    return out, lse


def check_forward(executors, case):
    """Raise unless the forward kernel is right on ``case``."""
    mask, (q, k, v, _) = problem(case)
    exact, low, _, _ = expected(case)
    with sim.options(race=case.race):
        got = run_forward(executors, case.config(SimtConfig), q, k, v, mask, case.scale)
    for name, *values in zip(("out", "lse"), got, exact, low, strict=True):
        testing.assert_within_reference(*values, name=name)


def check_exactly(executors, nq=9, nk=20):
    """Raise unless a saturated softmax gathers rows of V bit for bit, scores being 8192."""
    config = Case("dense", nq, nk).config(SimtConfig)
    q, k, v, _, scale, out, lse, _ = testing.code_word_oracle(nq, 8, nk)
    got, got_lse = run_forward(executors, config, q, k, v, masks.dense(nq, nk), scale)
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(got_lse, lse.astype(np.float32))


def check_backward(executors, case):
    """Raise unless both forms of the backward kernel are right on ``case``."""
    mask, (q, k, v, dout) = problem(case)
    _, (out, lse), *_ = expected(case)
    dlse, lse = gradient_of_lse(case), relaid(lse, (1, 0, 2))
    for form in (ROWS_AND_COLUMNS, ONE_PASS):
        inputs = dout, q, k, v, out, lse, dlse
        assert_gradients(case, run_backward(executors, case, form, mask, inputs, case.scale))


def assert_gradients(case, got):
    """Hold dq, dk and dv to their budgets."""
    _, _, exact, low = expected(case)
    for name, *values in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
        testing.assert_within_reference(*values, name=name, factor=GRADIENT_FACTOR)


def run_backward(executors, case, form, mask, inputs, scale):
    """``(dq, dk, dv)``, each with its own order of axes, from the kernels of ``executors``."""
    _, q, k, v, *_ = inputs
    configs = [case.config(SimtBackwardConfig, **fields) for fields in form]
    executor = executors.SimtExecutor(
        AttentionSpec(problem_of(q, k, v, scale), mask),
        config=configs[0],
        backward=lambda deterministic, vectors: configs,
    )
    dq, dk, dv = (testing.poisoned(x.shape, x.dtype) for x in (q, k, v))
    got = relaid(dq, (0, 2, 1, 3)), dk, relaid(dv, (2, 0, 1, 3))
    with sim.options(race=case.race):
        executor.backward(*inputs, *got, form is ROWS_AND_COLUMNS)
    return got


def check_another_alignment(executors):
    """Raise unless a second dout may have rows that are no whole vectors apart."""
    case = Case("causal", 5, 5)
    mask, (q, k, v, dout) = problem(case)
    _, (out, lse), *_ = expected(case)
    executor = executors.SimtExecutor(
        AttentionSpec(replace(problem_of(q, k, v, case.scale), alignment=16), mask),
        config=case.config(SimtConfig),
        backward=lambda deterministic, vectors: [
            case.config(SimtBackwardConfig, **ONE_PASS[0], vectors=vectors)
        ],
    )
    apart = np.pad(dout, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., :-1]
    for x in (dout, apart):
        got = [testing.poisoned(y.shape, y.dtype) for y in (q, k, v)]
        with with_alignment():
            executor.backward(x, q, k, v, out, lse, gradient_of_lse(case), *got, False)
        assert_gradients(case, got)


def check_a_row_of_nan(executors):
    """Raise unless a row of NaN leaves the gradients of keys that its mask hides alone."""
    case = Case("window", 17, 17)
    mask, inputs = gallery("window", 17, 17, 1, 1), testing.make_qkv(1, 17, 17, 1, 1, 8)
    for form in (ROWS_AND_COLUMNS, ONE_PASS):

        def run(q, k, v, dout, form=form):
            out, lse = reference.attention(q, k, v, mask)
            given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), np.zeros_like(lse)
            return out, lse, *run_backward(executors, case, form, mask, given, None)

        poisoned_rows.check(run, mask, inputs, "q", 11)


def check_a_row_without_weight(executors):
    """Raise unless a row all of whose scores are −∞ counts as one that attends nothing."""
    case, mask = Case("causal", 17, 17, dtype="float64"), gallery("causal", 17, 17, 1, 1)
    q, k, v, dout = testing.make_qkv(1, 17, 17, 1, 1, 8, np.float64)
    q[..., 0], k[..., 0] = 0, 1e10
    rest = masks.from_function(lambda i, j: (j <= i) & (i != 11), 17, 17)
    exact = reference.attention_backward(dout, q, k, v, rest)
    low = testing.low_precision_backward(dout, q, k, v, rest)
    q[0, 11, 0, 0] = -1e300
    out, lse = reference.attention(q, k, v, mask)
    assert lse[0, 0, 11] == -np.inf
    for form in (ROWS_AND_COLUMNS, ONE_PASS):
        given = dout, q, k, v, out, lse, np.zeros_like(lse)
        got = run_backward(executors, case, form, mask, given, None)
        for name, *values in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
            testing.assert_within_reference(*values, name=name, factor=GRADIENT_FACTOR)


def reach(target):
    """Names of the cases of the directions that the module ``target`` serves."""
    forward = [] if target in (BWD, GRADIENT, DELTA, ROUND) else FORWARD_CHECKS
    backward = [] if target == FWD else BACKWARD_CHECKS
    return [*forward, *backward]


FORWARD_CHECKS = {f"forward-{case}": (check_forward, case) for case in FORWARD_CASES}
FORWARD_CHECKS["saturated"] = (check_exactly,)
BACKWARD_CHECKS = {f"backward-{case}": (check_backward, case) for case in BACKWARD_CASES}
BACKWARD_CHECKS["row-of-nan"] = (check_a_row_of_nan,)
BACKWARD_CHECKS["another-alignment"] = (check_another_alignment,)
BACKWARD_CHECKS["row-without-weight"] = (check_a_row_without_weight,)


def case_of(check, *arguments):
    return lambda modules: check(modules[EXECUTOR], *arguments)


FAMILY = Family(
    "simt",
    CHAIN,
    {name: case_of(*check) for name, check in (FORWARD_CHECKS | BACKWARD_CHECKS).items()},
    MUTANTS,
    generate=(FWD, BWD, ASYNC),
    reach=reach,
    survivors=SURVIVORS,
)
