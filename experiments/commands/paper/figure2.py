"""Figure 2: traffic decides; block size against accesses and runtime; sparsity against runtime.

Left: GPT-2 medium's attention, forward and backward, by dense attention that writes its matrices
and by nbflash. Middle: the queries of a tile against accesses and runtime of the forward pass.
Right: the density of the mask against runtime, with the line through it. Bytes are counted by the
tiles that the kernels walk, and measured by ncu where it runs.
"""

import sys
from functools import partial

import numpy as np

import masks
from experiments.harness import ncu
from experiments.harness.console import left_out, say
from experiments.harness.grid import block_density, dense_case
from experiments.harness.inputs import random_inputs
from experiments.harness.oracle import Oracle, sample_rows
from experiments.harness.passes import BOTH, FORWARD, NBFLASH, flops
from experiments.harness.runner import Runner, Task, task_of
from experiments.harness.setup import set_up
from experiments.harness.sweeps import SweptMask
from experiments.libraries import traffic
from experiments.libraries.dense import DenseBaseline
from experiments.libraries.nbflash import Nbflash
from experiments.libraries.tiled import Tiled
from experiments.report.fit import fit_line
from experiments.report.tables import show, write_csv, wrote

STANDARD = "standard"
SIZES = ("batch", "seqlen", "heads", "head_dim")


def run(out, quick=False, device="auto", seed=0):
    """Measure the panels, write ``paper-figure2.csv`` and ``.png`` to the directory ``out``."""
    section = "quick" if quick else "full"
    setup = set_up("paper-figure2", section, device, seed=seed)
    rows = [*left(setup, section), *middle(setup), *right(setup)]
    fit = line(rows)
    _report(setup.settings["paper"], rows, fit)
    from experiments.report.paper_figures import draw_figure2

    rows = [row | {"seed": seed} | setup.origin for row in rows]
    write_csv(out / "paper-figure2.csv", rows)
    draw_figure2(rows, fit, out / "paper-figure2.png")
    wrote(out / "paper-figure2.csv", out / "paper-figure2.png")


def left(setup, section):
    """Rows of `STANDARD` and of nbflash, forward and backward as one call."""
    size = setup.settings["left"]
    arrays, oracle = _inputs(setup, size), None
    shape, n = arrays[0].shape, size["seqlen"]
    oracle = _oracle(setup, arrays, None)
    standard = DenseBaseline(setup.backend, *arrays, setup.backend.array(np.ones((n, n), bool)))
    library, case = Nbflash(*arrays[:3]), dense_case(shape)
    check = lambda gradients: oracle.check(dq=gradients[0])
    makers = {
        STANDARD: lambda: Task(standard.both, check),
        NBFLASH: lambda: task_of(library, case, BOTH, oracle, arrays),
    }
    done = Runner(setup.clock, setup.settings).measure(makers, "Left")
    counted = dict(zip((STANDARD, NBFLASH), _counted(setup, library.plan(case)), strict=True))
    once = sum(x.total for x in traffic.once_bytes(n, size["head_dim"], arrays[0].itemsize))
    planes, paper = size["batch"] * size["heads"], setup.settings["paper"]
    for name, task in done.items():
        products = 6 if name == STANDARD else 7  # flash computes S again
        yield _row("left", name, BOTH, size, task) | {
            "gflops": products / 2 * flops(shape, 1.0, FORWARD) / 1e9,
            "counted_gb": counted[name] * planes / 1e9,
            "least_gb": once * planes / 1e9,
            "measured_gb": _measured(setup, section, name),
            **{f"paper_{key}": value for key, value in paper[name].items()},
        }


def _counted(setup, plan):
    """Bytes of one head, forward and backward, of standard attention and of a plan's tiles."""
    size, itemsize = setup.settings["left"], setup.settings["dtype"].itemsize
    n, head_dim = size["seqlen"], size["head_dim"]
    yield sum(x.total for x in traffic.standard_bytes(n, head_dim, itemsize))
    tile = plan.schedule.tile_m, plan.schedule.tile_n
    backward, two_passes = tile, plan.two_passes is not False
    if plan.impl == "sm90":
        from nbflash.backends.sm90.backward.config import backward_configs

        config = backward_configs(setup.settings["dtype"].name, head_dim)[0]
        backward = config.tile_m, config.tile_n
    forward = traffic.forward_bytes(n, head_dim, itemsize, tile)
    again = traffic.backward_bytes(n, head_dim, itemsize, backward, two_passes=two_passes)
    yield forward.total + again.total


def _measured(setup, section, name):
    """Gigabytes by ncu; None where it does not run."""
    if setup.backend.device != "cuda":
        return None
    if reason := ncu.why_not():
        left_out("measured traffic", name, reason)
        return None
    module = "experiments.commands.paper.figure2_pass"
    try:
        return ncu.dram_bytes([sys.executable, "-m", module, section, name]) / 1e9
    except RuntimeError as error:
        left_out("measured traffic", name, error)
        return None


def middle(setup):
    """Rows of the forward pass, tile after tile."""
    size = setup.settings["middle"]
    arrays = _inputs(setup, size)
    oracle, case = _oracle(setup, arrays, None), dense_case(arrays[0].shape)
    n, head_dim = size["seqlen"], size["head_dim"]
    makers = {
        f"{m}×{k}": partial(task_of, Tiled(*arrays[:3], tile=(m, k)), case, FORWARD, oracle, arrays)
        for m, k in size["tiles"]
    }
    leave_out = lambda key, error, stage: left_out(key, f"forward{stage}", error) or True
    done = Runner(setup.clock, setup.settings, leave_out).measure(makers, "Middle")
    for tile in size["tiles"]:
        if (name := "{}×{}".format(*tile)) in done:
            counted = traffic.forward_bytes(n, head_dim, arrays[0].itemsize, tile).total
            planes = size["batch"] * size["heads"]
            yield _row("middle", f"{NBFLASH} {name}", FORWARD, size, done[name]) | {
                "block": tile[0],
                "gflops": flops(arrays[0].shape, 1.0, FORWARD) / 1e9,
                "counted_gb": counted * planes / 1e9,
            }


def right(setup):
    """Rows of forward and backward, density after density."""
    size, seed = setup.settings["right"], setup.settings["seed"]
    arrays, n, block = _inputs(setup, size), size["seqlen"], size["block"]
    library, made = Nbflash(*arrays[:3]), {}
    for s in size["densities"]:
        mask = masks.random(n, block=block, density=s, seed=seed)
        made[f"{s:g}"] = SweptMask("random", f"{s:g}", f"random density={s:g}", mask)
    makers = {
        name: partial(task_of, library, case, BOTH, _oracle(setup, arrays, case.mask), arrays)
        for name, case in made.items()
    }
    done = Runner(setup.clock, setup.settings).measure(makers, "Right")
    for name, task in done.items():
        s = block_density(made[name].mask, block)
        yield _row("right", NBFLASH, BOTH, size, task) | {
            "density": s,
            "gflops": flops(arrays[0].shape, s, BOTH) / 1e9,
        }


def line(rows):
    """The least-squares line of the right panel."""
    of = [row for row in rows if row["panel"] == "right"]
    times = [row["median_ms"] for row in of]
    return fit_line([row["density"] for row in of], times, max(times))


def _inputs(setup, size):
    shape, settings = tuple(size[key] for key in SIZES), setup.settings
    return random_inputs(setup.backend.xp, shape, settings["dtype"], settings["seed"])


def _oracle(setup, arrays, mask):
    settings, n = setup.settings, arrays[0].shape[1]
    rows = sample_rows(n, settings["check_rows"], settings["seed"])
    return Oracle(setup.backend, arrays, mask, rows, planes=[(0, 0)])


def _row(panel, name, which, size, task):
    empty = ("block", "density", "gflops", "counted_gb", "least_gb", "measured_gb")
    empty += tuple(f"paper_{key}" for key in ("gflops", "gb", "ms"))
    return (
        {"panel": panel, "library": name, "pass": which}
        | {key: size[key] for key in SIZES}
        | dict.fromkeys(empty)
        | task.timing.columns
        | task.checked
    )


def _report(paper, rows, fit):
    columns = {"": "", "GFLOP": ".1f", "GB counted": ".2f", "GB at least": ".2f"}
    columns |= {"GB by ncu": ".2f", "ms": ".2f", "paper: GFLOPs": ".1f", "GB": ".1f", " ms": ".1f"}
    keys = ("library", "gflops", "counted_gb", "least_gb", "measured_gb", "median_ms")
    keys += ("paper_gflops", "paper_gb", "paper_ms")
    of = {panel: [x for x in rows if x["panel"] == panel] for panel in ("left", "middle", "right")}
    show(_title(f"left, {BOTH}", of["left"]), columns, [[x[k] for k in keys] for x in of["left"]])
    standard, own = of["left"]
    say(
        f"Counted traffic: standard over nbflash {standard['counted_gb'] / own['counted_gb']:.1f}, "
        f"in the paper {standard['paper_gb'] / own['paper_gb']:.1f} (measured, {paper['device']}); "
        f"time {standard['median_ms'] / own['median_ms']:.1f}, in the paper "
        f"{standard['paper_ms'] / own['paper_ms']:.1f}. The paper's standard attention also moves "
        "masks and dropout. Its GFLOPs are a thirteenth of what its sizes give; here a "
        "multiplication and an addition are two."
    )
    columns = {"queries of a tile": "d", "GB counted": ".3f", "ms": ".2f"}
    keys = ("block", "counted_gb", "median_ms")
    title = _title(f"middle, {FORWARD}", of["middle"])
    show(title, columns, [[x[key] for key in keys] for x in of["middle"]])
    columns, keys = {"density": ".1%", "ms": ".2f", "p10": ".2f", "p90": ".2f"}, ("density",)
    keys += ("median_ms", "p10_ms", "p90_ms")
    title = _title(f"right, {BOTH}", of["right"])
    show(title, columns, [[x[key] for key in keys] for x in of["right"]])
    say(f"t = {fit.fixed:.3g} ms + {fit.slope:.3g} ms · s, R² = {fit.r_squared:.4f}")


def _title(panel, rows):
    return f"{panel}: " + ", ".join(f"{key}={rows[0][key]}" for key in SIZES)
