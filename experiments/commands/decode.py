"""decode: how fast cached keys and values are read, beside the device's copy rate and torch.

The last token of every sequence attends all keys of its own: contiguous, in pages in a random
order, quantised, in a window, and under a mask of sinks and a window. What is timed against each
other is checked first. A call reads its keys and values once: bytes over time, beside the rate of a
copy on the same device in the same run, which counts what it reads and what it writes.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

import masks
import nbflash
from experiments.harness.backends import parse_dtype
from experiments.harness.console import say
from experiments.harness.oracle import verdict_of
from experiments.harness.passes import NBFLASH
from experiments.harness.runner import Runner, Task
from experiments.harness.setup import set_up
from experiments.harness.timing import host_time
from experiments.libraries.torch_base import tensor, why_not_torch
from experiments.report.tables import show, write_csv, wrote
from nbflash import reference
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.testing import low_precision, make_qkv

COPY = "copy"
SDPA = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
STEP = 7  # sequence b has the keys of the first, turned by b steps: no two are alike
COLUMNS = {"batch": "d", "keys": "d", "cache": "", "library": "", "ms": ".4f", "p10": ".4f"}
COLUMNS |= {"p90": ".4f", "GB/s": ",.0f", "/ copy": ".2f", "host µs": ".1f", "error": ".1e"}
KEYS = ("batch", "keys", "cache", "library", "median_ms", "p10_ms", "p90_ms", "gb_per_s")
KEYS += ("over_copy", "host_us", "error")


@dataclass(frozen=True)
class Problem:
    """Queries and the keys of the first sequence, in host memory; every other one's are turned."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def batch(self):
        return len(self.q)

    @property
    def keys(self):
        return len(self.k)

    @property
    def sizes(self):
        """Columns of a table."""
        (batch, q_len, heads, head_dim), heads_kv = self.q.shape, self.k.shape[1]
        return {
            "batch": batch,
            "keys": self.keys,
            "q_len": q_len,
            "heads": heads,
            "heads_kv": heads_kv,
            "head_dim": head_dim,
            "dtype": self.q.dtype.name,
        }

    @property
    def checked(self):
        """The first and the last sequence."""
        return sorted({0, self.batch - 1})

    @cached_property
    def plain(self):
        """`expected` of the keys and values themselves."""
        return self.expected(self.k, self.v)

    def expected(self, k, v, mask=None):
        """The float64 reference and the plain computation of the sequences that are checked.

        A sum is the same however the keys are turned: the sequences, and the heads that share keys,
        are rows over keys that are there once. Head by head, which the caches hold.
        """
        q, found = self.q[self.checked], []
        group, keep = q.shape[2] // k.shape[1], None
        if mask is not None:
            own = [np.roll(mask.dense(), -b * STEP, axis=1) for b in self.checked]
            keep = np.repeat(np.concatenate(own), group, axis=0)
        for h in range(k.shape[1]):
            rows, kv = q[:, :, h * group : (h + 1) * group], (x[None, :, h : h + 1] for x in (k, v))
            one = rows.reshape(1, -1, 1, q.shape[3]), *kv, keep
            both = reference.attention(*one)[0], low_precision(*one)[0]
            found.append([x.reshape(rows.shape) for x in both])
        return [np.concatenate(x, axis=2) for x in zip(*found, strict=True)]

    def check(self, out, expected):
        """Verdicts on these sequences; OutOfBudget beyond the budget of one."""
        values = zip(out[self.checked], *expected, strict=True)
        return [verdict_of(*one, "out") for one in values]


def of_all(backend, x, batch):
    """A device array with the rows of ``x``, as words, for every sequence, turned."""
    words = backend.array(x.view(f"u{x.itemsize}"))
    return backend.xp.stack([backend.xp.roll(words, b * STEP, axis=0) for b in range(batch)])


def paged(backend, caches, page_size, seed):
    """The caches, arrays of words, in pages in a random order, and the table of the pages."""
    batch, keys = caches[0].shape[:2]
    order = np.random.default_rng(seed).permutation(batch * keys // page_size)
    table, at = backend.array(order.reshape(batch, -1).astype(np.int32)), backend.array(order)
    pools = []
    for cache in caches:
        pages = cache.reshape(-1, page_size, *cache.shape[2:])
        pools.append(backend.xp.empty_like(pages))
        pools[-1][at] = pages
    return pools, table


def quantised(backend, problem, name):
    """Caches of a dtype of one byte, their scales, and what is expected of them."""
    stored = [quantise(x, parse_dtype(name)) for x in (problem.k, problem.v)]
    values = [dequantise(*pair, np.dtype(np.float32)) for pair in stored]
    caches, scales = (
        [of_all(backend, x, problem.batch).view(x.dtype) for x in arrays]
        for arrays in zip(*stored, strict=True)
    )
    return caches, scales, problem.expected(*values)


def library_of(impl):
    """How a table calls nbflash, or one implementation of it."""
    return NBFLASH if impl == "auto" else f"{NBFLASH} {impl}"


def nbflash_tasks(backend, problem, sweep, seed, impls=("auto",)):
    """Tasks by library and the cache that they read, with what is known of each.

    Returns
    -------
    dict of (str, str) to (Task, dict)
        ``bytes`` that a call reads, and the ``density`` of the mask.
    """
    batch, keys, dtype = problem.batch, problem.keys, problem.q.dtype
    q, lengths = backend.array(problem.q), backend.array(np.full(batch, keys, np.int32))
    words = [of_all(backend, x, batch) for x in (problem.k, problem.v)]
    k, v = (x.view(dtype) for x in words)
    size, found = k.nbytes + v.nbytes, {}

    def add(name, *caches, read=size, density=1.0, expected=problem.plain, **options):
        for impl in impls:
            call = partial(nbflash.decode, q, *caches, lengths, impl=impl, **options)
            task = Task(call, lambda out: problem.check(backend.numpy(out), expected))
            known = {"bytes": read * density, "density": density}
            found[library_of(impl), name] = task, known

    add("contiguous", k, v)
    for page_size in sweep["pages"]:
        pools, table = paged(backend, words, page_size, seed)
        add(f"pages of {page_size}", *(x.view(dtype) for x in pools), block_table=table)
    for name in sweep["quantised"]:
        caches, scales, expected = quantised(backend, problem, name)
        read = sum(x.nbytes for x in (*caches, *scales))
        named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        add(name, *caches, read=read, expected=expected, **named)
    some, q_len = round(sweep["window"] * keys), problem.q.shape[1]
    window = masks.window(q_len, keys, left=some - 1, right=0)
    sinks = masks.sinks(q_len, some // 8, some - some // 8, nk=keys)
    for name, mask, given in (
        ("window", window, {"window": (some - 1, 0)}),
        ("sinks and window", sinks, {"mask": sinks}),
    ):
        density = float(mask.dense().mean())
        expected = problem.expected(problem.k, problem.v, mask)
        add(name, k, v, density=density, expected=expected, **given)
    return found


def torch_tasks(backend, problem):
    """The same of torch's SDPA over contiguous caches, by backend; none without CUDA."""
    if backend.device == "cpu" or why_not_torch():
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = problem.q.dtype
    words = [of_all(backend, x, problem.batch) for x in (problem.k, problem.v)]
    arrays = backend.array(problem.q), *(x.view(dtype) for x in words)
    q, k, v = (tensor(x).transpose(1, 2) for x in arrays)
    known = {"bytes": arrays[1].nbytes + arrays[2].nbytes, "density": 1.0}

    def attention(which):
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def check(out):
        out = out.transpose(1, 2).float().cpu().numpy()
        return problem.check(out.astype(dtype), problem.plain)

    return {
        f"sdpa-{name.split('_')[0].lower()}": (
            Task(partial(attention, getattr(SDPBackend, name)), check),
            known,
        )
        for name in SDPA
    }


def copy_task(backend, nbytes):
    """A copy of half as many bytes, which are then read and written."""
    source = backend.xp.ones(nbytes // 8, np.float32)
    target = backend.xp.empty_like(source)
    return Task(partial(backend.xp.copyto, target, source)), {"bytes": nbytes, "density": None}


def _left_out(key, error, stage):
    """Whether torch, or a named implementation, has no kernel for this; a line says so."""
    none = ValueError if key[0].startswith(NBFLASH) else RuntimeError
    if key[0] in (NBFLASH, COPY) or not isinstance(error, none):
        return False
    say(f"{key[0]} is left out: {str(error).splitlines()[0]}")
    return True


def measure(setup, problem, impls=("auto",)):
    """Rows of one size."""
    backend, settings = setup.backend, setup.settings
    tasks = nbflash_tasks(backend, problem, settings, settings["seed"], impls)
    peers = torch_tasks(backend, problem)
    tasks |= {(library, "contiguous"): found for library, found in peers.items()}
    tasks[COPY, ""] = copy_task(backend, settings["copied"])
    makers = {key: lambda task=task: task for key, (task, _) in tasks.items()}
    runner = Runner(setup.clock, settings, _left_out)
    timed = runner.measure(makers, f"Timing, {problem.batch} x {problem.keys}")
    of_copy = tasks[COPY, ""][1]["bytes"] / timed[COPY, ""].timing.median / 1e6
    rows = []
    for key, task in timed.items():
        known = tasks[key][1]
        rate = known["bytes"] / task.timing.median / 1e6
        on_host = key[0].startswith(NBFLASH) and backend.device == "cuda"
        host = host_time(task.call, settings["host_calls"]) if on_host else None
        row = dict(zip(("library", "cache"), key, strict=True)) | problem.sizes
        row |= {"density": known["density"], "error": task.error, "bytes": known["bytes"]}
        row |= task.timing.columns | {"gb_per_s": rate, "over_copy": rate / of_copy}
        rows.append(row | {"host_us": 1e3 * host.median if host else None})
    return rows


def problems(settings, head_dims):
    """The problems of a sweep, head dimension by head dimension and size by size."""
    heads, seed = (settings["heads"], settings["heads_kv"]), settings["seed"]
    for head_dim in head_dims:
        for batch, keys in settings["sizes"]:
            sizes = *heads, head_dim, settings["dtype"]
            q, *_ = make_qkv(batch, 1, 1, *sizes, seed=seed)
            _, k, v, _ = make_qkv(1, 1, keys, *sizes, seed=seed + 1)
            yield Problem(q, k[0], v[0])


def run(out, device="auto", seed=0, quick=False, impls=()):
    """Measure, print the table, write ``decode.csv`` to the directory ``out``.

    ``impls`` are implementations of nbflash to measure beside the one that "auto" chooses.
    """
    setup, rows = set_up("decode", "quick" if quick else "full", device, seed=seed), []
    for problem in problems(setup.settings, [setup.settings["head_dim"]]):
        rows += [row | setup.origin for row in measure(setup, problem, ("auto", *impls))]
        write_csv(out / "decode.csv", rows)
    show("decode", COLUMNS, [[row[key] for key in KEYS] for row in rows])
    wrote(out / "decode.csv")
    return rows
