"""Runtime against sparsity: check every mask, then time them all against each other.

One round of the measurement runs every mask, the dense run of nbflash itself and dense masked
softmax on the same array library once, in a shuffled order.
"""

import math
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import masks
import nbflash
from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.console import progress
from experiments.harness.errors import BadInput, one_line
from experiments.harness.grid import block_density
from experiments.harness.inputs import load_qkv, random_qkv
from experiments.harness.oracle import Oracle, sample_rows
from experiments.harness.passes import BACKWARD, BASELINE, BOTH, DENSE, FORWARD, PASSES
from experiments.harness.runner import Runner, Task, task_of
from experiments.harness.timing import Timing
from experiments.libraries.dense import DenseBaseline, fits_in_memory
from experiments.libraries.nbflash import Nbflash

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
    """One mask with its plan, what was found out about it and how long each pass took."""

    case: sweeps.SweptMask
    density: float
    plan: nbflash.AttentionPlan
    oracle: Oracle
    tasks: dict[str, Task] = field(default_factory=dict)
    output_error: float | None = None
    coverage: float | None = None

    @property
    def name(self):
        return f"{self.case.family} {self.case.label}".strip()


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
    arrays = [backend.array(x) for x in _inputs(settings)]
    shape, library = arrays[0].shape, Nbflash(*arrays[:3], impl=settings.impl)
    block = block_size(settings, shape[1])
    cases = sweeps.cases(settings.families, shape[1], block)
    every = [sweeps.SweptMask(DENSE, "", DENSE, None), *cases]
    runner, runs = Runner(backend.clock, asdict(settings)), []
    ready = {which: {} for which in PASSES}
    with progress("Checking against the reference", len(every)) as advance:
        for case in every:
            run = _planned(case, settings, backend, arrays, library, block)
            for which, make in _makers(library, run, arrays).items():
                ready[which] |= runner.prepare({run.name: make})
            run.oracle.forget("dk", "dv")
            runs.append(run)
            advance()
    if settings.input is not None:
        _measure_fidelity(backend, arrays, runs)
    if fits_in_memory(backend, shape, arrays[0].dtype):
        middle = sorted(runs, key=lambda run: run.density)[len(runs) // 2]
        for which, make in _baseline(backend, arrays, middle).items():
            ready[which] |= runner.prepare({BASELINE: make})
    timed = {which: runner.time(ready[which], f"Timing, {which}") for which in PASSES}
    for run in runs:
        run.tasks = {which: tasks[run.name] for which, tasks in timed.items()}
        run.tasks[BOTH].verdicts += run.tasks[FORWARD].verdicts
    baseline = {which: x[BASELINE].timing for which, x in timed.items() if BASELINE in x}
    return Result(settings, shape, arrays[1].shape[2], block, runs[1:], runs[0], baseline)


def _inputs(settings):
    dtype = parse_dtype(settings.dtype)
    if settings.input is not None:
        return load_qkv(settings.input, dtype, settings.seed)
    problem = {key: getattr(settings, key) for key in ("batch", "seqlen", "heads", "head_dim")}
    return random_qkv(problem, dtype, settings.seed)


def _planned(case, settings, backend, arrays, library, block):
    """The run of one mask, with what its results are checked by."""
    try:
        plan = library.plan(case)
    except (ValueError, TypeError) as error:
        raise BadInput(one_line(error)) from None
    density = 1.0 if case.mask is None else block_density(case.mask, block)
    rows = sample_rows(arrays[0].shape[1], settings.check_rows, settings.seed, tile_height(plan))
    return Run(case, density, plan, Oracle(backend, arrays, case.mask, rows))


def _makers(library, run, arrays):
    """What makes the tasks of one mask, by pass; those of `BOTH` are what the others check."""
    task = partial(task_of, library, run.case, oracle=run.oracle, arrays=arrays)
    check = lambda gradients: run.oracle.check(dq=gradients[0])
    both = lambda: Task(library.both(run.case, arrays[3]), check)
    return {FORWARD: partial(task, FORWARD), BACKWARD: partial(task, BACKWARD), BOTH: both}


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


def _measure_fidelity(backend, arrays, runs):
    """Fill in how far each output lies from dense attention and what the mask keeps of it."""
    q, k, v, _ = arrays
    host, exact = (backend.numpy(q), backend.numpy(k)), None
    with progress("Fidelity to dense attention", len(runs)) as advance:
        for run in runs:
            out = backend.numpy(run.plan(q, k, v)[0]).astype(np.float64)
            exact = out if exact is None else exact
            run.output_error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
            dense = run.case.mask is None
            run.coverage = 1.0 if dense else float(np.mean(masks.coverage(*host, run.plan.mask)))
            advance()


def _baseline(backend, arrays, run):
    """What makes the tasks of dense masked softmax, checked by the oracle of one run.

    It computes all scores whatever the mask, so one mask stands for all of them.
    """
    n, mask = arrays[0].shape[1], run.case.mask
    keep = np.ones((n, n), bool) if mask is None else mask.dense()
    baseline = DenseBaseline(backend, *arrays, backend.array(keep))

    def make(which, array):
        check = lambda result: run.oracle.check(**{array: result[0]})
        return Task(getattr(baseline, which), check)

    return {which: partial(make, which, array) for which, array in PASSES.items()}
