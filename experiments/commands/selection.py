"""selection: sparse attention that is chosen at run time, step by step and end to end.

For each method the time of the selection, of the plan of its map, and of forward and backward, the
share of the softmax mass that its map keeps, and how far its output is from dense attention's. All
steps run in shuffled rounds with dense attention of the same implementation. The speed-up counts
selection and plan. On a CUDA device every pass plans the map anew, by kernels, as part of its
time; the column of the plan says how much of the forward pass that is.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import masks
import nbflash
from experiments.harness.errors import BadInput
from experiments.harness.grid import Case, dense_case
from experiments.harness.inputs import load_qkv, random_inputs
from experiments.harness.oracle import GRADIENTS, Oracle, sample_rows, sampled
from experiments.harness.passes import BACKWARD, DENSE, FORWARD
from experiments.harness.runner import Runner, Task
from experiments.harness.setup import set_up
from experiments.libraries.nbflash import Nbflash
from experiments.report.figures import draw_selection
from experiments.report.tables import show, size_of, write_csv, wrote
from nbflash import selection
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.planning.plan import AttentionPlan

SELECT, PLAN = "select", "plan"
STEPS = SELECT, PLAN, FORWARD, BACKWARD
RANDOM, SAMPLE = "random", "sample"
ALWAYS_CAUSAL = "vertical_slash"
SAMPLE_FILE = Path(__file__).parents[1] / "data" / "sample.npz"
COLUMNS = {"method": "", "blocks": ".1%", "mass kept": ".1%", "error": ".1e"}
COLUMNS |= dict.fromkeys(STEPS, ".3f")
COLUMNS |= {"forward ×": ".2f", "+ backward ×": ".2f"}
CAUSAL = {True: "causal", False: "all keys"}
KEYS = ("method", "density", "kept", "distance", *(f"{step}_ms" for step in STEPS))
KEYS += ("speedup", "speedup_training")


@dataclass(frozen=True)
class Chosen:
    """A method on one input: its function, the map and the mask that it gave."""

    name: str
    select: Any
    block_map: Any = None
    mask: Any = None


def chosen_by(spec, sweep, q, k, causal):
    """The `Chosen` of an entry of the sweep; it has selected once."""
    given = {key: x for key, x in spec.items() if key not in ("name", "share")}
    n, block, name = k.shape[1], sweep["block"], spec["name"]
    if "share" in spec and name == ALWAYS_CAUSAL:
        given |= dict.fromkeys(("vertical", "slash"), max(1, round(spec["share"] * n)))
    elif "share" in spec:
        given["topk"] = max(1, round(spec["share"] * -(-n // block)))
    if name != ALWAYS_CAUSAL:
        given["causal"] = causal
    select = partial(getattr(selection, name), block=block, **given)
    block_map = select(q, k)
    return Chosen(name, select, block_map, block_map.to_mask(q.shape[2]))


def oracles_of(setup, arrays, mask):
    """One for each head that is checked."""
    rows = sample_rows(arrays[0].shape[1], setup.settings["check_rows"])
    heads = np.linspace(0, arrays[0].shape[2] - 1, setup.settings["check_heads"]).astype(int)
    planes = np.broadcast_to(mask.plane_index, (len(arrays[0]), arrays[0].shape[2]))
    return [
        Oracle(setup.backend, arrays, mask.planes[planes[0, h]], rows, [(0, int(h))])
        for h in dict.fromkeys(heads.tolist())
    ]


def passes_of(setup, arrays, case, impl, mask):
    """What makes the tasks of forward and backward, which are checked by the mask."""
    *inputs, dout = arrays
    library, oracles = Nbflash(*inputs, impl=impl), oracles_of(setup, arrays, mask)
    xp, rows = setup.backend.xp, oracles[0].rows

    def check(**got):
        return [verdict for oracle in oracles for verdict in oracle.check(**got)]

    def forward():
        found = check(**library.results(case))
        return Task(library.forward(case), lambda out: check(out=out), found)

    def backward():
        gradients = library.backward(case, sampled(xp, dout, rows))()
        found = check(**dict(zip(GRADIENTS, gradients, strict=True)))
        return Task(library.backward(case, dout), lambda x: check(dq=x[0]), found)

    return {FORWARD: forward, BACKWARD: backward}


def makers_of(setup, arrays, chosen, impl):
    """The tasks of one method: all four steps."""
    q, k = arrays[:2]
    case, planning = case_of(setup, chosen, q), planning_of(setup, arrays, chosen, impl)
    found = {SELECT: lambda: Task(lambda: chosen.select(q, k)), PLAN: lambda: Task(planning)}
    return found | passes_of(setup, arrays, case, impl, chosen.mask)


def case_of(setup, chosen, q):
    """What the passes are given: the map on a CUDA device, its mask on the CPU."""
    mask = chosen.mask if setup.backend.device == "cpu" else chosen.block_map
    return Case(chosen.name, "blocks", mask, 1.0, None, q.shape)


def planning_of(setup, arrays, chosen, impl):
    """A call that plans the map of a method anew for the forward pass, and does nothing else."""
    *inputs, _ = arrays
    if setup.backend.device == "cpu":
        dense = nbflash.plan(*inputs, impl=impl)
        heads = inputs[0].shape[2]

        def plan_anew():
            spec = AttentionSpec(dense.problem, chosen.block_map.to_mask(heads))
            return AttentionPlan(spec, dense.impl)

        return plan_anew
    plan = nbflash.plan(*inputs, chosen.block_map, impl=impl)
    walk, _ = plan.schedule.row_tables(plan.problem)
    return partial(walk, (chosen.block_map.indices, chosen.block_map.counts))


def measure(setup, name, arrays, impl, causal, specs):
    """Rows of one input by the methods of ``specs``, dense first."""
    q, k, v, _ = arrays
    sweep, to_host = setup.settings, setup.backend.numpy
    mask = masks.causal(q.shape[1]) if causal else masks.dense(q.shape[1])
    base = replace(dense_case(q.shape), mask=mask)
    methods = [chosen_by(spec, sweep, q, k, causal) for spec in specs]
    makers = {
        (DENSE, step): make for step, make in passes_of(setup, arrays, base, impl, mask).items()
    }
    for chosen in methods:
        steps = makers_of(setup, arrays, chosen, impl)
        makers |= {(chosen.name, step): make for step, make in steps.items()}
    timed = Runner(setup.clock, sweep).measure(makers, f"Timing, {name} input")
    library = Nbflash(q, k, v, impl=impl)
    exact = to_host(library.results(base)["out"]).astype(np.float64)
    of = {key: task.timing.median for key, task in timed.items()}
    sizes = dict(zip(("batch", "seqlen", "heads", "head_dim"), q.shape, strict=True))
    sizes |= {"dtype": q.dtype.name, "impl": library.plan(base).impl, "block": sweep["block"]}
    sizes["causal"] = causal
    # On a CUDA device the plan is part of the forward pass.
    counted = (SELECT, PLAN, FORWARD) if setup.backend.device == "cpu" else (SELECT, FORWARD)
    rows = [_row(name, Chosen(DENSE, None), of, 1.0, 1.0, 0.0, counted)]
    queries = sample_rows(q.shape[1], sweep["coverage_rows"])
    for chosen in methods:
        case = case_of(setup, chosen, q)
        out = to_host(library.results(case)["out"]).astype(np.float64)
        distance = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        kept = float(np.nanmean(selection.coverage(q, k, chosen.block_map, queries=queries)))
        pairs = base.mask.count_nonzero() * max(1, chosen.mask.plane_index.size)
        density = chosen.mask.count_nonzero() / pairs
        rows.append(_row(name, chosen, of, density, kept, distance, counted))
    return [sizes | row for row in rows]


def _row(input_, chosen, of, density, kept, distance, counted):
    """What one method took, beside dense attention; ``counted`` are the steps of its forward."""
    times = {f"{step}_ms": of.get((chosen.name, step)) for step in STEPS}
    forward = sum(times[f"{step}_ms"] or 0.0 for step in counted)
    training = forward + times[f"{BACKWARD}_ms"]
    dense = of[DENSE, FORWARD], of[DENSE, FORWARD] + of[DENSE, BACKWARD]
    found = {"input": input_, "method": chosen.name, "density": float(density), "kept": kept}
    found |= {"distance": distance} | times
    return found | {"speedup": dense[0] / forward, "speedup_training": dense[1] / training}


def inputs_of(setup, seed):
    """Random arrays of every length, and the shipped q, k and v of a real model."""
    s, dtype, xp = setup.settings, setup.settings["dtype"], setup.backend.xp
    for n in s["seqlen"]:
        yield RANDOM, random_inputs(xp, (s["batch"], n, s["heads"], s["head_dim"]), dtype, seed)
    yield SAMPLE, [setup.backend.array(x) for x in load_qkv(SAMPLE_FILE, dtype, seed)]


def methods_of(setup, names):
    """The entries of the sweep, or those of them with these names."""
    specs = setup.sweep["method"]
    known = [spec["name"] for spec in specs]
    for name in names:
        if name not in known:
            raise BadInput(f"--method {name}: expected one of {', '.join(known)}")
    return [spec for spec in specs if not names or spec["name"] in names]


def run(out, quick=False, device="auto", impl="auto", seed=0, methods=()):
    """Measure, print a table for each input, write ``selection.csv`` and ``selection.png``.

    Takes the options of the command; ``methods`` are names of those to measure, by default all.
    """
    setup = set_up("selection", "quick" if quick else "full", device, None, seed)
    rows, specs = [], methods_of(setup, methods)
    for causal in setup.settings["causal"]:
        fitting = [spec for spec in specs if causal or spec["name"] != ALWAYS_CAUSAL]
        for name, arrays in inputs_of(setup, seed) if fitting else ():
            found = measure(setup, name, arrays, impl, causal, fitting)
            title = f"\n{name}, {CAUSAL[causal]}, {size_of(found[0])}"
            show(title, COLUMNS, [[r[key] for key in KEYS] for r in found])
            rows += [row | setup.origin for row in found]
            write_csv(out / "selection.csv", rows)
    draw_selection(rows, out / "selection.png")
    wrote(out / "selection.csv", out / "selection.png")
    return rows
