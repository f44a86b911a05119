"""The timing protocol: interleaved rounds in a shuffled order, medians and percentiles.

All tasks of a comparison run once in every round, in an order drawn anew each time, so that a
clock change or a busy neighbour reaches all of them alike. On a GPU each call lies between two
CUDA events; before it a buffer larger than the L2 cache is overwritten, which makes every call
start cold and keeps the device busy while the host enqueues the call, so that host time is not
measured. On a CPU it is the wall clock around the call, after a pause in which the threads of the
call before, OpenBLAS's above all, stop spinning for work: without it a short call that followed a
matrix product took 1.8 times as long on two cores.
"""

import gc
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from nbflash.cuda.collector import collector_off

MIN_ROUNDS = 3
FLUSH_BYTES = 256 * 2**20
SETTLE_SECONDS = 0.04
MOST_CALLS, MOST_FILLERS = 64, 256


@dataclass(frozen=True)
class Timing:
    """Durations of one task, one per round, in milliseconds."""

    samples: tuple[float, ...]

    @property
    def median(self):
        return float(np.median(self.samples))

    @property
    def p10(self):
        return float(np.percentile(self.samples, 10))

    @property
    def p90(self):
        return float(np.percentile(self.samples, 90))

    @property
    def columns(self):
        """What a table says of the times."""
        return {
            "median_ms": self.median,
            "p10_ms": self.p10,
            "p90_ms": self.p90,
            "rounds": len(self.samples),
        }


class WallClock:
    """Times a call on the host, in milliseconds."""

    def prepare(self, call):
        """What `measure` is to be given: one call is enough."""
        return call

    def measure(self, task):
        time.sleep(SETTLE_SECONDS)
        start = time.perf_counter()
        result = task()
        return (time.perf_counter() - start) * 1e3, result


class CudaEvents:
    """Times a call on CuPy's current stream with a cold L2, in milliseconds.

    Parameters
    ----------
    fillers : int
        How often the L2 cache is overwritten before a call: each keeps the device busy for 0.1 ms
        while the host enqueues the call.
    """

    def __init__(self, fillers=1):
        import cupy

        self._cupy, self._fillers = cupy, fillers

    @cached_property
    def _flush(self):
        """What is written to empty the L2 cache, on the device of the first measurement."""
        return self._cupy.empty(FLUSH_BYTES, self._cupy.uint8)

    def prepare(self, call):
        """What `measure` is to be given: one call is enough."""
        return call

    def measure(self, task):
        event = self._cupy.cuda.Event
        start, stop = event(), event()
        for _ in range(self._fillers):
            self._flush.fill(0)
        start.record()
        result = task()
        stop.record()
        stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, stop), result


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

    A run is long enough that neither the events nor the gaps between launches count. It follows
    work that keeps the device busy while the host enqueues it. Calls after the first find in the L2
    cache what the one before left there: for inputs that are larger than the cache.

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


def host_time(call, calls, runs=6, device="cuda"):
    """`Timing` of the host for a call that waits for nothing, if it launches on a CUDA device.

    One time for each run of ``calls``, which begins when the device is idle; the first is left out.
    """
    synchronize, samples = (lambda: None), []
    if device == "cuda":
        import cupy

        synchronize = cupy.cuda.Device().synchronize
    for _ in range(runs + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e3 / calls)
    synchronize()
    return Timing(tuple(samples[1:]))


def first_calls(script, cache_variable, cached, names=("forward", "backward")):
    """`Timing` of the first calls of new processes, with an empty and with a filled kernel cache.

    Parameters
    ----------
    script : str
        Prints, last, a JSON list of milliseconds, one for each of ``names``.
    cache_variable : str
        Of the environment: where kernels are kept.
    cached : int
        Processes that find the cache filled.

    Returns
    -------
    dict of str to Timing
    """
    times = []
    with tempfile.TemporaryDirectory() as cache:
        how = {"env": os.environ | {cache_variable: cache}, "stdout": subprocess.PIPE}
        for _ in range(1 + cached):
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, **how, text=True, check=True)
            times.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        f"{name}, {state}": Timing(durations)
        for state, samples in (("compiled", times[:1]), ("cached", times[1:]))
        for name, durations in zip(names, zip(*samples, strict=True), strict=True)
    }


@contextmanager
def uncollected():
    """A context without garbage collection, after a full one."""
    gc.collect()
    with collector_off():
        yield


def interleave(tasks, clock, *, rounds, seconds, warmup=1, seed=0, keep=None, progress=None):
    """Time several tasks against each other.

    Parameters
    ----------
    tasks : dict of str to callable
        What to time. Each is called without arguments.
    clock : WallClock or CudaEvents
    rounds : int
        Rounds to run; fewer, but at least ``MIN_ROUNDS``, when ``seconds`` have passed.
    seconds : float
        Time after which no further round begins.
    warmup : int
        Untimed rounds before the timed ones.
    keep : callable, optional
        ``keep(name, result)`` is called with what the last timed call of each task returned.
    progress : callable, optional
        Called without arguments after every call of a task.

    Returns
    -------
    dict of str to Timing
    """
    if rounds < 1:
        raise ValueError(f"{rounds=} must be at least 1")
    order, shuffle = list(tasks), random.Random(seed).shuffle
    samples = {name: [] for name in tasks}
    tick = progress or (lambda: None)
    for name in order * warmup:
        tasks[name]()
        tick()

    with uncollected():
        begin = time.perf_counter()
        for r in range(rounds):
            late = time.perf_counter() - begin > seconds
            last = r == rounds - 1 or (late and r >= MIN_ROUNDS - 1)
            shuffle(order)
            for name in order:
                duration, result = clock.measure(tasks[name])
                samples[name].append(duration)
                if last and keep is not None:
                    keep(name, result)
                del result
                tick()
            if last:
                break
    return {name: Timing(tuple(durations)) for name, durations in samples.items()}
