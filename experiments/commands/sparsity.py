"""Runtime against sparsity: check every mask, then time them all against each other.

One round of the measurement runs every mask, the dense run of nbflash itself and dense masked
softmax on the same array library once, in a shuffled order.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import masks
import nbflash
from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.errors import BadInput, OutOfBudget, one_line
from experiments.harness.inputs import load_qkv, random_qkv
from experiments.harness.oracle import Oracle, Verdict, nearest, sample_rows, sampled
from experiments.harness.passes import BACKWARD, BASELINE, BOTH, DENSE, FORWARD, PASSES, both
from experiments.harness.timing import Timing, interleave
from experiments.libraries.dense import DenseBaseline, fits_in_memory
from experiments.report.tables import progress

BLOCKS_AT_LEAST = 16
GPU_TILE = 128


@dataclass(frozen=True)
class Settings:
    """What to run: a section of the sweep file with the user's options over it."""

    device: str
    impl: str
    dtype: str
    seqlen: int
    head_dim: int
    heads: int
    batch: int
    block: int
    rounds: int
    seconds: float
    check_rows: int
    seed: int
    input: Path | None
    families: tuple[dict, ...]


@dataclass
class Run:
    """One mask with its plan, what was found out about it and how long it took."""

    family: str
    label: str
    expression: str
    density: float
    plan: nbflash.AttentionPlan
    oracle: Oracle
    out: object = None
    lse: object = None
    verdicts: dict[str, Verdict] = None
    timings: dict[str, Timing] = None
    output_error: float | None = None
    coverage: float | None = None

    @property
    def name(self):
        return f"{self.family} {self.label}".strip()


@dataclass(frozen=True)
class Result:
    """Everything that `measure` found."""

    settings: Settings
    shape: tuple[int, ...]
    heads_kv: int
    block: int
    runs: list[Run]
    dense: Run
    baseline: dict[str, Timing]


def read_settings(section, device, overrides):
    """The section (``"quick"`` or ``"full"``) of the sweep file with the options that were given.

    Parameters
    ----------
    device : {"cpu", "cuda"}
    overrides : dict
        Option to value, None where the user gave none; ``mask`` selects families by name.
    """
    sweep = sweeps.load("sparsity")[section]
    families = sweep["family"]
    wanted = overrides.pop("mask")
    names = [family["name"] for family in families]
    for name in wanted:
        if name not in names:
            raise BadInput(f"--mask {name}: expected one of {', '.join(names)}")
    chosen = tuple(f for f in families if not wanted or f["name"] in wanted)
    given = {key: value for key, value in overrides.items() if value is not None}
    if given.get("impl") == "sm90":
        given = {"dtype": "float16"} | given
    fixed = {"device": device, "families": chosen, "input": overrides["input"]}
    return Settings(**{**sweep[device], **given, **fixed})


def block_size(settings, seqlen):
    """The block size asked for, halved until the sequence holds 16 blocks, but at least 8."""
    block = settings.block
    while block > 8 and seqlen < BLOCKS_AT_LEAST * block:
        block //= 2
    return block


def measure(settings):
    """Check and time every mask of the sweep.

    Returns
    -------
    Result

    Raises
    ------
    BadInput
        If the options or the input do not make a problem that nbflash accepts.
    OutOfBudget
        If a result is wrong; nothing is timed then.
    """
    backend = open_backend(settings.device)
    host = _inputs(settings)
    nq = host[0].shape[1]
    block = block_size(settings, nq)
    arrays = [backend.array(x) for x in host]
    cases = sweeps.cases(settings.families, nq, block)
    every = [sweeps.Case(DENSE, "", DENSE, None), *cases]
    with progress("Checking against the reference", len(every)) as advance:
        runs = []
        for case in every:
            runs.append(_checked_run(case, settings, backend, host, arrays, block))
            advance()
    if settings.input is not None:
        _measure_fidelity(backend, host, runs)
    middle = sorted(runs, key=lambda run: run.density)[len(runs) // 2]
    baseline = _time(settings, backend, arrays, runs, middle)
    return Result(settings, host[0].shape, host[1].shape[2], block, runs[1:], runs[0], baseline)


def _inputs(settings):
    dtype = parse_dtype(settings.dtype)
    if settings.input is not None:
        return load_qkv(settings.input, dtype, settings.seed)
    problem = {key: getattr(settings, key) for key in ("batch", "seqlen", "heads", "head_dim")}
    return random_qkv(problem, dtype, settings.seed)


def _checked_run(case, settings, backend, host, arrays, block):
    """Plan one mask and hold both passes to their budgets."""
    q, k, v, _ = arrays
    try:
        plan = nbflash.plan(q, k, v, case.mask, impl=settings.impl)
    except (ValueError, TypeError) as error:
        raise BadInput(one_line(error)) from None
    density = 1.0 if case.mask is None else block_density(case.mask, block)
    rows = sample_rows(q.shape[1], settings.check_rows, settings.seed, tile_height(plan))
    oracle = Oracle(*host, case.mask, rows)
    run = Run(case.family, case.label, case.expression, density, plan, oracle)
    run.out, run.lse = plan(q, k, v, out=backend.poisoned(q))
    grads = plan.backward(backend.array(sampled(host[3], rows)), q, k, v, run.out, run.lse)
    out, lse, dq, dk, dv = map(backend.numpy, (run.out, run.lse, *grads))
    run.verdicts = {
        FORWARD: oracle.check(run.name, out=out[:, rows], lse=lse[:, :, rows]),
        BACKWARD: oracle.check(run.name, dq=dq[:, rows], dk=dk, dv=dv),
    }
    run.verdicts[BOTH] = nearest(run.verdicts.values())
    oracle.forget("dk", "dv")
    for name, array in {"out": out, "dq": dq}.items():
        if not np.isfinite(array).all():
            raise OutOfBudget(f"{run.name}: no timing is reported, {name} is not finite")
    return run


def tile_height(plan):
    """Rows that tiles of both passes are made of; None where no tiles are walked.

    On a GPU some backward passes walk tiles half as high as the forward pass, and where the
    forward's are 192 high the backward's are 128 or 64.
    """
    if plan.schedule is None:
        return None
    if plan.problem.device != "cuda":
        return plan.schedule.tile_m
    return math.gcd(plan.schedule.tile_m, GPU_TILE) // 2


def block_density(mask, block):
    """Share of the block × block cells of a mask in which anything is attended."""
    kinds = mask.tiles(block, block).kinds
    return kinds.nnz / (kinds.shape[0] * kinds.shape[1])


def _measure_fidelity(backend, host, runs):
    """Fill in how far each output lies from dense attention and what the mask keeps of it."""
    q, k, _, _ = host
    exact = backend.numpy(runs[0].out).astype(np.float64)
    with progress("Fidelity to dense attention", len(runs)) as advance:
        for run in runs:
            out = backend.numpy(run.out).astype(np.float64)
            run.output_error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
            dense = run.family == DENSE
            run.coverage = 1.0 if dense else float(np.mean(masks.coverage(q, k, run.plan.mask)))
            advance()


def _time(settings, backend, arrays, runs, middle):
    """Time every pass; fills in ``run.timings`` and returns those of the baseline.

    The baseline computes all scores whatever the mask, so one mask stands for all of them.
    """
    baseline = None
    if fits_in_memory(backend, arrays[0].shape, arrays[0].dtype):
        baseline = DenseBaseline(backend, *arrays, backend.array(_dense(middle)))
    by_name = {run.name: run for run in runs} | {BASELINE: middle}
    timings = {}
    for which, array in PASSES.items():
        tasks = _tasks(which, arrays, runs, baseline)

        def verify(name, result, array=array):
            oracle = by_name[name].oracle
            got = {array: backend.take(result[0], oracle.rows)}
            oracle.check(f"{name}, as timed", **got)

        with progress(f"Timing, {which}", len(tasks) * (settings.rounds + 1)) as advance:
            timings[which] = interleave(
                tasks,
                backend.clock,
                rounds=settings.rounds,
                seconds=settings.seconds,
                seed=settings.seed,
                keep=verify,
                progress=advance,
            )
    for run in runs:
        run.timings = {which: found[run.name] for which, found in timings.items()}
    return {which: found[BASELINE] for which, found in timings.items() if BASELINE in found}


def _dense(run):
    """The mask of a run as a boolean array (seqlen, seqlen)."""
    n = run.plan.problem.nq
    return np.ones((n, n), bool) if run.family == DENSE else run.plan.mask.dense()


def _tasks(which, arrays, runs, baseline):
    """Calls to time: the first thing each returns is out or dq in the public layout."""
    q, k, v, dout = arrays
    make = {
        FORWARD: lambda run: partial(run.plan, q, k, v),
        BACKWARD: lambda run: partial(run.plan.backward, dout, q, k, v, run.out, run.lse),
        BOTH: lambda run: partial(both, run.plan, dout, q, k, v),
    }[which]
    tasks = {run.name: make(run) for run in runs}
    if baseline is not None:
        tasks[BASELINE] = getattr(baseline, which)
    return tasks
