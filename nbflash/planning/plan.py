"""AttentionPlan, and how calls find theirs.

A warm call costs one key, one dictionary lookup and the allocation of its results: whatever the key
fixes was checked when the plan was made and is not checked again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from nbflash.backends.registry import prepare, prepare_score_backward
from nbflash.cuda import graphs
from nbflash.definitions.types import Array, ArrayT, KeysT, Seed
from nbflash.inputs.arrays import (
    CUDA,
    allocator,
    as_given,
    in_rows,
    meet,
    reach,
    signature,
    unpooled,
    zeros,
)
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_layout import check_block_map
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.dropout import check_dropout, check_seed
from nbflash.inputs.given import backward_inputs, forward_inputs
from nbflash.inputs.problem import (
    Problem,
    check_backward,
    check_disjoint,
    check_flag,
    check_forward,
    check_mask,
    check_out,
    check_window,
)
from nbflash.planning import cache, dispatch
from nbflash.planning.cache import Cache
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.scores import check_score

_SCRATCH = 1 << 17  # elements


class AttentionPlan:
    """One attention problem with its mask, ready to run any number of times, from any thread.

    Made by `plan`, or with an executor of one's own. Arrays must have the shapes, dtype and device
    it was made for; another memory layout is planned again, and cached.

    Attributes
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
        What it computes, the four attributes below.
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask, or nbflash.inputs.block_layout.BlockLayout
        With ``causal`` and ``window`` joined in.
    impl : str
        The implementation that runs.
    score : nbflash.scores.Score or None
    dropout : float
        Where it is not 0, every call takes ``seed``, as `attention` does.
    """

    def __init__(self, spec: AttentionSpec, impl: str, executor: Any = None) -> None:
        self.spec, self.impl, self.problem, self.mask = spec, impl, spec.problem, spec.mask
        self.score, self.dropout, problem = spec.score, spec.dropout, spec.problem
        where = problem.device, problem.device_id
        self._empty, self._device = allocator(*where, problem.of_torch)
        with self._device:
            self._executor = executor or prepare(impl, spec)
        self._given, self._base, self._lists = executor, None, ()
        on_gpu = problem.device == CUDA
        self._may_compile = on_gpu and not (problem.empty or executor)  # until that is known
        # A context of launches: a CUDA graph that records them keeps their memory and this plan.
        self._recorded = contextlib.nullcontext
        if on_gpu:
            by_torch = partial(graphs.recorded_by_torch, problem.device_id)
            self._recorded = by_torch if problem.of_torch else graphs.recorded
        self._checked = Cache()
        self._scratch = None
        if math.prod(problem.lse_shape) <= _SCRATCH:
            of_lse = problem.lse_shape, problem.lse_dtype
            self._scratch = unpooled(*where, *of_lse)

    def reading(self, lists):
        """This plan for a `BlockMap` of its layout, whose (indices, counts) every call reads."""
        plan_ = object.__new__(AttentionPlan)
        plan_.__dict__.update(self.__dict__, _base=self._base or self, _lists=lists)
        return plan_

    @property
    def schedule(self) -> TileSchedule | None:
        """The `TileSchedule` of the forward pass; None where no tiles are walked."""
        return self._executor.schedule

    @property
    def two_passes(self) -> bool | None:
        """Whether `backward` computes dQ in a pass of its own though nobody asks for
        ``deterministic``; None but for `sm90`, which chooses.
        """
        return self._executor.two_passes

    def __call__(
        self, q: ArrayT, k: Array, v: Array, out: Array | None = None, *, seed: Seed = None
    ) -> tuple[ArrayT, Array]:
        """``(out, lse)`` of `attention`."""
        given = q
        q, k, v, target = forward_inputs(q, k, v, out, self._lists)
        result, lse = self._matching(q, k, v).run_forward(q, k, v, target, seed)
        return as_given(given, (result if out is None else out, lse))

    def backward(
        self,
        dout: Array,
        q: ArrayT,
        k: KeysT,
        v: Array,
        out: Array,
        lse: Array,
        *,
        dlse: Array | None = None,
        seed: Seed = None,
        deterministic: bool = False,
    ) -> tuple[ArrayT, KeysT, KeysT]:
        """``(dq, dk, dv)`` of `attention_backward`."""
        deterministic, given = check_flag("deterministic", deterministic), q
        q, k, v, dout, out, lse, dlse = backward_inputs(q, k, v, dout, out, lse, dlse, self._lists)
        plan_ = self._matching(q, k, v)
        gradients = plan_.run_backward(dout, q, k, v, out, lse, dlse, seed, deterministic)
        return as_given(given, gradients)

    def score_backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        *,
        dlse: Array | None = None,
        seed: Seed = None,
    ) -> tuple[Array, ...]:
        """The gradients of the score's arrays, as `nbflash.score_backward` returns them."""
        given = q
        q, k, v, dout, out, lse, dlse = backward_inputs(q, k, v, dout, out, lse, dlse, self._lists)
        plan_ = self._matching(q, k, v)
        return as_given(given, plan_.run_score_backward(dout, q, k, v, out, lse, dlse, seed))

    def vjp(
        self,
        q: ArrayT,
        k: Array,
        v: Array,
        *,
        seed: Seed = None,
        return_lse: bool = False,
        with_score: bool = False,
    ) -> tuple[Array, Callable[..., tuple[Array, ...]]]:
        """The result, and the function that takes its gradient to those of q, k and v.

        Parameters
        ----------
        q, k, v, seed
            As in `attention`. Arrays must not change before the pullback is called, which keeps
            them, ``out`` and ``lse`` alive.
        return_lse : bool
            ``(out, lse)`` is the result, instead of ``out``.
        with_score : bool
            The pullback returns a fourth gradient, the tuple of `score_backward`, to which
            ``deterministic`` does not apply.

        Returns
        -------
        result : array like q, or (array like q, array (batch, heads, seqlen_q))
        pullback : callable
            ``pullback(dout, dlse=None, *, deterministic=False) -> (dq, dk, dv)``, as in
            `attention_backward`.
        """
        return_lse = check_flag("return_lse", return_lse)
        with_score = check_flag("with_score", with_score)
        out, lse = self(q, k, v, seed=seed)

        def pullback(dout, dlse=None, *, deterministic=False):
            given, state = (dout, q, k, v, out, lse), {"dlse": dlse, "seed": seed}
            gradients = self.backward(*given, **state, deterministic=deterministic)
            return (*gradients, self.score_backward(*given, **state)) if with_score else gradients

        return ((out, lse) if return_lse else out), pullback

    def __repr__(self) -> str:
        return f"AttentionPlan({self.impl}: {self.problem}, {self.schedule or self.mask})"

    def __reduce__(self):
        """The spec: who unpickles it plans again, or has planned."""
        if self._lists:
            raise TypeError("a plan of a BlockMap on the device is not pickled: its arrays change")
        spec = replace(self.spec, problem=replace(self.problem, of_torch=False))
        if self._given is None:
            return plan_of, (spec, self.impl)
        return AttentionPlan, (spec, self.impl, self._given)

    def _matching(self, q, k, v) -> AttentionPlan:
        """The plan for these arrays: this one, or its sibling for another memory layout."""
        call = ("layout", signature(q), signature(k), signature(v))
        problem = self._checked.get(call)
        if problem is None:
            problem = check_forward(q, k, v, self.problem.scale)
            if _without_layout(problem) != _without_layout(self.problem):
                raise ValueError(f"the plan is for ({self.problem}), got ({problem})")
            if problem == self.problem:
                problem = self.problem
            self._checked.put(call, problem)
        if problem is self.problem:
            return self
        found = plan_of(replace(self.spec, problem=problem), self.impl)
        return found.reading(self._lists) if self._lists else found

    def _state(self, seed):
        """What an executor takes besides its arrays: the seed where there is dropout, the lists of
        a block map.
        """
        if self.dropout or seed is not None:
            seed = check_seed(seed, self.problem)
        if self._lists:
            return (seed if self.dropout else None), self._lists
        return (seed,) if self.dropout else ()

    def run_forward(self, q, k, v, out, seed=None, *, with_lse=True):
        """Allocate and launch for native arrays of this plan's signature.

        Without ``with_lse`` a small lse goes to a scratch array that nobody reads: an
        allocation is a fifth of the host time of a call.
        """
        problem = self.problem
        with self._device:
            if out is None:
                out = self._empty(problem.q_shape, q.dtype)
            else:
                self._check_out(out, q, k, v)
            if self._may_compile and with_lse:
                self._foresee_backward()
            lse = None if with_lse else self._scratch
            if lse is None:
                with self._recorded(self._base or self):
                    lse = self._empty(problem.lse_shape, problem.lse_dtype)
            self.write_forward(q, k, v, out, lse, seed)
        return out, lse

    def _foresee_backward(self):
        """Whoever wants an lse may want gradients: if kernels are compiled, then side by side."""
        (self._base or self)._may_compile = self._may_compile = False
        if self._executor.bind_forward().is_cold():
            with contextlib.suppress(ValueError):  # that of whoever asks for gradients
                self._executor.bind_backward()

    def write_forward(self, q, k, v, out, lse, seed=None):
        """Launch into new arrays of the caller's, on the device that is current."""
        with self._recorded(self._base or self):
            self._executor.forward(q, k, v, out, lse, *self._state(seed))

    @cached_property
    def _no_dlse(self):
        """What stands for an absent dlse, so that the implementations know of one case only."""
        problem = self.problem
        return zeros(problem.device, problem.device_id, problem.lse_shape, problem.lse_dtype)

    def _check_results(self, dout, q, out, lse, dlse):
        """What `attention` returned and the gradients of it; zeros for a dlse of None."""
        last = None if dlse is None else signature(dlse)
        call = ("backward", signature(dout), signature(out), signature(lse), last)
        if self._checked.get(call) is None:
            check_backward(dout, out, lse, dlse, self.problem, q)
            if self.score is not None:
                self.score.check_gradient()
            self._checked.put(call, True)
        return (self._base or self)._no_dlse if dlse is None else dlse

    def run_backward(self, dout, q, k, v, out, lse, dlse, seed, deterministic):
        """Check the arrays of the results, allocate the gradients and launch."""
        problem = self.problem
        with self._device:
            dq = self._empty(problem.q_shape, q.dtype)
            dk = self._empty(problem.kv_shape, q.dtype)
            dv = self._empty(problem.kv_shape, q.dtype)
            gradients = dq, dk, dv
            self.write_backward(dout, q, k, v, out, lse, dlse, *gradients, seed, deterministic)
        return gradients

    def write_backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, seed, deterministic):
        """Check the arrays of the results and launch into new ones, as `write_forward`."""
        with self._recorded(self._base or self):
            dout = in_rows(dout)
            dlse = self._check_results(dout, q, out, lse, dlse)
            results, gradients = (dout, q, k, v, out, lse, dlse), (dq, dk, dv)
            self._executor.backward(*results, *gradients, deterministic, *self._state(seed))

    @cached_property
    def _score_backward(self):
        """What computes the gradients of the score's arrays, made when they are asked for."""
        if self.score is None:
            raise ValueError("score must have an array with a gradient, got None")
        self.score.check_parts(self.problem)
        return prepare_score_backward(self.impl, self.spec)

    @cached_property
    def score_shapes(self):
        """Of the score's arrays that have gradients, in the order of its functions."""
        self._score_backward  # noqa: B018 - which refuses what has none
        return [part.given or part.shape for parts in self.score.parts for part in parts]

    def run_score_backward(self, dout, q, k, v, out, lse, dlse, seed):
        """Check the arrays of the results, allocate the score's gradients and launch."""
        with self._device:
            shapes = (self._base or self).score_shapes
            sums = tuple(self._empty(shape, self.problem.lse_dtype) for shape in shapes)
            self.write_score_backward(dout, q, k, v, out, lse, dlse, sums, seed)
        return sums

    def write_score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed):
        """Check the arrays of the results and launch into new ones, as `write_forward`."""
        parts = (part for parts in self.score.parts for part in parts)
        sums = tuple(x.reshape(part.shape) for x, part in zip(sums, parts, strict=True))
        with self._recorded(self._base or self):
            dout = in_rows(dout)
            dlse = self._check_results(dout, q, out, lse, dlse)
            run = (self._base or self)._score_backward
            run(dout, q, k, v, out, lse, dlse, sums, *self._state(seed))

    def _check_out(self, out, q, k, v):
        """Only the addresses and the write flag of ``out`` change between calls of one layout."""
        call = ("out", signature(out), getattr(out.flags, "writeable", True))
        reaches = self._checked.get(call)
        if reaches is None:
            check_out(out, self.problem, q, k, v)
            self._checked.put(call, tuple(map(reach, (out, q, k, v))))
        elif meet(reaches, (out, q, k, v)):  # in an array's gaps it may be
            check_disjoint(out, q, k, v)


def lookup(q, k, v, mask, causal, window, scale, impl, score=None, dropout=0.0) -> AttentionPlan:
    """The cached plan of a call, made when the call is new."""
    window = None if window is None else check_window(window)
    given, lists, check = mask, (), check_mask
    if isinstance(mask, BlockMap):
        if dispatch.plans_on_device(impl, q, mask):
            lists, check = (mask.indices, mask.counts), check_block_map
            mask = mask.layout
        else:
            mask = given = mask.to_mask(q.shape[2] if q.ndim == 4 else None)
    # 1 == True and 0.5 == Fraction(1, 2): the types keep what a check refuses out of the cache.
    types = (type(causal), type(scale), type(dropout))
    signatures = signature(q), signature(k), signature(v)
    call = (*signatures, mask, causal, window, scale, types, impl, score, dropout)
    # An argument that cannot be hashed is not valid: the checks name it.
    found = cache.plans.get(call)
    if found is None:
        dispatch.check_impl(impl)
        problem = check_forward(q, k, v, scale)
        check_score(score, problem)
        dropout, whole = check_dropout(dropout), check(given, problem, causal, window)
        found = plan_of(AttentionSpec(problem, whole, score, dropout), impl)
        cache.plans.put(call, found)
    return found.reading(lists) if lists else found


def plan_of(spec: AttentionSpec, impl: str) -> AttentionPlan:
    """The cached plan of a spec, made when it is new."""
    impl = dispatch.choose(impl, spec)
    found = cache.plans.get((spec, impl))
    if found is None:
        found = AttentionPlan(spec, impl)
        cache.plans.put((spec, impl), found)
    return found


def _without_layout(problem: Problem) -> tuple:
    shapes = (problem.q_shape, problem.kv_shape)
    return shapes, problem.dtype, problem.scale, problem.device, problem.device_id
