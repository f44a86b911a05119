"""Kernels compiled in processes of their own: beside one that this process compiles, or ahead.

A worker is a process of this interpreter that runs `main`: it reads pickled kernels and answers
with cubins, which it also keeps on disk. It does not import the script that is running.
"""

import atexit
import os
import pickle
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future

MOST = 16
_START = f"from {__name__} import main; main()"


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_beside():
    """How many workers there may be beside this process: ``$NBFLASH_WORKERS``, or free cores."""
    chosen = os.environ.get("NBFLASH_WORKERS")
    return int(chosen) if chosen else min(cores() - 1, MOST)


class Workers:
    """Up to ``most`` processes; each starts when there is work for it."""

    def __init__(self, most):
        self._most, self._threads, self.processes = most, [], []
        self._jobs, self._closed = queue.SimpleQueue(), False

    def submit(self, spec, compute_capability):
        """A Future of the cubin of a `KernelSpec`; None if the spec cannot be pickled.

        Its exception, if it has one, is a RuntimeError.
        """
        try:
            job = pickle.dumps((spec, compute_capability))
        except (pickle.PicklingError, AttributeError, TypeError):  # a function of one's own
            return None
        found = Future()
        self._jobs.put((job, found))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    def close(self):
        """End the processes; Futures that are not done stay so."""
        self._closed = True
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _serve(self):
        process = None
        while True:
            job, found = self._jobs.get()
            if self._closed:  # otherwise the next job would start a process again
                return
            try:
                if process is None or process.poll() is not None:
                    process = _start()
                    self.processes.append(process)
                found.set_result(_ask(process, job))
            except (OSError, RuntimeError) as error:
                found.set_exception(RuntimeError(str(error)))


def _start():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"NBFLASH_WORKERS": "0", "NBFLASH_QUIET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-P", "-c", _START], env=environment, **pipes)
    atexit.register(_end, process, os.getpid())
    return process


def _end(process, owner):
    """End a worker, but not from a fork of the process that started it."""
    if os.getpid() == owner:
        process.kill()


def _ask(process, job):
    try:
        process.stdin.write(len(job).to_bytes(8, "little") + job)
        process.stdin.flush()
        cubin, error = pickle.load(process.stdout)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as broken:
        raise RuntimeError(f"a process that compiles kernels ended: {broken!r}") from broken
    if error is not None:
        raise RuntimeError(error)
    return cubin


def main():
    """Compile what is asked for until standard input is closed."""
    from nbflash.cuda import launch
    from nbflash.cuda.ptx import _shared

    _shared.begin()
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not get among the answers
    while size := source.read(8):
        try:
            spec, capability = pickle.loads(source.read(int.from_bytes(size, "little")))
            answer = launch.cached_cubin(spec, capability), None
        except Exception as error:  # raised by the process that asked
            answer = None, f"{type(error).__name__}: {error}"
        pickle.dump(answer, target)
        target.flush()
