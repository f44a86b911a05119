"""The speed of the SIMT kernels on a GPU, in float32.

Forward, and the backward pass in both forms (two passes without atomics, and one with), in
shuffled rounds together with torch's memory-efficient kernel where torch is installed. Every output
is poisoned, computed and checked against the float64 reference before it is timed. The float32
matrix product of the same device, timed in the same run, says how fast it can be.
"""

from functools import partial

import numpy as np

from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.console import say
from experiments.harness.grid import dense_case
from experiments.harness.inputs import random_qkv
from experiments.harness.oracle import Oracle, sample_rows, verdict_of
from experiments.harness.passes import BACKWARD, FORWARD, flops
from experiments.harness.provenance import provenance
from experiments.harness.runner import Runner, Task, task_of
from experiments.harness.setup import announce
from experiments.libraries.nbflash import Nbflash
from experiments.libraries.sdpa import Sdpa
from experiments.libraries.torch_base import why_not_torch
from experiments.report.tables import show, speed_row, write_csv, wrote

ONE_PASS, TWO_PASS = "backward, one pass", "backward, two passes"
FORMS = {ONE_PASS: False, TWO_PASS: True}
NBFLASH, TORCH = "nbflash simt", "torch memory-efficient"
PRODUCT = "matrix product"
_row = partial(speed_row, tflops=None)


def makers_of(backend, arrays, check_rows, impl="simt"):
    """What makes the tasks, by implementation and pass; those of torch are not checked."""
    *inputs, dout = arrays
    case = dense_case(inputs[0].shape)
    oracle = Oracle(backend, arrays, None, sample_rows(case.shape[1], check_rows))
    task = partial(task_of, case=case, oracle=oracle, arrays=arrays)
    found = {(NBFLASH, FORWARD): partial(task, Nbflash(*inputs, impl), which=FORWARD)}
    for form, deterministic in FORMS.items():
        library = Nbflash(*inputs, impl, deterministic=deterministic)
        found[NBFLASH, form] = partial(task, library, which=BACKWARD)
    if backend.device == "cuda" and not why_not_torch():
        theirs = Sdpa(*inputs, backend="EFFICIENT_ATTENTION")
        found[TORCH, FORWARD] = lambda: Task(theirs.forward(case))
        found[TORCH, ONE_PASS] = lambda: Task(theirs.backward(case, dout))
    return found


def speed(backend, sweep, quick, seed):
    """Rows of the speed table, one per shape, pass and implementation."""
    found = []
    for shape in sweep["shape"][: 1 if quick else None]:
        arrays = [backend.array(x) for x in random_qkv(shape, np.float32, seed)]
        rounds = 7 if quick else sweep["rounds"]
        runner = Runner(backend.clock, sweep | {"rounds": rounds, "seed": seed})
        makers = makers_of(backend, arrays, sweep["check_rows"])
        timed = runner.measure(makers, f"Timing, d={shape['head_dim']}")
        for (name, which), task in timed.items():
            row = shape | _row("speed", which, name, task.timing) | task.checked
            work = flops(arrays[0].shape, 1.0, which.split(",")[0])
            found.append(row | {"tflops": work / task.timing.median / 1e9})
    return found


def product(backend, n, rounds, seconds, seed):
    """The row of the float32 matrix product of n × n matrices, checked on a part of it.

    The yardstick adds the n products of an element one after the other in float32, which TF32
    would miss by far.
    """
    rng = np.random.default_rng(seed)
    host = [rng.standard_normal((n, n), np.float32) for _ in range(2)]
    a, b = map(backend.array, host)
    part = host[0][:2], host[1][:, -256:]
    exact = np.matmul(*(x.astype(np.float64) for x in part))
    low = np.stack([np.cumsum(row[:, None] * part[1], axis=0)[-1] for row in part[0]])

    def check(result):
        return [verdict_of(backend.numpy(result[:2, -256:]), exact, low, PRODUCT)]

    runner = Runner(backend.clock, {"rounds": rounds, "seconds": seconds, "seed": seed})
    makers = {PRODUCT: lambda: Task(partial(backend.xp.matmul, a, b), check)}
    task = runner.measure(makers)[PRODUCT]
    shape = dict.fromkeys(("batch", "seqlen", "heads", "head_dim"))
    row = _row(PRODUCT, f"{n} x {n} x {n}", f"{backend.xp.__name__} matmul", task.timing)
    return shape | row | task.checked | {"tflops": 2 * n**3 / task.timing.median / 1e9}


def run(out, seed=0, quick=False):
    """Measure, print the tables, write ``simt.csv`` and ``simt.png`` to the directory ``out``."""
    from experiments.report.figures import draw_simt

    backend, sweep = open_backend("cuda"), sweeps.load("simt")
    origin = provenance("cuda")
    announce(origin, "float32")
    fast = speed(backend, sweep, quick, seed)
    peak = product(backend, sweep["product"], sweep["rounds"], sweep["seconds"], seed)
    columns = {"pass": "", "": "", "d": "d", "ms": ".3f", "p10": ".3f", "p90": ".3f"}
    columns |= {"TFLOP/s": ".1f", "err/bud": ".2f"}
    keys = ("what", "implementation", "head_dim", "median_ms", "p10_ms", "p90_ms", "tflops")
    cells = [
        [*(row[key] for key in keys), row["error"] / row["budget"] if row["budget"] else None]
        for row in fast
    ]
    first = fast[0]
    title = f"speed: N={first['seqlen']}, heads={first['heads']}, batch={first['batch']}"
    show(title, columns, cells)
    say(f"float32 matrix product, {peak['what']}: {peak['tflops']:.1f} TFLOP/s")
    say("backward FLOPs count 2.5 times the forward's in both forms.")
    rows = [row | origin for row in [*fast, peak]]
    write_csv(out / "simt.csv", rows)
    draw_simt(rows[: len(fast)], out / "simt.png")
    wrote(out / "simt.csv", out / "simt.png")
