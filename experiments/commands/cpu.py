"""The CPU kernels beside torch's flash kernel and in-place NumPy, and what a first call costs.

All of them run in shuffled rounds of one process, each in the memory layout it likes best. The
results of nbflash are checked against the float64 reference before anything is timed.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.console import say
from experiments.harness.grid import dense_case
from experiments.harness.inputs import random_qkv
from experiments.harness.oracle import Oracle, sample_rows
from experiments.harness.passes import BACKWARD, FORWARD, flops
from experiments.harness.provenance import provenance
from experiments.harness.runner import Runner, Task, task_of
from experiments.harness.setup import announce
from experiments.harness.timing import first_calls
from experiments.libraries.nbflash import Nbflash
from experiments.libraries.sdpa import Sdpa
from experiments.libraries.torch_base import why_not_torch
from experiments.report.tables import show, speed_row, write_csv, wrote

NBFLASH, NUMPY, TORCH = "nbflash cpu", "NumPy in place", "torch flash"
_row = partial(speed_row, gflops=None, speed_of_nbflash=None)

FIRST_CALL = """
import json, time
import numpy as np
from nbflash.backends import cpu
import nbflash
q, k, v, dout = (np.ones((1, 64, 2, 16), np.float32) for _ in range(4))
start = time.perf_counter()
out, lse = nbflash.attention(q, k, v, return_lse=True, impl="cpu")
forward = time.perf_counter()
nbflash.attention_backward(dout, q, k, v, out, lse, impl="cpu")
print(json.dumps([1e3 * (forward - start), 1e3 * (time.perf_counter() - forward)]))
"""


def in_place(q, k, v):
    """Softmax attention head by head on one score matrix that is worked on in place."""
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    s, out = np.empty((q.shape[1], k.shape[1]), q.dtype), np.empty_like(q)
    scale = q.dtype.type(q.shape[-1] ** -0.5)

    def forward():
        for h in range(len(q)):
            np.matmul(q[h] * scale, k[h].T, out=s)
            np.subtract(s, s.max(axis=-1, keepdims=True), out=s)
            np.exp(s, out=s)
            total = s.sum(axis=-1, keepdims=True)
            np.matmul(s, v[h], out=out[h])
            out[h] /= total

    return forward


def makers_of(backend, arrays, check_rows):
    """What makes the tasks, by implementation and pass; those of others are not checked."""
    *inputs, dout = arrays
    case = dense_case(inputs[0].shape)
    oracle = Oracle(backend, arrays, None, sample_rows(case.shape[1], check_rows))
    ours, out = Nbflash(*inputs, impl="cpu"), np.empty_like(inputs[0])

    def forward():
        task = task_of(ours, case, FORWARD, oracle, arrays)
        return replace(task, call=lambda: ours.plan(case)(*inputs, out=out)[0])

    backward = partial(task_of, ours, case, BACKWARD, oracle, arrays)
    found = {(NBFLASH, FORWARD): forward, (NBFLASH, BACKWARD): backward}
    found[NUMPY, FORWARD] = lambda: Task(in_place(*inputs))
    if not why_not_torch("cpu"):
        theirs = Sdpa(*inputs, backend="FLASH_ATTENTION")
        found[TORCH, FORWARD] = lambda: Task(theirs.forward(case))
        found[TORCH, BACKWARD] = lambda: Task(theirs.backward(case, dout))
    return found


def speed(backend, sweep, shape, quick, seed):
    """Rows of one shape, one per pass and implementation."""
    arrays = random_qkv(shape, np.float32, seed)
    rounds = 7 if quick else sweep["rounds"]
    runner = Runner(backend.clock, sweep | {"rounds": rounds, "seed": seed})
    makers = makers_of(backend, arrays, sweep["check_rows"])
    timed, found = runner.measure(makers, f"Timing, d={shape['head_dim']}"), []
    for (name, which), task in timed.items():
        row = _row("speed", which, name, task.timing)
        row["gflops"] = flops(arrays[0].shape, 1.0, which) / task.timing.median / 1e6
        row["speed_of_nbflash"] = task.timing.median / timed[NBFLASH, which].timing.median
        found.append(shape | row | task.checked)
    return found


def first_use():
    """Rows of the first call in a new process, with an empty and with a filled kernel cache."""
    kind, shape = "first call of a process", {"batch": 1, "seqlen": 64, "heads": 2, "head_dim": 16}
    found = first_calls(FIRST_CALL, "NUMBA_CACHE_DIR", cached=1)
    return [shape | _row(kind, what, NBFLASH, timing) for what, timing in found.items()]


def _show_speed(shape, rows):
    columns = {"pass": "", "": "", "ms": ".1f", "p10": ".1f", "p90": ".1f", "GFLOP/s": ".0f"}
    columns |= {"nbflash is × faster": ".2f", "err/bud": ".2f"}
    keys = ("what", "implementation", "median_ms", "p10_ms", "p90_ms", "gflops")
    cells = []
    for row in sorted(rows, key=lambda row: row["what"], reverse=True):
        ratio = row["speed_of_nbflash"] if row["implementation"] != NBFLASH else None
        share = row["error"] / row["budget"] if row["budget"] else None
        cells.append([*(row[key] for key in keys), ratio, share])
    sizes = ", ".join(f"{name}={value}" for name, value in shape.items())
    show(f"dense float32: {sizes}", columns, cells)
    median = {(r["what"], r["implementation"]): r["median_ms"] for r in rows}
    ratio = median["backward", NBFLASH] / median["forward", NBFLASH] / 2.5
    say(f"backward / forward of nbflash, per FLOP (a backward counts 2.5 forwards): {ratio:.2f}")


def run(out, seed=0, quick=False):
    """Measure, print the tables and write ``cpu.csv`` to the directory ``out``."""
    backend, sweep = open_backend("cpu"), sweeps.load("cpu")
    origin = provenance("cpu")
    origin["torch"] = "" if why_not_torch("cpu") else Sdpa.version()
    announce(origin, "float32")
    rows = []
    for shape in sweep["shape"][: 1 if quick else None]:
        found = speed(backend, sweep, shape, quick, seed)
        _show_speed(shape, found)
        rows += found
    if not quick:
        rows += first_use()
        columns, keys = {"": "", "what": "", "ms": ".0f"}, ("kind", "what", "median_ms")
        show("latency", columns, [[r[key] for key in keys] for r in rows if r["kind"] != "speed"])
    if not origin["torch"]:
        say("torch is not installed here, so its kernel is not compared.")
    rows = [row | origin for row in rows]
    write_csv(out / "cpu.csv", rows)
    wrote(out / "cpu.csv")
    return rows
