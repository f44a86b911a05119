"""What a call takes of the host, warm and in a new process, for each array library.

Warm: plans are cached, and nothing waits for a CUDA device, so that the time is that of Python and
of the driver. On NumPy arrays a call also computes; the problem is small. New processes start with
an empty and with a filled cache of kernels: the import of the array library and of nbflash, then a
forward and a backward pass until their results are there.
"""

from functools import partial

import numpy as np

import masks
import nbflash
from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.inputs import random_qkv
from experiments.harness.provenance import provenance
from experiments.harness.setup import announce
from experiments.harness.timing import first_calls, host_time
from experiments.libraries.torch_base import why_not_torch
from experiments.report.tables import show, speed_row, write_csv, wrote

PARTS = "import", "forward", "backward"
_row = partial(speed_row, "warm")
START = """
import json, time
times = [time.perf_counter()]
import {library}, nbflash
from {module} import ones
times.append(time.perf_counter())
q, k, v, dout = (ones({shape}, dtype={dtype}{more}) for _ in range(4))
wait = {wait}
wait()
began = time.perf_counter()
out, lse = nbflash.attention(q, k, v, causal=True, return_lse=True)
wait()
forward = time.perf_counter()
nbflash.attention_backward(dout, q, k, v, out, lse, causal=True)
wait()
imported = times[1] - times[0]
print(json.dumps([1e3 * x for x in (imported, forward - began, time.perf_counter() - forward)]))
"""


def libraries(device):
    """Array libraries of a device: how each makes an array of a NumPy array."""
    found = {"numpy": np.array} if device == "cpu" else {"cupy": open_backend("cuda").array}
    if not why_not_torch():
        import torch

        found["torch"] = partial(_tensor, torch, device)
    return found


def _tensor(torch, device, x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def calls_of(make, dtype, sweep, seed):
    """Name to call, warm: all by nbflash's functions, on arrays of one library."""
    shape = sweep["shape"]
    q, k, v, dout = (make(x) for x in random_qkv(shape, dtype, seed))
    mask = masks.causal(shape["seqlen"])
    plan = nbflash.plan(q, k, v, mask)
    out, lse = plan(q, k, v)
    backward = partial(nbflash.attention_backward, dout, q, k, v, out, lse)
    cached = shape | {"seqlen": sweep["decode"]["capacity"]}
    _, k_cache, v_cache, _ = (make(x) for x in random_qkv(cached, dtype, seed))
    lengths = make(np.full(shape["batch"], cached["seqlen"], np.int32))
    return {
        "attention(q, k, v)": partial(nbflash.attention, q, k, v),
        "attention(q, k, v, mask)": partial(nbflash.attention, q, k, v, mask),
        "plan(...)(q, k, v)": partial(plan, q, k, v),
        "attention_backward(...)": backward,
        "attention_backward(..., mask)": partial(backward, mask),
        "plan.backward(...)": partial(plan.backward, dout, q, k, v, out, lse),
        "decode(q, k_cache, v_cache, lengths)": partial(
            nbflash.decode, q[:, :1], k_cache, v_cache, lengths
        ),
    }


def start_of(library, device, dtype, shape):
    """The script of a process that begins, for an array library."""
    sizes = tuple(shape[name] for name in ("batch", "seqlen", "heads", "head_dim"))
    waits = {"numpy": "lambda: None", "cupy": "cupy.cuda.Device().synchronize"}
    waits["torch"] = "torch.cuda.synchronize" if device == "cuda" else "lambda: None"
    given = {"shape": sizes, "library": library, "module": library, "wait": waits[library]}
    given["dtype"] = f"{library}.{dtype}"
    given["more"] = f", device={device!r}" if library == "torch" else ""
    return START.format(**given)


def measure(device, dtype, sweep, seed):
    """Rows of the table."""
    backend, found = open_backend(device), []
    dtype = dtype or ("float32" if backend.device == "cpu" else "float16")
    for library, make in libraries(backend.device).items():
        for what, call in calls_of(make, parse_dtype(dtype), sweep, seed).items():
            timing = host_time(call, sweep["calls"], sweep["runs"], backend.device)
            found.append(_row(what, library, timing))
        # CUDA kernels are kept by nbflash, those of the CPU by Numba.
        cache = "NUMBA_CACHE_DIR" if backend.device == "cpu" else "NBFLASH_CACHE_DIR"
        script = start_of(library, backend.device, dtype, sweep["shape"])
        for what, timing in first_calls(script, cache, sweep["processes"], PARTS).items():
            found.append(speed_row("new process", what, library, timing))
    return [sweep["shape"] | {"dtype": dtype} | row for row in found]


def run(device, dtype, out, seed=0, quick=False):
    """Measure, print the table and write ``calls.csv`` to the directory ``out``."""
    sweep = sweeps.load("calls")
    if quick:
        sweep |= {"runs": 3, "calls": 50, "processes": 1}
    origin = provenance(open_backend(device).device)
    rows = measure(device, dtype, sweep, seed)
    announce(origin, rows[0]["dtype"])
    columns = {"": "", "arrays": "", "what": "", "µs": ",.1f", "p10": ",.1f", "p90": ",.1f"}
    names, times = ("kind", "implementation", "what"), ("median_ms", "p10_ms", "p90_ms")
    cells = [[*(row[x] for x in names), *(1e3 * row[x] for x in times)] for row in rows]
    show("host time of a call", columns, cells)
    write_csv(out / "calls.csv", [row | origin for row in rows])
    wrote(out / "calls.csv")
