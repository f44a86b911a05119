"""nbflash beside other attention libraries: the same inputs, masks and rounds for all of them.

Every library computes each mask that it can express. Its results are checked against dense masked
softmax in float64, on a sample of query rows with all their keys, before they are timed and after.
A library that cannot be loaded, raises or is wrong is named in one line and left out.

A sample is a run of calls between two CUDA events, long enough that neither the events nor the gaps
between launches count. It follows work that keeps the device busy while the host enqueues the run.
The inputs of the sweep are larger than the L2 cache, so that no call of a run finds them there.
"""

import math
import time
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np

import masks
from experiments import sweeps
from experiments.backends import open_backend, parse_dtype
from experiments.check import sample_rows
from experiments.errors import BadInput, OutOfBudget
from experiments.passes import flops
from experiments.peers import BLOCKS, CAUSAL, DENSE, LIBRARIES, NBFLASH, Case, why_not_here
from experiments.peers_check import GRADIENTS, DeviceOracle, poison, random_inputs, sampled
from experiments.provenance import provenance
from experiments.report import console, progress, say, write_csv, wrote
from experiments.sparsity import block_density
from experiments.timing import CudaEvents, interleave

#: The columns of ``peers.csv``.
COLUMNS = (
    *("library", "version", "pass", "mask", "density", "tile", "head_dim", "heads", "heads_kv"),
    *("batch", "seqlen", "dtype", "median_ms", "p10_ms", "p90_ms", "tflops", "error", "device"),
    *("driver", "commit", "date"),
)
FORWARD, BACKWARD = "forward", "backward"
MOST_CALLS, MOST_FILLERS = 64, 256


def read_cases(sweep, section, names=(), head_dims=(), seqlens=()):
    """The cases of a section of the sweep, shape by shape.

    Parameters
    ----------
    sweep : dict
        As in ``peers.toml``.
    section : {"full", "quick"}
    names, head_dims, seqlens : sequence
        What the user chose; empty for the section's own.

    Returns
    -------
    dict of (batch, seqlen, heads, head_dim) to list of Case

    Raises
    ------
    BadInput
        If a name is none of the sweep's, or nothing is left to run.
    """
    known = [spec["name"] for spec in sweep["mask"]]
    for name in names:
        if name not in known:
            raise BadInput(f"--mask {name}: expected one of {', '.join(known)}")
    found = {}
    for head_dim in head_dims or sweep[section]["head_dim"]:
        for n in seqlens or sweep[section]["seqlen"]:
            shape = _shape(sweep, n, head_dim)
            for spec in sweep["mask"]:
                if _chosen(spec, section, names, head_dim) and _has_room(spec, n):
                    found.setdefault(shape, []).append(_case(spec, shape))
    if not found:
        raise BadInput("no mask of the sweep is left to run at these sizes")
    return found


def _shape(sweep, n, head_dim):
    return max(1, sweep["tokens"] // n), n, max(1, sweep["width"] // head_dim), head_dim


def _chosen(spec, section, names, head_dim):
    if names:
        return spec["name"] in names
    return section != "quick" or head_dim in spec["quick"]


def _has_room(spec, n):
    """Whether the sequence is made of whole blocks, and of more than the mask is wide."""
    return n % spec["tile"] == 0 and spec.get("width", 0) < n // spec["tile"]


def _case(spec, shape):
    pattern, n, tile = spec["pattern"], shape[1], spec["tile"]
    if pattern in (DENSE, CAUSAL):
        density = 1.0 if pattern == DENSE else 0.5
        return Case(spec["name"], pattern, getattr(masks, pattern)(n), density, tile, shape)
    own = {"name", "pattern", "tile", "quick"}
    arguments = {key: value for key, value in spec.items() if key not in own}
    mask = getattr(masks, pattern)(n, block=tile, **arguments)
    return Case(spec["name"], BLOCKS, mask, block_density(mask, tile), tile, shape)


@dataclass(frozen=True)
class Launches:
    """A run of equal calls, and how much other work goes before it."""

    call: object
    calls: int = 1
    fillers: int = 0

    def __call__(self):
        for _ in range(self.calls):
            result = self.call()
        return result


class QueuedEvents(CudaEvents):
    """Times a run of calls that are all enqueued before the device comes to them.

    Parameters
    ----------
    sample_ms : float
        How long a run is to take on the device.
    """

    def __init__(self, sample_ms):
        super().__init__()
        self._sample_ms = sample_ms
        fill = Launches(partial(self._flush.fill, 0), calls=10)
        fill()
        self._filler_ms, _ = self.measure(fill)

    def prepare(self, call):
        """The run for a call that has been made before."""
        once, _ = self.measure(Launches(call, fillers=8))
        calls = min(math.ceil(self._sample_ms / once), MOST_CALLS)
        self._cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        Launches(call, calls)()
        host_ms = (time.perf_counter() - start) * 1e3
        return Launches(call, calls, min(math.ceil(host_ms / self._filler_ms), MOST_FILLERS))

    def measure(self, task):
        """Milliseconds of one call of the run, and what the last one returned."""
        for _ in range(task.fillers):
            self._flush.fill(0)
        duration, result = super().measure(task)
        return duration / task.calls, result


class Bench:
    """All libraries at one shape.

    Parameters
    ----------
    xp : module
        Library of the arrays.
    clock : QueuedEvents
    arrays : q, k, v, dout in the public layout
    factories : dict of str to callable
        Library to its adapter for q, k and v.
    settings : dict
        ``check_rows``, ``check_heads``, ``rounds``, ``seconds`` and ``seed``.

    Attributes
    ----------
    wrong : list of str
        Where results of nbflash were outside their budget.
    """

    def __init__(self, xp, clock, arrays, factories, settings):
        self._xp, self._clock, self._arrays, self._settings = xp, clock, arrays, settings
        self._libraries, self.wrong = {}, []
        for name, factory in factories.items():
            try:
                self._libraries[name] = factory(*arrays[:3])
            except Exception as error:
                left_out(name, f"d={arrays[0].shape[-1]}, N={arrays[0].shape[1]}", error)

    def measure(self, case, passes):
        """Rows of one case; a backward pass that nbflash lacks is not measured for the others."""
        batch, n, heads, _ = case.shape
        rows = sample_rows(n, self._settings["check_rows"], self._settings["seed"])
        count = min(batch * heads, self._settings["check_heads"])
        planes = [divmod(int(i), heads) for i in np.linspace(0, batch * heads - 1, count)]
        oracle = DeviceOracle(self._xp, self._arrays, case.mask, rows, planes)
        only = sampled(self._xp, self._arrays[3], rows)
        found = []
        for which in passes:
            calls, errors = self._ready(case, which, oracle, only)
            found += self._timed(case, which, calls, errors, oracle) if calls else []
        return found

    def _ready(self, case, which, oracle, only):
        """Runs of the calls that gave right results, and the error of each."""
        able = [name for name, library in self._libraries.items() if not library.why_not(case)]
        calls, errors = {}, {}
        for name in able:
            try:
                call, errors[name] = self._checked(name, case, which, oracle, only)
                calls[name] = self._clock.prepare(call)
            except Exception as error:
                self._leave_out(name, case, which, error)
                if name == NBFLASH and which == BACKWARD:
                    return {}, {}
        return calls, errors

    def _leave_out(self, name, case, which, error):
        left_out(name, f"{which}, {describe(case)}", error)
        if name == NBFLASH and isinstance(error, OutOfBudget):
            self.wrong.append(f"{which}, {describe(case)}")

    def _checked(self, name, case, which, oracle, only):
        """The call to time, and the error of what it returns."""
        library = self._libraries[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            poison(self._xp, *self._arrays[:3])
            if which == FORWARD:
                call = library.forward(case)
                return call, oracle.check(out=call())
            grads = library.backward(case, only)()
            error = oracle.check(**dict(zip(GRADIENTS, grads, strict=True)))
            call = library.backward(case, self._arrays[3])
            return call, max(error, oracle.check(dq=call()[0]))

    def _timed(self, case, which, calls, errors, oracle):
        """Rows of one pass, without those whose last timed result is wrong."""
        wrong = []

        def verify(name, result):
            got = {"out": result} if which == FORWARD else {"dq": result[0]}
            try:
                errors[name] = max(errors[name], oracle.check(**got))
            except OutOfBudget as error:
                wrong.append(name)
                self._leave_out(name, case, f"{which} as timed", error)

        options = {key: self._settings[key] for key in ("rounds", "seconds", "seed")}
        timings = interleave(calls, self._clock, keep=verify, **options)
        return [
            self._row(case, which, name, timing, errors[name])
            for name, timing in timings.items()
            if name not in wrong
        ]

    def _row(self, case, which, name, timing, error):
        batch, n, heads, head_dim = case.shape
        library = self._libraries[name]
        return {
            "library": library.label(case),
            "version": library.version(),
            "pass": which,
            "mask": case.name,
            "density": case.density,
            "tile": case.tile,
            "head_dim": head_dim,
            "heads": heads,
            "heads_kv": heads,
            "batch": batch,
            "seqlen": n,
            "dtype": self._arrays[0].dtype.name,
            "median_ms": timing.median,
            "p10_ms": timing.p10,
            "p90_ms": timing.p90,
            "tflops": flops(case.shape, case.density, which) / timing.median / 1e9,
            "error": error,
        }


def describe(case):
    """A case in a line for people."""
    return f"{case.name}, d={case.shape[3]}, N={case.shape[1]}"


def left_out(name, where, error):
    """Say in one line that a library is not measured there, and why."""
    text = " ".join(str(error).split()) or type(error).__name__
    line = f"{name} is left out ({where}): {text[:160]}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def open_factories(names, impl):
    """Adapters of the libraries that this machine has; a line for each that it lacks."""
    for name in names:
        if name not in LIBRARIES:
            raise BadInput(f"--library {name}: expected one of {', '.join(LIBRARIES)}")
    found = {}
    for name in LIBRARIES:
        if names and name not in names:
            continue
        if reason := why_not_here(name):
            left_out(name, "this machine", reason)
        else:
            found[name] = LIBRARIES[name]
    if NBFLASH in found:
        found[NBFLASH] = partial(found[NBFLASH], impl=impl)
    return found


def run(out, seed=0, quick=False, passes=(FORWARD,), impl="auto", libraries=(), **chosen):
    """Measure, print the tables, write ``peers.csv`` and ``peers.png`` to the directory ``out``.

    Parameters
    ----------
    out : pathlib.Path
    seed : int
        Seed of the inputs and of the order of the rounds.
    quick : bool
        The section of the sweep.
    passes : sequence of {"forward", "backward"}
    impl : str
        Implementation of nbflash.
    libraries : sequence of str
        Empty for all that are installed.
    **chosen
        ``names``, ``head_dims`` and ``seqlens`` of `read_cases`.
    """
    from experiments.peers_report import draw, show_ratios, show_rows

    section, sweep = "quick" if quick else "full", sweeps.load("peers")
    cases = read_cases(sweep, section, **chosen)
    backend, dtype = open_backend("cuda"), parse_dtype(sweep["dtype"])
    origin = provenance("cuda")
    say(f"[bold]{origin['device']}[/bold], {dtype.name}, commit {origin['commit']}")
    factories, clock = open_factories(libraries, impl), QueuedEvents(sweep["sample_ms"])
    settings = sweep | sweep[section] | {"seed": seed}
    rows, wrong = [], []
    for shape, of_shape in cases.items():
        arrays = random_inputs(backend.xp, shape, dtype, seed)
        bench, found = Bench(backend.xp, clock, arrays, factories, settings), []
        with progress(f"d={shape[3]}, N={shape[1]}", len(of_shape)) as advance:
            for case in of_shape:
                found += bench.measure(case, passes)
                advance()
        wrong += bench.wrong
        if found:
            show_rows(found)
            rows += [{key: (row | origin)[key] for key in COLUMNS} for row in found]
            write_csv(out / "peers.csv", rows)
    if rows:
        show_ratios(rows)
        draw(rows, out / "peers.png")
        wrote(out / "peers.csv", out / "peers.png")
    if wrong or not rows:
        raise OutOfBudget(f"nbflash is wrong: {'; '.join(wrong)}" if wrong else "nothing measured")
    return rows
