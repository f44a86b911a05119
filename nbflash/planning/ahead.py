"""Many kernels compiled in processes, with a bar on standard error."""

from __future__ import annotations

import sys
import time
from concurrent.futures import as_completed

from nbflash.cuda import launch
from nbflash.cuda.workers import Workers

_WIDTH = 30  # of the bar


def compile_all(jobs, most_workers, *, bar=True):
    """Cubins of pairs of `KernelSpec` and compute capability, as a dict by pair.

    Parameters
    ----------
    jobs : iterable of (KernelSpec, (int, int))
    most_workers : int
        Processes. What none can be handed, a function of the script that runs, is compiled here.
    bar : bool

    Raises
    ------
    RuntimeError
        If a process cannot compile a kernel, with what it says.
    """
    pool, found, here, start = Workers(most_workers), {}, [], time.monotonic()
    coming = {}
    for job in dict.fromkeys(jobs):
        future = pool.submit(*job) if most_workers else None
        if future is None:
            here.append(job)
        else:
            coming[future] = job
    total = len(coming) + len(here)

    def add(job, cubin):
        found[job] = cubin
        if bar:
            done = _WIDTH * len(found) // total
            line = f"[{'#' * done}{'.' * (_WIDTH - done)}] {len(found)} of {total} kernels"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    try:
        for job in here:
            add(job, launch.cached_cubin(*job))
        for future in as_completed(coming):
            add(coming[future], future.result())
    finally:
        pool.close()
        if bar and total:
            print(f", {time.monotonic() - start:.0f} s", file=sys.stderr)
    return found
