"""Ranks on one machine, of NumPy arrays: threads of a process, or processes.

::

    results = run(function, 4, argument)  # function(comm, argument) on 4 ranks
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflash.distributed.communicator import Exchange, messages
from nbflash.distributed.sharding import positive


class LocalCommunicator:
    """Messages between ranks of one machine, in queues.

    Parameters
    ----------
    rank : int
    boxes : list of list of queue
        ``boxes[source][target]``: those of `queue` between threads, of `multiprocessing` between
        processes.
    timeout : float
        Seconds after which a rank that does not answer counts as dead.
    """

    def __init__(self, rank: int, boxes: list[Any], timeout: float = 60.0) -> None:
        self.rank, self.size, self.timeout = rank, len(boxes), timeout
        self._boxes, self._number, self._early = boxes, 0, {}

    def agree(self, note: str) -> list[str]:
        number = self._post(dict.fromkeys(range(self.size), note))
        return [self._take(source, number) for source in range(self.size)]

    def exchange(self, sends: dict[int, Any], receives: dict[int, Any]) -> Exchange:
        sent = {target: [] for target in sends}
        for target, x in messages(sends):
            sent[target].append(np.array(x))
        number = self._post(sent)
        return _LocalExchange(self, number, receives)

    def _post(self, messages):
        """Leave the messages of one call; its number, which is the same on all ranks."""
        self._number += 1
        for target, message in messages.items():
            self._boxes[self.rank][target].put((self._number, message))
        return self._number

    def _take(self, source, number):
        """The message of a call, whatever else has come before it."""
        deadline = time.monotonic() + self.timeout
        while (source, number) not in self._early:
            try:
                left = max(0.0, deadline - time.monotonic())
                found, message = self._boxes[source][self.rank].get(timeout=left)
            except queue.Empty:
                raise TimeoutError(
                    f"rank {self.rank} got no message of rank {source} for {self.timeout} s"
                ) from None
            self._early[source, found] = message
        return self._early.pop((source, number))


class _LocalExchange(Exchange):
    def __init__(self, comm, number, receives):
        self._comm, self._number, self._receives = comm, number, receives

    def wait(self):
        came = {source: self._comm._take(source, self._number) for source in self._receives}
        for source, target in messages(self._receives):
            message = came[source].pop(0)
            if (message.shape, message.dtype) != (target.shape, target.dtype):
                raise ValueError(
                    f"rank {source} has sent {message.dtype} {message.shape}, "
                    f"expected {target.dtype} {target.shape}"
                )
            target[...] = message
        self._receives = {}


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    processes: bool = False,
    timeout: float = 60.0,
) -> list[Any]:
    """``function(comm, *args)`` on ranks that run at the same time; their results in order.

    Parameters
    ----------
    function : callable
        With ``processes=True`` function, arguments and results must be picklable.
    ranks : int
    processes : bool
        A process for each rank, instead of a thread.
    timeout : float
        Of the communicators, in seconds.

    Raises
    ------
    Exception
        The error of the first rank that failed. RuntimeError if a process has died; its cause is
        the error of another rank, if there is one.
    """
    ranks = positive("ranks", ranks)
    context = multiprocessing.get_context("spawn") if processes else None
    box = context.Queue if processes else queue.SimpleQueue
    boxes, results = [[box() for _ in range(ranks)] for _ in range(ranks)], box()
    worker = context.Process if processes else threading.Thread
    started = []
    for rank in range(ranks):
        given = function, LocalCommunicator(rank, boxes, timeout), results, args
        started.append(worker(target=_run, args=given, daemon=True))
        started[-1].start()
    try:
        return _collected(results, started)
    finally:
        for each in started:
            if processes and each.is_alive():
                each.terminate()
            each.join()


def _run(function, comm, results, args):
    try:
        results.put((comm.rank, function(comm, *args), None))
    except Exception as error:
        results.put((comm.rank, None, error))


def _collected(results, workers):
    """What all ranks return, or the first error; all of them have ended then, or have died."""
    found, errors, waiting = {}, [], set(range(len(workers)))
    while waiting:
        dead = [rank for rank in waiting if not workers[rank].is_alive()]
        try:
            rank, result, error = results.get(timeout=0.1)
        except queue.Empty:
            waiting -= set(dead)
            continue
        waiting.discard(rank)
        found[rank] = result
        errors += [error] if error else []
    missing = [rank for rank in range(len(workers)) if rank not in found]
    if missing:
        cause = next(iter(errors), None)
        raise RuntimeError(f"the processes of ranks {missing} have died") from cause
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(len(workers))]
