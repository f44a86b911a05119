"""The CPU kernels beside torch's flash kernel and in-place NumPy, and what a first call costs.

All of them run in shuffled rounds of one process, each in the memory layout it likes best. The
results of nbflash are checked against the float64 reference before anything is timed.
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import nbflash
from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.inputs import random_qkv
from experiments.harness.oracle import Oracle, sample_rows, sampled
from experiments.harness.passes import flops
from experiments.harness.provenance import provenance
from experiments.harness.timing import Timing, interleave
from experiments.report.tables import progress, say, show, write_csv, wrote

NBFLASH, NUMPY, TORCH = "nbflash cpu", "NumPy in place", "torch flash"

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


def nbflash_tasks(backend, host, check_rows):
    """Forward and backward as callables, and the verdict on what they return."""
    q, k, v, dout = host
    rows = sample_rows(q.shape[1], check_rows)
    oracle, plan = Oracle(*host, None, rows), nbflash.plan(q, k, v, impl="cpu")
    out, lse = plan(q, k, v, out=backend.poisoned(q))
    dq, dk, dv = plan.backward(sampled(dout, rows), q, k, v, out, lse)
    verdicts = {
        "forward": oracle.check("forward", out=out[:, rows], lse=lse[..., rows]),
        "backward": oracle.check("backward", dq=dq[:, rows], dk=dk, dv=dv),
    }
    tasks = {
        ("forward", NBFLASH): lambda: plan(q, k, v, out=out),
        ("backward", NBFLASH): lambda: plan.backward(dout, q, k, v, out, lse),
    }
    return tasks, verdicts


def numpy_tasks(host):
    """Softmax attention head by head on one score matrix that is worked on in place."""
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in host[:3])
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

    return {("forward", NUMPY): forward}


def torch_tasks(host):
    """Forward and backward of torch's flash kernel for CPUs; empty where torch is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    *inputs, dout = (torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2))) for x in host)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def attention(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    out = attention(*leaves)
    return {
        ("forward", TORCH): lambda: attention(*inputs),
        ("backward", TORCH): lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def speed(backend, sweep, shape, quick, seed):
    """Rows of one shape, one per pass and implementation."""
    host = random_qkv(shape, np.float32, seed)
    tasks, verdicts = nbflash_tasks(backend, host, sweep["check_rows"])
    tasks |= numpy_tasks(host) | torch_tasks(host)
    rounds = 7 if quick else sweep["rounds"]
    with progress(f"Timing, d={shape['head_dim']}", len(tasks) * (rounds + 1)) as advance:
        timings = interleave(
            tasks,
            backend.clock,
            rounds=rounds,
            seconds=sweep["seconds"],
            seed=seed,
            progress=advance,
        )
    found = []
    for (which, name), timing in timings.items():
        verdict = verdicts[which] if name == NBFLASH else None
        row = _row("speed", which, name, timing)
        row["gflops"] = flops(host[0].shape, 1.0, which) / timing.median / 1e6
        row["speed_of_nbflash"] = timing.median / timings[which, NBFLASH].median
        if verdict:
            row |= {"error": verdict.error, "budget": verdict.budget}
        found.append(shape | row)
    return found


def _row(kind, what, name, timing):
    return {
        "kind": kind,
        "what": what,
        "implementation": name,
        **timing.columns,
        "gflops": None,
        "speed_of_nbflash": None,
        "error": None,
        "budget": None,
    }


def first_use():
    """Rows of the first call in a new process, with an empty and with a filled kernel cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", FIRST_CALL]
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        found = []
        for state in ("compiled", "cached"):
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            times = json.loads(done.stdout.splitlines()[-1])
            for name, duration in zip(("forward", "backward"), times, strict=True):
                timing = Timing((duration,))
                row = _row("first call of a process", f"{name}, {state}", NBFLASH, timing)
                found.append({"batch": 1, "seqlen": 64, "heads": 2, "head_dim": 16} | row)
    return found


def _torch_version():
    try:
        import torch
    except ImportError:
        return ""
    return torch.__version__


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
    """Measure, print the tables and write ``cpu.csv`` to the directory ``out``.

    Parameters
    ----------
    out : pathlib.Path
    seed : int
        Seed of the random inputs and of the order of the rounds.
    quick : bool
        One shape, few rounds, and no fresh process.

    Returns
    -------
    list of dict
        The rows of the CSV.
    """
    backend, sweep = open_backend("cpu"), sweeps.load("cpu")
    origin = provenance("cpu") | {"torch": _torch_version()}
    say(f"[bold]{origin['device']}[/bold], float32, commit {origin['commit']}")
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
