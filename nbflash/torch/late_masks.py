"""Masks of compiled graphs that are made when a graph runs, of tensors that it gets or computes.

A mask is a constant to torch.compile. One that other tensors decide would be that of the call that
was compiled; a `LateMask` goes into the graph as its tensors and as a `Maker`, which is a constant.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import masks


class Maker:
    """What makes a mask: hashable, equal to what makes the same one.

    Attributes
    ----------
    count : int
        Number of tensors that `mask` takes.
    """

    count = 0

    def mask(self, nq: int, nk: int, *tensors) -> masks.Mask:
        """The mask of a call of so many queries and keys; tensors are in host memory."""
        raise NotImplementedError


class LateMask(NamedTuple):
    """What `nbflash.torch.attention` takes for a mask while it is compiled."""

    maker: Maker
    tensors: tuple


class _Documents(Maker):
    """Sequences one behind the other, of where they begin and end."""

    count = 2

    def __init__(self, causal):
        self.causal = causal

    def mask(self, nq, nk, starts_q, starts_k):
        return documents(*map(tuple, (starts_q.tolist(), starts_k.tolist())), self.causal)


DOCUMENTS = {causal: _Documents(causal) for causal in (False, True)}


@functools.lru_cache(maxsize=256)
def documents(starts_q: tuple, starts_k: tuple, causal: bool) -> masks.Mask:
    """`masks.documents_from_cu_seqlens`, the same object for the same call."""
    return masks.documents_from_cu_seqlens(list(starts_q), list(starts_k), causal=causal)
