"""Check, time against each other, check again: how every command measures.

A call is timed only after what it returns was held to its budget, and what the last timed call
returned is held to it again.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from experiments.harness.console import progress
from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import GRADIENTS, nearest, poison, sampled
from experiments.harness.passes import FORWARD
from experiments.harness.timing import Timing, interleave


@dataclass
class Task:
    """A call to time.

    Attributes
    ----------
    call : callable
    check : callable, optional
        ``check(result)`` gives a list of Verdict of what the call returns, or raises OutOfBudget.
    verdicts : list of Verdict
        What was found so far.
    run : object
        What the clock is given for the call.
    timing : Timing or None
        Once it is measured.
    """

    call: object
    check: object = None
    verdicts: list = field(default_factory=list)
    run: object = None
    timing: Timing = None

    @property
    def error(self):
        """The largest of all that was checked; None where nothing was."""
        return max((verdict.error for verdict in self.verdicts), default=None)

    @property
    def checked(self):
        """Columns of a table: error and budget of what came nearest to it, None without either."""
        if not self.verdicts:
            return {"error": None, "budget": None}
        verdict = nearest(self.verdicts)
        return {"error": verdict.error, "budget": verdict.budget}

    def verify(self, result):
        if self.check is not None:
            self.verdicts += self.check(result)


def task_of(library, case, which, oracle, arrays):
    """One pass of a library, of which all that it returns is checked here.

    Parameters
    ----------
    library : libraries.base.Library
    case : harness.grid.Case
    which : {"forward", "backward", "both"}
    oracle : Oracle
    arrays : q, k, v, dout
    """
    *inputs, dout = arrays
    if which == FORWARD:
        poison(oracle.xp, *inputs)
        results = library.results(case)
        found = oracle.check(**{key: x for key, x in results.items() if key in oracle.arrays})
        del results
        return Task(library.forward(case), lambda out: oracle.check(out=out), found)
    make, only = partial(getattr(library, which), case), sampled(oracle.xp, dout, oracle.rows)
    poison(oracle.xp, *inputs)
    gradients = make(only)()
    found = oracle.check(**dict(zip(GRADIENTS, gradients, strict=True)))
    del gradients
    return Task(make(dout), lambda gradients: oracle.check(dq=gradients[0]), found)


class Runner:
    """Measures tasks in shuffled rounds.

    Parameters
    ----------
    clock : WallClock or CudaEvents
    settings : dict
        ``rounds``, ``seconds`` and ``seed`` of `interleave`; more is ignored.
    leave_out : callable, optional
        ``leave_out(key, error, stage)`` says whether the rest goes on without the task of this key,
        which raised ``error``; ``stage`` is " as timed" for the results of timed calls. Without it
        nothing is left out.
    """

    def __init__(self, clock, settings, leave_out=lambda key, error, stage: False):
        self._clock, self._leave_out = clock, leave_out
        self._rounds = {key: settings[key] for key in ("rounds", "seconds", "seed")}

    def measure(self, makers, label=None):
        """`prepare` and `time`."""
        return self.time(self.prepare(makers), label)

    def prepare(self, makers):
        """The tasks whose results are right.

        Parameters
        ----------
        makers : dict of str or tuple of str to callable
            Each makes a Task.

        Raises
        ------
        OutOfBudget
            If a result is wrong and is not to be left out.
        """
        ready = {}
        for key, make in makers.items():
            try:
                task = make()
                task.verify(task.call())
                task.run = self._clock.prepare(task.call)
            except Exception as error:
                self._failed(key, error)
            else:
                ready[key] = task
        return ready

    def time(self, ready, label=None):
        """The tasks with their times, without those whose last timed result is wrong.

        Parameters
        ----------
        ready : dict
            From `prepare`.
        label : str, optional
            Of a progress bar.
        """
        wrong, runs = [], {key: task.run for key, task in ready.items()}

        def verify(key, result):
            try:
                ready[key].verify(result)
            except OutOfBudget as error:
                self._failed(key, error, " as timed")
                wrong.append(key)

        calls = len(runs) * (self._rounds["rounds"] + 1)
        with progress(label, calls) if label else nullcontext() as advance:
            rounds = self._rounds | {"keep": verify, "progress": advance}
            for key, timing in interleave(runs, self._clock, **rounds).items():
                ready[key].timing = timing
        return {key: task for key, task in ready.items() if key not in wrong}

    def _failed(self, key, error, stage=""):
        """Raise what was wrong, unless it is to be left out."""
        if self._leave_out(key, error, stage):
            return
        if isinstance(error, OutOfBudget):
            name = ", ".join([key] if isinstance(key, str) else key) + (stage and f",{stage}")
            raise OutOfBudget(f"{name}: no timing is reported, {error}") from None
        raise error
