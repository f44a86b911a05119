"""Several implementations of attention on the same inputs, case by case.

Results are checked on a sample of query rows of some heads. What cannot be loaded, raises or is
wrong is named in one line and left out.
"""

import warnings
from functools import partial

import numpy as np

from experiments.harness.console import left_out, progress
from experiments.harness.errors import OutOfBudget
from experiments.harness.inputs import random_inputs
from experiments.harness.oracle import Oracle, Relative, sample_rows
from experiments.harness.passes import FORWARD, NBFLASH, flops
from experiments.harness.runner import Runner, task_of


class Comparison:
    """All libraries at one shape.

    Parameters
    ----------
    setup : Setup
        Of its ``settings`` ``check_rows``, ``check_heads``, ``rounds``, ``seconds`` and ``seed``.
    arrays : q, k, v, dout in the public layout
    factories : dict of str to callable
        Library to its adapter for q, k and v.
    own : sequence of str
        Which libraries are nbflash.

    Attributes
    ----------
    wrong : list of str
        Where results of nbflash were outside their budget.
    """

    def __init__(self, setup, arrays, factories, own=(NBFLASH,)):
        self._setup, self._settings, self._own = setup, setup.settings, own
        self._arrays, self._libraries, self.wrong = arrays, {}, []
        for name, factory in factories.items():
            try:
                self._libraries[name] = factory(*arrays[:3])
            except Exception as error:
                left_out(name, f"d={arrays[0].shape[-1]}, N={arrays[0].shape[1]}", error)

    def measure(self, case, passes):
        """Rows of one case; a backward pass that nbflash lacks is not measured for the others."""
        oracles, found = self._oracles(case), []
        for name, library in self._libraries.items():
            if takes(case, name) and (reason := library.why_not(case)):
                left_out(name, describe(case), reason)
        for which in passes:
            leave_out = partial(self._leave_out, case, which)
            runner = Runner(self._setup.clock, self._settings, leave_out)
            ready = self._ready(case, which, oracles, runner)
            if ready:
                found += [self._row(case, which, *item) for item in runner.time(ready).items()]
        return found

    def _oracles(self, case):
        """By library: libraries that compute the same share one."""
        batch, n, heads, _ = case.shape
        rows = sample_rows(n, self._settings["check_rows"], self._settings["seed"])
        planes = spread_planes(batch, heads, case.heads_kv, self._settings["check_heads"])
        what = self._setup.backend, self._arrays, case.mask, rows, planes
        made = {}
        for feature in (library.feature for library in self._libraries.values()):
            if feature not in made:
                made[feature] = Oracle(*what, feature, Relative)
        return {name: made[library.feature] for name, library in self._libraries.items()}

    def _ready(self, case, which, oracles, runner):
        """The tasks of the libraries that gave right results."""
        makers = {
            name: partial(task_of, library, case, which, oracles[name], self._arrays)
            for name, library in self._libraries.items()
            if takes(case, name) and not library.why_not(case)
        }
        ready = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, make in makers.items():
                ready |= runner.prepare({name: make})
                if name == NBFLASH and which != FORWARD and name not in ready:
                    return {}
        return ready

    def _leave_out(self, case, which, name, error, stage):
        where = f"{which}{stage}, {describe(case)}"
        left_out(name, where, error)
        if name in self._own and isinstance(error, OutOfBudget):
            self.wrong.append(where if name == NBFLASH else f"{name}, {where}")
        return True

    def _row(self, case, which, name, task):
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
            "heads_kv": case.heads_kv or heads,
            "batch": batch,
            "seqlen": n,
            "dtype": self._arrays[0].dtype.name,
            "median_ms": task.timing.median,
            "p10_ms": task.timing.p10,
            "p90_ms": task.timing.p90,
            "tflops": flops(case.shape, case.density, which) / task.timing.median / 1e9,
            "error": task.error,
            **library.details(case, which),
        }


def measure_all(setup, factories, passes, keep, own=(NBFLASH,)):
    """Measure the cases of a sweep, shape by shape.

    Parameters
    ----------
    setup : Setup
    factories, own
        As of `Comparison`.
    passes : sequence of {"forward", "backward", "both"}
    keep : callable
        ``keep(rows)`` is called with the rows of each shape that has any.

    Returns
    -------
    list of str
        Where results of nbflash were wrong.
    """
    wrong, settings = [], setup.settings
    for cases in setup.cases.values():
        shape, drawn = cases[0].shape, (settings["dtype"], settings["seed"], cases[0].heads_kv)
        arrays = random_inputs(setup.backend.xp, shape, *drawn)
        comparison, found = Comparison(setup, arrays, factories, own), []
        with progress(f"d={shape[3]}, N={shape[1]}", len(cases)) as advance:
            for case in cases:
                found += comparison.measure(case, passes)
                advance()
        wrong += comparison.wrong
        if found:
            keep(found)
    return wrong


def refuse(wrong, rows):
    """Raise OutOfBudget for what `measure_all` returns, or where no rows are left."""
    if wrong or not rows:
        raise OutOfBudget(f"nbflash is wrong: {'; '.join(wrong)}" if wrong else "nothing measured")


def takes(case, name):
    """Whether a library is among those that a case is for."""
    return not case.libraries or name in case.libraries


def spread_planes(batch, heads, heads_kv, count):
    """About ``count`` (batch entry, head) from the first to the last, in whole groups of heads."""
    heads_kv = heads_kv or heads
    group = heads // heads_kv
    count = min(batch * heads_kv, max(1, count // group))
    shared = [divmod(int(i), heads_kv) for i in np.linspace(0, batch * heads_kv - 1, count)]
    return [(b, h * group + g) for b, h in shared for g in range(group)]


def describe(case):
    """A case in a line for people."""
    return f"{case.name}, d={case.shape[3]}, N={case.shape[1]}"
