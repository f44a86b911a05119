"""The mask of a layer's call, in eager mode and in compiled graphs, and the calls that
`nbflash.decode` takes.

The tensors of a mask go into a compiled graph, its contents do not. The mask of a model is known to
a graph by a number in a tensor: a graph that was compiled for one batch serves the next one, of
other paddings or documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import masks
from masks.interval import Interval
from masks.restriction import restrict_past_the_end
from nbflash.huggingface.mask_functions import from_tensor, numbered, remembered, shared
from nbflash.torch import decode
from nbflash.torch.attention import check_tensors
from nbflash.torch.constants import Outside
from nbflash.torch.late_masks import LateMask, Maker, documents, integers


class Override(Outside):
    """What `nbflash.huggingface.sparsify` gives to a module.

    Parameters
    ----------
    mask : masks.Mask or callable
        Square, or a function of ``(nq, nk)``: of the last nq of nk tokens.
    """

    def __init__(self, mask: masks.Mask | Callable[[int, int], masks.Mask]) -> None:
        self.mask = mask

    def rows(
        self,
        nq: int,
        nk: int,
        q_offset: int | None = None,
        kv_offset: int = 0,
    ) -> masks.Mask:
        """The mask of nq queries and nk keys, of tokens one behind the other.

        Keys past the end of the mask, which a static cache has room for, are not attended.

        Parameters
        ----------
        nq, nk : int
        q_offset : int, optional
            The token of the first query; by default queries are those of the last keys.
        kv_offset : int
            The token of the first key.
        """
        mask = self.mask
        if q_offset is None:
            q_offset = kv_offset + nk - nq
        n = q_offset + nq
        if not isinstance(mask, masks.Mask):
            mask, q_offset = self._made(nq, n), 0
        if mask.shape == (nq, nk) and kv_offset == 0:
            return mask
        if mask is self.mask and max(nq, n) > min(mask.shape):
            raise ValueError(f"the mask of sparsify is {mask.shape}, too small for {n} tokens")
        return _cut(mask, nq, nk, q_offset, kv_offset)

    def _made(self, nq, n):
        made = self.mask(nq, n)
        if not isinstance(made, masks.Mask):
            raise TypeError(f"the function of sparsify gave {type(made).__name__}, no masks.Mask")
        if made.shape != (nq, n):
            raise ValueError(f"the function of sparsify gave {made.shape} for {(nq, n)}")
        return made


def _cut(mask, nq, nk, q_offset, kv_offset):
    rows, columns = range(q_offset, q_offset + nq), range(kv_offset, kv_offset + nk)
    make = lambda: restrict_past_the_end(mask, rows, columns)
    return remembered(("cut", mask, nq, nk, q_offset, kv_offset), make)


@dataclass(frozen=True)
class LayerMask(Maker):
    """The mask of a call of a layer.

    Attributes
    ----------
    kind : {"model", "dense", "causal", "boolean", "given"}
        What it begins with: a number of a mask, none, a tensor of four axes, or ``given``.
    given : masks.Mask or None
    override : Override or None
        What is attended at most.
    packed : bool
        Whether two tensors more say where sequences begin.
    decodes : bool
        Whether the call is one for `nbflash.decode`, if the mask is causal or a causal window.
    place : (int, int) or ()
        The tokens of the first query and of the first key of ``given``, where they are known.
    """

    kind: str
    given: masks.Mask | None
    override: Override | None
    packed: bool
    decodes: bool
    place: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return (self.kind in ("model", "boolean")) + 2 * self.packed

    def mask(self, nq, nk, *tensors):
        mask, place = self._first(nq, nk, tensors)
        if self.packed:
            starts = integers("cu_seq_lens_q", tensors[-2]), integers("cu_seq_lens_k", tensors[-1])
            mask = mask & documents(*starts, False)
        if self.override is not None:
            mask = mask & self.override.rows(nq, nk, *place)
        return shared(mask)

    def _first(self, nq, nk, tensors):
        """The mask that it begins with, and its place where that is known."""
        if self.kind == "model":
            return numbered(int(tensors[0]))
        if self.kind == "boolean":
            return from_tensor(tensors[0]), ()
        if self.kind == "given":
            return self.given, self.place
        make = masks.causal if self.kind == "causal" else masks.dense
        return remembered((self.kind, nq, nk), lambda: make(nq, nk)), ()

    def instead(self, q, k, v, mask, scale, score):
        rows = last_rows(mask)
        return None if rows is None else decoded(q, k, v, rows, scale, score)


def late_mask(kind, given, tensors, override, starts, decodes) -> LateMask:
    """The mask of a call of a layer, as `nbflash.torch.attention` takes it in a graph.

    Parameters
    ----------
    kind, given, override, decodes
        As in `LayerMask`.
    tensors : tuple of Tensor
        Of its kind.
    starts : tuple of Tensor
        Two, where sequences begin, or none.
    """
    tensors = tuple(x.cpu() for x in (*tensors, *starts))
    return LateMask(LayerMask, (kind, given, override, len(starts) > 0, decodes), tensors)


class LastRows(NamedTuple):
    """The last queries of a sequence, as `nbflash.decode` takes them.

    Attributes
    ----------
    end : int
        One past the last query's own key.
    window : (int, int) or None
    """

    end: int
    window: tuple[int, int] | None


def decoded(q, k, v, rows, scale, score):
    """``(out, lse)`` of `LastRows`."""
    q, k, v = check_tensors(q, k, v)  # which autocast casts
    lengths = torch.full((len(q),), rows.end, dtype=torch.int32, device=q.device)
    how = {"window": rows.window, "scale": scale, "score": score}
    return decode(q, k, v, lengths, return_lse=True, **how)


def last_rows(mask):
    """The `LastRows` of a causal mask, or of a causal window of equal width; None of others."""
    # In a list: `remembered` would make None again at every call.
    (found,) = remembered(("last rows", mask), lambda: [_last_rows(mask)])
    return found


def _last_rows(mask):
    if not isinstance(mask, Interval) or not mask.shape[0]:
        return None
    end = int(mask.hi[-1])
    own = np.arange(end - mask.shape[0], end)
    left = end - 1 - int(mask.lo[-1])
    if (mask.hi != own + 1).any() or (mask.lo != np.maximum(own - left, 0)).any():
        return None
    return LastRows(end, (left, 0) if mask.lo.any() else None)
