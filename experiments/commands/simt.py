"""The SIMT kernels on a GPU: float32 speed, host cost of a call, first use in a new process.

Speed: forward, and the backward pass in both forms (two passes without atomics, and one with), in
shuffled rounds together with torch's memory-efficient kernel where torch is installed. Every output
is poisoned, computed and checked against the float64 reference before it is timed. The float32
matrix product of the same device, timed in the same run, says how fast it can be.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial

import numpy as np

import masks
import nbflash
from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.errors import OutOfBudget
from experiments.harness.inputs import random_qkv
from experiments.harness.oracle import Oracle, sample_rows, sampled
from experiments.harness.passes import flops
from experiments.harness.provenance import provenance
from experiments.harness.timing import Timing, host_time, interleave
from experiments.report.tables import progress, say, show, write_csv, wrote
from nbflash.testing import assert_within_reference, error_budget

FORWARD, ONE_PASS, TWO_PASS = "forward", "backward, one pass", "backward, two passes"
FORMS = {ONE_PASS: False, TWO_PASS: True}
NBFLASH, TORCH = "nbflash simt", "torch memory-efficient"
PRODUCT = "matrix product"

FIRST_CALL = """
import importlib, json, time
import cupy, nbflash
importlib.import_module("nbflash.cuda.launch")
q, k, v, dout = (cupy.ones((1, 256, 2, 64), cupy.float32) for _ in range(4))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
out, lse = nbflash.attention(q, k, v, return_lse=True, impl="simt")
cupy.cuda.Device().synchronize()
forward = time.perf_counter()
nbflash.attention_backward(dout, q, k, v, out, lse, impl="simt")
cupy.cuda.Device().synchronize()
print(json.dumps([1e3 * (forward - start), 1e3 * (time.perf_counter() - forward)]))
"""


def nbflash_tasks(backend, host, check_rows, impl="simt"):
    """Calls to time, each checked already, and the worst verdict of each.

    Returns
    -------
    tasks : dict of (pass, implementation) to callable
    verdicts : dict of (pass, implementation) to Verdict
    verify : callable
        ``verify(key, result)`` holds the result of a timed call to the budget again.
    """
    q, k, v, dout = map(backend.array, host)
    rows = sample_rows(host[0].shape[1], check_rows)
    oracle = Oracle(*host, None, rows)
    plan = nbflash.plan(q, k, v, impl=impl)
    out, lse = plan(q, k, v, out=backend.poisoned(q))
    got = {"out": backend.take(out, rows), "lse": backend.take(lse, rows, axis=2)}
    verdicts = {(FORWARD, NBFLASH): oracle.check(FORWARD, **got)}
    tasks = {(FORWARD, NBFLASH): partial(plan, q, k, v)}
    only = backend.array(sampled(host[3], rows))
    for form, deterministic in FORMS.items():
        _poison_pool(backend, (q, k, v))
        backward = partial(plan.backward, deterministic=deterministic)
        dq, dk, dv = backward(only, q, k, v, out, lse)
        got = {"dq": backend.take(dq, rows), "dk": backend.numpy(dk), "dv": backend.numpy(dv)}
        verdicts[form, NBFLASH] = oracle.check(form, **got)
        tasks[form, NBFLASH] = partial(backward, dout, q, k, v, out, lse)

    def verify(key, result):
        if key in verdicts:
            array = "out" if key[0] == FORWARD else "dq"
            oracle.check(f"{key[0]}, as timed", **{array: backend.take(result[0], rows)})

    return tasks, verdicts, verify


def _poison_pool(backend, like):
    """Leave NaN in the memory that the next allocations of these sizes get from CuPy's pool."""
    held = [backend.poisoned(x) for x in like]
    del held


def torch_tasks(backend, host):
    """The same calls of torch's memory-efficient kernel; empty where torch has no CUDA."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    q, k, v, dout = (
        torch.from_dlpack(backend.array(np.ascontiguousarray(x.transpose(0, 2, 1, 3))))
        for x in host
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*inputs)

    out = forward()
    return {
        (FORWARD, TORCH): forward,
        (ONE_PASS, TORCH): lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
    }


def speed(backend, sweep, quick, seed):
    """Rows of the speed table, one per shape, pass and implementation."""
    found = []
    for shape in sweep["shape"][: 1 if quick else None]:
        host = random_qkv(shape, np.float32, seed)
        tasks, verdicts, verify = nbflash_tasks(backend, host, sweep["check_rows"])
        tasks |= torch_tasks(backend, host)
        rounds = 7 if quick else sweep["rounds"]
        label = f"Timing, d={shape['head_dim']}"
        with progress(label, len(tasks) * (rounds + 1)) as advance:
            timings = interleave(
                tasks,
                backend.clock,
                rounds=rounds,
                seconds=sweep["seconds"],
                seed=seed,
                keep=verify,
                progress=advance,
            )
        for key, timing in timings.items():
            which, name = key
            verdict = verdicts.get(key)
            work = flops(host[0].shape, 1.0, which.split(",")[0])
            found.append(
                shape
                | _row("speed", which, name, timing)
                | {
                    "tflops": work / timing.median / 1e9,
                    "error": verdict.error if verdict else None,
                    "budget": verdict.budget if verdict else None,
                }
            )
    return found


def _row(kind, what, name, timing):
    return {
        "kind": kind,
        "what": what,
        "implementation": name,
        **timing.columns,
        "tflops": None,
        "error": None,
        "budget": None,
    }


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
    errors = []

    def verify(_, result):
        got = backend.numpy(result[:2, -256:])
        try:
            errors.append(assert_within_reference(got, exact, low, PRODUCT))
        except AssertionError as failure:
            raise OutOfBudget(f"no timing is reported, {failure}") from None

    task = partial(backend.xp.matmul, a, b)
    verify(PRODUCT, task())
    tasks = {PRODUCT: task}
    timing = interleave(tasks, backend.clock, rounds=rounds, seconds=seconds, keep=verify)[PRODUCT]
    shape = dict.fromkeys(("batch", "seqlen", "heads", "head_dim"))
    row = _row(PRODUCT, f"{n} x {n} x {n}", f"{backend.xp.__name__} matmul", timing)
    speed = {"tflops": 2 * n**3 / timing.median / 1e9}
    return shape | row | speed | {"error": max(errors), "budget": error_budget(exact, low)}


def host_cost(backend, sweep, seed):
    """Rows of the host time of one call: cached plan, warm, without waiting for the device."""
    shape = sweep["host"]
    q, k, v, dout = map(backend.array, random_qkv(shape, np.float32, seed))
    n = shape["seqlen"]
    mask = masks.butterfly(n, 16)
    out, lse = nbflash.attention(q, k, v, return_lse=True, impl="simt")
    plan = nbflash.plan(q, k, v, impl="simt")
    calls = {
        "attention(q, k, v)": lambda: nbflash.attention(q, k, v),
        "attention(q, k, v, mask)": lambda: nbflash.attention(q, k, v, mask),
        "plan(q, k, v)": lambda: plan(q, k, v),
        "attention_backward": lambda: nbflash.attention_backward(dout, q, k, v, out, lse),
    }
    kind, n = "host time of a call", sweep["host_calls"]
    return [shape | _row(kind, name, NBFLASH, host_time(call, n)) for name, call in calls.items()]


def first_use(sweep):
    """Rows of the first call in a new process, with an empty and with a filled kernel cache."""
    shape = {"batch": 1, "seqlen": 256, "heads": 2, "head_dim": 64}
    times = []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NBFLASH_CACHE_DIR": cache}
        for _ in range(1 + sweep["processes"]):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times.append(json.loads(done.stdout.splitlines()[-1]))
    found = []
    for state, samples in (("compiled", times[:1]), ("cached", times[1:])):
        for name, durations in zip(
            ("forward", "backward"), zip(*samples, strict=True), strict=True
        ):
            row = _row("first call of a process", f"{name}, {state}", NBFLASH, Timing(durations))
            found.append(shape | row)
    return found


def run(out, seed=0, quick=False):
    """Measure, print the tables, write ``simt.csv`` and ``simt.png`` to the directory ``out``."""
    from experiments.report.figures import draw_simt

    backend, sweep = open_backend("cuda"), sweeps.load("simt")
    origin = provenance("cuda")
    say(f"[bold]{origin['device']}[/bold], float32, commit {origin['commit']}")
    fast = speed(backend, sweep, quick, seed)
    peak = product(backend, sweep["product"], sweep["rounds"], sweep["seconds"], seed)
    other = host_cost(backend, sweep, seed) + first_use(sweep)
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
    columns = {"": "", "what": "", "ms": ".4f", "p10": ".4f", "p90": ".4f"}
    keys = ("kind", "what", "median_ms", "p10_ms", "p90_ms")
    show("latency", columns, [[row[key] for key in keys] for row in other])
    say("backward FLOPs count 2.5 times the forward's in both forms; imports are not in a latency.")
    rows = [row | origin for row in [*fast, peak, *other]]
    write_csv(out / "simt.csv", rows)
    draw_simt(rows[: len(fast)], out / "simt.png")
    wrote(out / "simt.csv", out / "simt.png")
