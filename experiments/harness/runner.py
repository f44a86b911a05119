"""Check and time several implementations of attention on the same inputs, case by case.

Results are checked against dense masked softmax in float64, on a sample of query rows with all
their keys, before they are timed and after. What cannot be loaded, raises or is wrong is named in
one line and left out.
"""

import textwrap
import warnings

import numpy as np

from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.device_oracle import (
    GRADIENTS,
    DeviceOracle,
    poison,
    random_inputs,
    sampled,
)
from experiments.harness.errors import OutOfBudget, one_line
from experiments.harness.grid import read_cases
from experiments.harness.oracle import sample_rows
from experiments.harness.passes import FORWARD, flops
from experiments.harness.provenance import provenance
from experiments.harness.timing import QueuedEvents, interleave
from experiments.libraries.peers import NBFLASH
from experiments.report.tables import console, progress, say


class Bench:
    """All libraries at one shape.

    Parameters
    ----------
    xp : module
        Library of the arrays.
    clock : QueuedEvents or WallClock
    arrays : q, k, v, dout in the public layout
    factories : dict of str to callable
        Library to its adapter for q, k and v.
    settings : dict
        ``check_rows``, ``check_heads``, ``rounds``, ``seconds`` and ``seed``; ``own``, which
        libraries are nbflash, if it is not the one of this name.

    Attributes
    ----------
    wrong : list of str
        Where results of nbflash were outside their budget.
    """

    def __init__(self, xp, clock, arrays, factories, settings):
        self._xp, self._clock, self._arrays, self._settings = xp, clock, arrays, settings
        self._libraries, self.wrong = {}, []
        self._own = settings.get("own", (NBFLASH,))
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
        oracles = self._oracles(case.mask, rows, planes)
        only = sampled(self._xp, self._arrays[3], rows)
        found = []
        for which in passes:
            calls, errors = self._ready(case, which, oracles, only)
            found += self._timed(case, which, calls, errors, oracles) if calls else []
        return found

    def _oracles(self, mask, rows, planes):
        """By library: libraries that compute the same share one."""
        features = {name: library.feature for name, library in self._libraries.items()}
        made = {
            feature: DeviceOracle(self._xp, self._arrays, mask, rows, planes, feature)
            for feature in dict.fromkeys(features.values())
        }
        return {name: made[feature] for name, feature in features.items()}

    def _ready(self, case, which, oracles, only):
        """Runs of the calls that gave right results, and the error of each."""
        able = [name for name, library in self._libraries.items() if not library.why_not(case)]
        calls, errors = {}, {}
        for name in able:
            try:
                call, errors[name] = self._checked(name, case, which, oracles[name], only)
                calls[name] = self._clock.prepare(call)
            except Exception as error:
                self._leave_out(name, case, which, error)
                if name == NBFLASH and which != FORWARD:
                    return {}, {}
        return calls, errors

    def _leave_out(self, name, case, which, error):
        where = f"{which}, {describe(case)}"
        left_out(name, where, error)
        if name in self._own and isinstance(error, OutOfBudget):
            self.wrong.append(where if name == NBFLASH else f"{name}, {where}")

    def _checked(self, name, case, which, oracle, only):
        """The call to time, and the error of what it returns."""
        library = self._libraries[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            poison(self._xp, *self._arrays[:3])
            if which == FORWARD:
                call = library.forward(case)
                return call, oracle.check(out=call())
            make = getattr(library, which)
            grads = make(case, only)()
            error = oracle.check(**dict(zip(GRADIENTS, grads, strict=True)))
            del grads
            call = make(case, self._arrays[3])
            return call, max(error, oracle.check(dq=call()[0]))

    def _timed(self, case, which, calls, errors, oracles):
        """Rows of one pass, without those whose last timed result is wrong."""
        wrong = []

        def verify(name, result):
            got = {"out": result} if which == FORWARD else {"dq": result[0]}
            try:
                errors[name] = max(errors[name], oracles[name].check(**got))
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
            **library.details(case, which),
        }


def measure_all(cases, clock, factories, settings, passes, keep):
    """Measure shape by shape.

    Parameters
    ----------
    cases : dict of shape to list of Case
        From `read_cases`.
    clock : QueuedEvents or WallClock
    factories, settings
        As of `Bench`; ``settings`` has the array library ``xp`` and the NumPy ``dtype`` too.
    passes : sequence of {"forward", "backward", "both"}
    keep : callable
        ``keep(rows)`` is called with the rows of each shape that has any.

    Returns
    -------
    list of str
        Where results of nbflash were wrong.
    """
    wrong = []
    for shape, of_shape in cases.items():
        xp, seed = settings["xp"], settings["seed"]
        arrays = random_inputs(xp, shape, settings["dtype"], seed)
        bench, found = Bench(xp, clock, arrays, factories, settings), []
        with progress(f"d={shape[3]}, N={shape[1]}", len(of_shape)) as advance:
            for case in of_shape:
                found += bench.measure(case, passes)
                advance()
        wrong += bench.wrong
        if found:
            keep(found)
    return wrong


def set_up(name, section, device="auto", dtype=None, seed=0, **chosen):
    """What the sweep ``name`` runs on a device; a line about it is printed.

    Parameters
    ----------
    name, section : str
        Of a sweep with tables for devices, and of one of the tables of its sizes.
    device : {"auto", "cpu", "cuda"}
    dtype : str, optional
        Instead of the sweep's.
    seed : int
    **chosen
        ``names``, ``head_dims`` and ``seqlens`` of `read_cases`.

    Returns
    -------
    sweep, cases, clock, settings, origin
        As `read_cases` and `measure_all` take them, and the columns of `provenance`.
    """
    backend, sweep = open_backend(device), sweeps.load(name)
    sweep |= sweep[backend.device]
    cases = read_cases(sweep, section, **chosen)
    settings = sweep | sweep[section] | {"seed": seed, "xp": backend.xp}
    settings["dtype"] = parse_dtype(dtype or settings["dtype"])
    clock = backend.clock if backend.device == "cpu" else QueuedEvents(sweep["sample_ms"])
    origin = provenance(backend.device)
    say(f"[bold]{origin['device']}[/bold], {settings['dtype'].name}, commit {origin['commit']}")
    return sweep, cases, clock, settings, origin


def refuse(wrong, rows):
    """Raise OutOfBudget for what `measure_all` returns, or where no rows are left."""
    if wrong or not rows:
        raise OutOfBudget(f"nbflash is wrong: {'; '.join(wrong)}" if wrong else "nothing measured")


def describe(case):
    """A case in a line for people."""
    return f"{case.name}, d={case.shape[3]}, N={case.shape[1]}"


def left_out(name, where, error):
    """Say in one line that a library is not measured there, and why."""
    text = textwrap.shorten(one_line(error), 300, placeholder=" …")
    line = f"{name} is left out ({where}): {text}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
