"""Tokens that go to other ranks, or come from them: messages, and the order of the sequence."""

from __future__ import annotations

import math

import numpy as np

from nbflash.inputs.arrays import alignment_in_memory, library, resident

# By bytes: what moves without a change, as wide as memory is read at once.
_WORDS = {16: np.complex128, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


class Index:
    """Places along an axis, as a slice where they follow each other: that needs no gather."""

    def __init__(self, places):
        first = int(places[0]) if places.size else 0
        self.size = places.size
        self.is_run = (first == 0 and not places.size) or bool((np.diff(places) == 1).all())
        self._host = slice(first, first + places.size) if self.is_run else places.astype(np.int32)
        self._on_device = {}

    def of(self, x):
        """The index for an array, in its memory."""
        if self.is_run or isinstance(x, np.ndarray):
            return self._host
        device = x.data.device_id
        if device not in self._on_device:
            with library(x)[1]:
                (self._on_device[device],) = resident([self._host])
        return self._on_device[device]


def taken(x, index, axis):
    """The tokens of an `Index`: a view where they follow each other, else a C-contiguous copy."""
    at = index.of(x)
    if index.is_run:
        return x[(*(slice(None),) * axis, at)]
    rest = x.shape[axis + 1 :]
    rows = _integers(x).reshape(*x.shape[: axis + 1], math.prod(rest))
    width = math.gcd(rows.shape[-1] * x.itemsize, alignment_in_memory(rows))
    found = library(x)[0].take(rows.view(_WORDS[width]), at, axis=axis)
    return found.view(x.dtype).reshape(*x.shape[:axis], index.size, *rest)


def contiguous(x):
    """An array in C order: itself, or a copy."""
    if x.flags.c_contiguous:
        return x
    return library(x)[0].ascontiguousarray(_integers(x)).view(x.dtype)


def pairs(two):
    """Two dicts by rank, of K and of V, as one of pairs."""
    first, second = two
    return {rank: (first[rank], second[rank]) for rank in first}


def _integers(x):
    """The same memory: CuPy copies integers of every size, of dtypes that it does not know too."""
    return x.view(f"u{x.dtype.itemsize}")


class Parcels:
    """Which tokens of an array (batch, n, heads, head_dim) belong to which other ranks.

    Where each rank's tokens follow each other, in a batch of one, messages are views of the array.
    Otherwise they lie one behind the other, in the order of `ranks`, in an array of their own.

    Parameters
    ----------
    places : dict of int to array
        By rank: places of its tokens, increasing. Those of ranks without any are left out.
    n : int
    """

    def __init__(self, places, n):
        self._places = {rank: at for rank, at in places.items() if at.size}
        self.index = {rank: Index(at) for rank, at in self._places.items()}
        self._n, self._flat = n, {}

    @property
    def ranks(self):
        return self.index.keys()

    def size_of(self, rank):
        """How many tokens belong to a rank."""
        return self.index[rank].size if rank in self.index else 0

    def _in_place(self, batch):
        """Whether messages are views."""
        return batch == 1 and all(index.is_run for index in self.index.values())

    def _tables(self, batch):
        """`Index` from the order of messages to that of (batch, n), and back."""
        if batch not in self._flat:
            starts = self._n * np.arange(batch)[:, None]
            order = [(starts + at).ravel() for at in self._places.values()]
            order = np.concatenate([np.zeros(0, np.int64), *order])
            self._flat[batch] = Index(order), Index(np.argsort(order))
        return self._flat[batch]

    def cut(self, x):
        """By rank: its tokens of an array, C-contiguous."""
        batch, _, *rest = x.shape
        x = contiguous(x)
        if self._in_place(batch):
            return {rank: taken(x, index, 1) for rank, index in self.index.items()}
        order, _ = self._tables(batch)
        return self._messages(taken(x.reshape(1, -1, *rest), order, 1), batch)

    def room(self, xp, batch, rest, dtype, *, in_place):
        """Memory for messages, and by rank its part of it.

        ``in_place``: the ranks' tokens are all there are, each once, and are to come in order.
        """
        if in_place and self._in_place(batch):
            whole = xp.empty((1, self._n, *rest), dtype)
            return whole, self.cut(whole)
        tokens = batch * sum(index.size for index in self.index.values())
        whole = xp.empty((1, tokens, *rest), dtype)
        return whole, self._messages(whole, batch)

    def ordered(self, whole, batch):
        """The array (batch, n, heads, head_dim) of what came into a `room` that is in place."""
        if not self._in_place(batch):
            whole = taken(whole, self._tables(batch)[1], 1)
        return whole.reshape(batch, self._n, *whole.shape[2:])

    def _messages(self, whole, batch):
        parts, start = {}, 0
        for rank, index in self.index.items():
            part = whole[:, start : start + batch * index.size]
            parts[rank] = part.reshape(batch, index.size, *whole.shape[2:])
            start += batch * index.size
        return parts
