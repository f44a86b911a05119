"""Ranks of MPI, of NumPy arrays: ``mpiexec -n 4 python program.py``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nbflash.distributed.communicator import SUMMARY, Exchange, messages, summary

_SPIN = 1e-3  # seconds in which a rank that waits only yields
_TAGS = 1 << 14  # MPI guarantees twice as many


class MpiCommunicator:
    """Messages between the processes of an mpi4py communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Default COMM_WORLD. It is duplicated, so that its messages do not mix with others.
    timeout : float
        Seconds after which a rank that does not answer counts as dead: `TimeoutError`, after which
        a program can only end (``comm.Abort()``).
    """

    def __init__(self, comm: Any = None, timeout: float = 300.0) -> None:
        from mpi4py import MPI

        self._mpi, self.timeout, self._number = MPI, timeout, 0
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def agree(self, note: str) -> list[str]:
        head, heads = summary(note), np.empty((self.size, SUMMARY), np.uint8)
        self._finish([self._comm.Iallgather(head, heads)])
        if (heads == head).all():
            return [note] * self.size
        own, lengths = np.frombuffer(note.encode(), np.uint8), heads[:, :8].copy().view(np.int64)
        lengths = lengths.ravel()
        notes = np.empty(lengths.sum(), np.uint8)
        self._finish([self._comm.Iallgatherv(own, (notes, lengths))])
        ends = np.cumsum(lengths)
        return [
            notes[end - n : end].tobytes().decode() for n, end in zip(lengths, ends, strict=True)
        ]

    def exchange(self, sends: dict[int, Any], receives: dict[int, Any]) -> Exchange:
        self._number += 1
        tag, byte = self._number % _TAGS, self._mpi.BYTE
        requests = [
            self._comm.Irecv([_bytes_of(x), byte], source, tag) for source, x in messages(receives)
        ]
        requests += [
            self._comm.Isend([_bytes_of(x), byte], target, tag) for target, x in messages(sends)
        ]
        return _MpiExchange(self, requests, (sends, receives))

    def _finish(self, requests):
        start, pause = time.monotonic(), 0.0
        while not self._mpi.Request.Testall(requests):
            waited = time.monotonic() - start
            if waited > self.timeout:
                raise TimeoutError(f"rank {self.rank} has waited {self.timeout} s for other ranks")
            time.sleep(pause)
            if waited > _SPIN:  # whoever sleeps wakes up 50 µs late
                pause = min(pause + 1e-6, 1e-3)


class _MpiExchange(Exchange):
    def __init__(self, comm, requests, held):
        self._comm, self._requests, self._held = comm, requests, held

    def wait(self):
        self._comm._finish(self._requests)
        self._requests, self._held = [], None


def _bytes_of(x):
    """The memory of a contiguous array, whatever its dtype, which may be none of MPI's."""
    return x.reshape(-1).view(np.uint8)
