"""Masks of compiled graphs that are made when a graph runs, of tensors that it gets or computes.

A mask is a constant to torch.compile. One that other tensors decide would be that of the call that
was compiled; a `LateMask` goes into the graph as its tensors and as a `Maker`, which is a constant.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch

import masks
from nbflash.scores import Score
from nbflash.torch.memory import host_copy


class Maker:
    """What makes a mask: hashable, equal to what makes the same one.

    Attributes
    ----------
    count : int
        Number of tensors that `mask` takes.
    decodes : bool
        Whether `instead` may have results.
    """

    count = 0
    decodes = False

    def mask(self, nq: int, nk: int, *tensors) -> masks.Mask:
        """The mask of a call of so many queries and keys; tensors are in host memory."""
        raise NotImplementedError

    def instead(self, q, k, v, mask: masks.Mask, scale: float | None, score: Score | None):
        """``(out, lse)`` by another way than attention under ``mask``, or None."""
        return None


class LateMask(NamedTuple):
    """What `nbflash.torch.attention` takes for a mask while it is compiled.

    Attributes
    ----------
    make : type
        A kind of `Maker`.
    given : tuple
        What its makers are made of: constants, and objects that a graph looks for again.
    tensors : tuple of Tensor
    """

    make: type[Maker]
    given: tuple
    tensors: tuple


@dataclass(frozen=True)
class Documents(Maker):
    """Sequences one behind the other, of where they begin and end."""

    causal: bool
    count = 2

    def mask(self, nq, nk, starts_q, starts_k):
        starts = integers("cu_seqlens_q", starts_q), integers("cu_seqlens_k", starts_k)
        return documents(*starts, self.causal)


def integers(name, x):
    """A sequence of integers, or a tensor, as a tuple of int; TypeError if it is none."""
    if isinstance(x, torch.Tensor):
        x = host_copy(name, x, "give it in host memory").tolist()
    try:
        return tuple(map(operator.index, x))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be integers, got {x!r}") from error


@functools.lru_cache(maxsize=256)
def documents(starts_q: tuple, starts_k: tuple, causal: bool) -> masks.Mask:
    """`masks.documents_from_cu_seqlens`, the same object for the same call."""
    return masks.documents_from_cu_seqlens(starts_q, starts_k, causal=causal)
