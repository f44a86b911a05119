"""What a call says besides its tensors, behind an integer: schemas take no Python objects.

`handle_of` gives equal calls the same handle. torch.compile sees a constant: it runs the function
when it compiles, and looks again whether the objects are the same.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch

from nbflash.inputs.block_map import BlockMap, as_mask
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.problem import check_flag, check_mask_type, check_scale, check_window
from nbflash.planning.cache import Cache
from nbflash.planning.dispatch import check_impl
from nbflash.torch import memory, scores
from nbflash.torch.constants import addressed, constant, object_of
from nbflash.torch.late_masks import LateMask, Maker

_numbers = itertools.count(1)
_specs = weakref.WeakValueDictionary()
_recent = Cache(clearable=True)
_compiled = set()


class Given(NamedTuple):
    """Arguments of a call, in the order in which `nbflash.planning.plan.lookup` takes them."""

    mask: object
    causal: bool
    window: tuple | None
    scale: float | None
    impl: str


class Spec:
    """The arguments of a call that are no tensors; alive as long as a call may need it.

    Attributes
    ----------
    given : Given
    stages : tuple of nbflash.torch.scores.Stage, or None
    dropout : float
    deterministic : bool
    has_gradient : list of bool
        Of the tensors of the score.
    learned : list of bool
        Of the score's arrays with a gradient, whether they are tensors.
    late : Maker or None
        What makes the mask of the last ``late.count`` tensors, behind those of the score.
    """

    def __init__(self, given, stages, dropout, deterministic):
        self.given, self.stages, self.dropout = given, stages, dropout
        self.deterministic, self.handle, self._made = deterministic, next(_numbers), {}
        self.has_gradient = [has for stage in stages or () for has in stage.arrays]
        self.learned = [learned for stage in stages or () for learned in stage.learned]
        if stages is not None and not self.has_gradient:
            self._made[None] = scores.build(stages, ()), ()
        self.late = given.mask if isinstance(given.mask, Maker) else None
        if self.late is not None:
            self.has_gradient += [False] * self.late.count

    def mask_and_arrays(self, nq, nk, tensors):
        """The mask of a call, and those of its tensors that belong to the score."""
        if self.late is None:
            return self.given.mask, tensors
        first = len(tensors) - self.late.count
        return self.late.mask(nq, nk, *tensors[first:]), tensors[:first]

    def score(self, tensors, dtype):
        """The `nbflash.scores.Score` of a call whose score has these tensors.

        In host memory it is a new one, of copies. In CUDA memory the kernels read a copy that
        later calls on the same stream overwrite, so that there is one score, and one plan.
        """
        if self.stages is None:
            return None
        if not tensors:
            return self._made[None][0]
        if not tensors[0].is_cuda:
            return scores.build(self.stages, [memory.native_of(x) for x in tensors])
        stream = torch.cuda.current_stream(tensors[0].device).cuda_stream
        key = stream, dtype, *((x.shape, x.dtype, x.device) for x in tensors)
        if key not in self._made:
            copies = [_room_for(x, dtype) for x in tensors]
            made = scores.build(self.stages, [memory.native_of(x) for x in copies])
            self._made[key] = made, copies
        made, copies = self._made[key]
        for copy, x in zip(copies, tensors, strict=True):
            copy.copy_(x)
        return made


def _room_for(x, dtype):
    """Where the kernels for q, k, v of ``dtype`` read an array."""
    kept = x.dtype if not x.is_floating_point() else memory.wide(dtype)
    return torch.empty(x.shape, dtype=kept, device=x.device)


def mask_now(mask, heads):
    """``mask``, or what a `BlockMap` holds now."""
    return _held_now(mask, heads) if isinstance(mask, BlockMap) else mask


@torch.compiler.disable(reason="what a BlockMap holds may change: make a mask of it outside")
def _held_now(block_map, heads):
    return as_mask(block_map, heads)


def handle_of(mask, causal, window, scale, stages, dropout, deterministic, impl):
    """The handle of a call."""
    if torch.compiler.is_compiling():
        if isinstance(window, (list, tuple)):
            window = tuple(constant(x) for x in window)
        causal, scale, dropout = constant(causal), constant(scale), constant(dropout)
        make, given = (mask.make, mask.given) if isinstance(mask, LateMask) else (None, (mask,))
        rest, count = (causal, window, scale, dropout, deterministic, impl), len(given)
        given = *given, *scores.flattened(stages)
        return _handle_in_graph(*rest, make, count, *map(addressed, given))
    return _spec(mask, causal, window, scale, stages, dropout, deterministic, impl).handle


def _spec(mask, causal, window, scale, stages, dropout, deterministic, impl):
    window = None if window is None else check_window(window)
    types = type(causal), type(scale), type(dropout)  # 1 == True, but only one of them is right
    key = mask, causal, window, scale, stages, dropout, deterministic, impl, types
    spec = _recent.get(key)
    if spec is None:
        _check(mask, causal, scale, dropout, impl)
        given = Given(mask, causal, window, scale, impl)
        spec = Spec(given, stages, dropout, deterministic)
        _specs[spec.handle] = spec
        _recent.put(key, spec)
    return spec


def _check(mask, causal, scale, dropout, impl):
    """Raise for constants of the wrong kind, before they are hashed or kept."""
    if not (mask is None or isinstance(mask, Maker)):
        check_mask_type(mask)
    check_flag("causal", causal)
    check_scale(scale, "float64", 1)
    check_dropout(dropout)
    check_impl(impl)


@torch.compiler.assume_constant_result
def _handle_in_graph(causal, window, scale, dropout, deterministic, impl, make, count, *given):
    """Of a mask, or of what makes it, and of stages, each object an argument of its own."""
    given = tuple(object_of(x) for x in given)
    given, stages = given[:count], scores.unflattened(given[count:])
    mask = make(*given) if make is not None else given[0]
    spec = _spec(mask, causal, window, scale, stages, dropout, deterministic, impl)
    _compiled.add(spec)  # a graph knows the number alone
    return spec.handle


def spec_of(handle: int) -> Spec:
    """What a handle stands for."""
    return _specs[handle]
