"""The protocol of communicators, and checks that all ranks make together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

SUMMARY = 24  # bytes


class Exchange(Protocol):
    """Messages on their way."""

    def begun(self) -> None:
        """On a GPU the current stream waits until the messages begin.

        Kernels that follow then leave them the multiprocessors that they need. In host memory there
        is nothing to do.
        """

    def wait(self) -> None:
        """Wait until the messages are received; on a GPU the current stream waits, not the host.

        Raises
        ------
        TimeoutError
            If a rank does not answer.
        """


class Communicator(Protocol):
    """Point-to-point messages between ranks, of arrays of one kind.

    Attributes
    ----------
    rank, size : int
    """

    rank: int
    size: int

    def agree(self, note: str) -> list[str]:
        """The notes of all ranks in their order; TimeoutError if one does not answer."""

    def exchange(self, sends: dict, receives: dict) -> Exchange:
        """Start to send and to receive, all at once.

        Parameters
        ----------
        sends : dict of int to array or tuple of arrays
            By the rank that they go to. C-contiguous; they do not change before `wait`.
        receives : dict of int to array or tuple of arrays
            By the rank that they come from; written.

        Notes
        -----
        All ranks call this equally often, also with nothing to send.
        """


def messages(by_rank: dict) -> Iterator[tuple[int, Any]]:
    """The arrays of an exchange one by one, each with its rank."""
    for rank, given in by_rank.items():
        for x in given if isinstance(given, tuple) else (given,):
            yield rank, x


def check_together(comm, check):
    """``check()`` on every rank, before anything is sent; what it returns.

    Parameters
    ----------
    comm : Communicator
    check : callable
        Without arguments; returns a result and a note, the JSON of a dict of what must be equal on
        all ranks.

    Raises
    ------
    RuntimeError
        If the check of another rank has failed, with its message.
    ValueError
        If something differs, with what it is on each rank.
    """
    try:
        result, own = check()
    except Exception as error:
        comm.agree(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    notes = comm.agree(own)
    if any(note != own for note in notes):
        _raise_difference(json.loads(own), [json.loads(note) for note in notes])
    return result


def _raise_difference(own, notes):
    """The error of ranks whose notes are not equal."""
    failed = [f"rank {r}: {note['error']}" for r, note in enumerate(notes) if "error" in note]
    if failed:
        raise RuntimeError("another rank has failed; " + "; ".join(failed))
    for name in sorted(set().union(*notes)):
        values = [note.get(name) for note in notes]
        if any(value != own.get(name) for value in values):
            told = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            raise ValueError(f"{name} differs between ranks: {told}")


def summary(note):
    """The length and a digest of a note, uint8 (24,): equal notes need not travel."""
    text = note.encode()
    digest = hashlib.blake2b(text, digest_size=SUMMARY - 8).digest()
    return np.frombuffer(len(text).to_bytes(8, "little") + digest, np.uint8)
