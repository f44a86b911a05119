"""Kernels that are bound are compiled side by side: one here, the others in processes.

When the first kernel that runs has to be compiled, processes start to compile the other bound
kernels that are not cached. Their cubins are waited for when they are run. Where no cores are free,
each kernel is compiled when it is run.
"""

import contextlib
import functools
import os
import sys
import threading

from nbflash.cuda import launch
from nbflash.cuda.availability import arch_of, cubin_dir
from nbflash.cuda.workers import Workers, most_beside

SECONDS = 2.0  # of compiling without a message
_MOST = 256  # bound kernels that are remembered
_lock = threading.Lock()
_bound, _coming = {}, {}  # by (spec, compute capability): None, and the Future of a cubin


def expect(spec, compute_capability):
    """Note that a kernel is bound, and may be run."""
    with _lock:
        _bound[spec, compute_capability] = None
        if len(_bound) > _MOST:
            del _bound[next(iter(_bound))]


def cubin_of(spec, compute_capability):
    """As `nbflash.cuda.launch.cached_cubin`; other bound kernels are compiled at the same time."""
    with _lock:
        _bound.pop((spec, compute_capability), None)
        coming = _coming.pop((spec, compute_capability), None)
    if coming is None and launch.is_cold(spec, compute_capability):
        _begin()
    with _announced(spec, compute_capability):
        if coming is not None:
            with contextlib.suppress(RuntimeError):  # which is raised here, if it is so here
                return coming.result()
        return launch.cached_cubin(spec, compute_capability)


def _begin():
    """Let processes compile the bound kernels that are not cached."""
    if most_beside() < 1:
        return
    with _lock:
        for each in list(_bound):
            del _bound[each]
            if launch.is_cold(*each) and (found := _workers().submit(*each)):
                _coming[each] = found


@functools.cache
def _workers():
    return Workers(most_beside())


def _after_fork():
    """A forked child does not have the threads that talk to processes."""
    global _lock
    _lock = threading.Lock()
    _coming.clear()
    _workers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _announced(spec, compute_capability):
    """A context that prints a message if it takes long, unless ``$NBFLASH_QUIET`` is set."""
    text = (
        f"nbflash: compiling {spec.name} for {arch_of(compute_capability)}, kept in {cubin_dir()} "
        "for the next time (NBFLASH_QUIET=1 silences this)"
    )
    timer = threading.Timer(SECONDS, print, [text], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if os.environ.get("NBFLASH_QUIET", "0") in ("", "0"):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
