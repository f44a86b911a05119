"""Masks of transformers' mask functions: every row an interval of keys where that is known.

transformers describes a mask by a function of (batch, head, query, key), made of a few known ones.
Those are read, in O(N); any other function is evaluated for every query and key, and is exact too.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils as theirs

import masks
from masks.interval import Interval
from nbflash.planning.cache import Cache
from nbflash.torch.memory import host_copy

_REMEDY = (
    "make the mask before, with nbflash.huggingface.mask_of and the mask_function and padding of "
    "the model, and give it as attention_mask"
)
_known = Cache(clearable=True)
_numbers = itertools.count(1)
_held = weakref.WeakValueDictionary()


class ModelMask(BlockMask):
    """A `masks.Mask` on its way through a model.

    To transformers a mask that is no tensor is ready if it is one of FlexAttention: it is passed on
    as it is, from `generate` to every layer.

    Attributes
    ----------
    mask : masks.Mask
    place : (int, int)
        The tokens of its first query and of its first key.
    number : Tensor
        What stands for the mask and its place in compiled graphs.
    shape : torch.Size
        (batch, 1, queries, keys).
    """

    def __init__(self, mask, batch, place):
        self.mask, self._size = mask, torch.Size((batch, 1, *mask.shape))
        self.place, self.number = place, _number(mask, place)

    @property
    def shape(self):
        return self._size

    @property
    def ndim(self):
        return 4

    def to(self, *args, **kwargs):
        return self

    def __getitem__(self, index):
        raise TypeError("nbflash: a mask of a model cannot be cut; set another implementation")

    def __repr__(self):
        return f"ModelMask({self.mask})"

    __str__ = __repr__


def _number(mask, place):
    """A tensor that keeps a mask as long as torch keeps the tensor, for a backward pass too."""
    held = _Held(mask, place)
    with torch.inference_mode(False):  # it may be kept for a training
        number = torch.tensor(held.number, device="cpu")
    number.nbflash_held = held
    return number


class _Held:
    def __init__(self, mask, place):
        self.mask, self.place, self.number = mask, place, next(_numbers)
        _held[self.number] = self


def numbered(number: int) -> tuple[masks.Mask, tuple[int, int]]:
    """The mask that a number stands for, and its place."""
    held = _held[number]
    return held.mask, held.place


class _Unknown(Exception):
    """A function that is to be evaluated."""


@torch.compiler.disable(reason="a mask is read on the host: nbflash.huggingface.mask_of outside")
def mask_of(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=theirs.causal_mask_function,
    attention_mask=None,
    *,
    use_vmap=False,
    device="cpu",
    **kwargs,
):
    """The mask of a call, a `ModelMask`: what transformers asks of an `AttentionMaskInterface`.

    A padding mask or an offset on a CUDA device is copied to the host, which waits for the device.
    """
    q_offset, kv_offset = _integer(q_offset), _integer(kv_offset)
    place = _Place(batch_size, q_length, kv_length, q_offset, kv_offset)
    try:
        mask = place.read(mask_function)
    except _Unknown:
        mask = place.evaluate(mask_function, use_vmap, device)
    if attention_mask is not None:
        mask = mask & place.keys(attention_mask)
    if _is_bidirectional(mask_function) and q_offset == kv_offset == 0:
        q_offset = kv_length - q_length  # 0 is no place where a decoder attends to its encoder
    first = q_offset, kv_offset
    return remembered((batch_size, mask, first), lambda: ModelMask(mask, batch_size, first))


def _is_bidirectional(fn):
    """Also one with an overlay."""
    if _name(fn) == _AND:
        return any(map(_is_bidirectional, _variables(fn)["mask_functions"]))
    return fn is theirs.bidirectional_mask_function


def shared(mask):
    """An equal mask that was there before, or this one: torch.compile looks for the same object."""
    return remembered(mask, lambda: mask)


def remembered(key, make):
    """What ``make()`` gave for a key, until `nbflash.clear_cache`."""
    known = _known.get(key)
    if known is None:
        known = make()
        _known.put(key, known)
    return known


class _Place:
    """Which tokens the queries and keys of a call are."""

    def __init__(self, batch, nq, nk, q_offset, kv_offset):
        self.batch, self.nq, self.nk = batch, nq, nk
        self.q_offset, self.kv_offset = q_offset, kv_offset
        self.own = np.arange(nq) + (q_offset - kv_offset)  # the key of each query's own token

    def rows(self, lo, hi):
        """Keys from ``lo`` to below ``hi``, arrays of the queries or numbers."""
        return Interval(self.nk, *(np.broadcast_to(bound, self.nq) for bound in (lo, hi)))

    def read(self, fn, packed=False):
        """The mask of a function of transformers' own; raises `_Unknown`.

        ``packed``: only pairs of one packed sequence matter, within which positions differ as
        indices do.
        """
        if fn is theirs.causal_mask_function:
            return self.rows(0, self.own + 1)
        if fn is theirs.bidirectional_mask_function:
            return masks.dense(self.nq, self.nk)
        name, given = getattr(fn, "__qualname__", ""), _variables(fn)
        if name == _AND:
            parts = given["mask_functions"]
            packed = packed or any(_name(part) == _PACKED for part in parts)
            return _joined(lambda a, b: a & b, [self.read(part, packed) for part in parts])
        if name == "or_masks.<locals>.or_mask":
            parts = given["mask_functions"]
            return _joined(lambda a, b: a | b, [self.read(part, packed) for part in parts])
        if name == "sliding_window_overlay.<locals>.inner_mask":
            return self.rows(self.own - given["sliding_window"] + 1, self.nk)
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            reach = given["sliding_window"]
            return self.rows(self.own - reach, self.own + reach + 1)
        if name == "padding_mask_function.<locals>.inner_mask":
            return self.keys(given["padding_mask"])
        if name == _PACKED:
            return self._sequences(given["packed_sequence_mask"])
        if name == _REMAPPED and packed:
            return self.read(given["mask_function"], packed)
        raise _Unknown(name)

    def keys(self, kept):
        """The keys that a padding mask (batch, all keys) keeps, for all queries."""
        kept = host_array("a padding mask", kept).astype(bool)
        kept = kept[:, self.kv_offset : self.kv_offset + self.nk]
        kept = np.pad(kept, ((0, 0), (0, self.nk - kept.shape[1])))
        return self._per_batch(self._kept, kept)

    def _kept(self, row):
        places = np.flatnonzero(row)
        first, last = (places[0], places[-1] + 1) if places.size else (0, 0)
        if last - first == places.size:
            return self.rows(first, last)
        return masks.from_function(lambda q, kv: row[kv] & (q >= 0), self.nq, self.nk)

    def _sequences(self, ids):
        """Queries and keys of one sequence; ``ids`` (batch, tokens) rise."""
        return self._per_batch(
            lambda row: masks.documents(np.unique(row, return_counts=True)[1]),
            host_array("packed sequences", ids),
        )

    def _per_batch(self, make, rows):
        if (rows == rows[0]).all():
            return make(rows[0])
        return masks.per_batch([make(row) for row in rows])

    def evaluate(self, fn, use_vmap, device):
        """Any function, as transformers itself evaluates it."""
        dense = theirs.sdpa_mask(
            batch_size=self.batch,
            q_length=self.nq,
            kv_length=self.nk,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=fn,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return from_tensor(dense)


_AND = "and_masks.<locals>.and_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


def from_tensor(dense):
    """The mask of a boolean tensor (batch or 1, heads or 1, queries, keys)."""
    array = host_array("a mask", dense)
    if (array == array[:1]).all():
        array = array[:1]
    return masks.from_dense(array)


def _joined(join, parts):
    mask = parts[0]
    for part in parts[1:]:
        mask = join(mask, part)
    return mask


def _name(fn):
    return getattr(fn, "__qualname__", "")


def _variables(fn):
    """What a function of transformers closes over."""
    if getattr(fn, "__module__", "") != theirs.__name__:
        raise _Unknown(_name(fn))
    return inspect.getclosurevars(fn).nonlocals


def _integer(offset):
    """An offset, which a static cache has in a tensor of one element."""
    if isinstance(offset, torch.Tensor):
        offset = host_array("an offset", offset).item()
    return operator.index(offset)


def host_array(name, x):
    """A tensor as an array in host memory; RuntimeError while a CUDA graph is recorded."""
    return host_copy(name, x, _REMEDY).numpy()
