"""The custom operators ``nbflash::attention``, its two backward passes, and ``nbflash::decode``.

They take q, k and v as (batch, seqlen, heads, head_dim), and what else there is by a handle. The
kernels write into tensors of torch's allocator. Autograd is an `autograd.Function` behind the
dispatcher: that of `torch.library.register_autograd` costs twice the host time.
"""

from __future__ import annotations

import torch

from nbflash.planning.plan import lookup
from nbflash.torch.handles import spec_of
from nbflash.torch.memory import array_of, on_device_of, wide, with_rows

_NO_VMAP = (
    "nbflash: torch.vmap has no rule for attention; fold the mapped axis into the batch axis of "
    "q, k and v"
)
_NO_SECOND = "nbflash: attention has no second derivatives"

ops = torch.ops.nbflash
_library = torch.library.Library("nbflash", "DEF")
_BACKWARD = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
    " Tensor[] arrays, Tensor? seed, int handle"
)


def define(schema):
    """Define an operator; what is decorated runs it on the CPU and on CUDA devices."""

    def register(fn):
        _library.define(schema)
        for key in ("CPU", "CUDA"):
            _library.impl(schema.partition("(")[0], fn, key)
        return fn

    return register


def _plan(spec, q, k, v, tensors):
    """The plan of a call, with q, k and v as native arrays."""
    arrays = [array_of(x) for x in (q, k, v)]
    score = spec.score(tensors, q.dtype)
    return lookup(*arrays, *spec.given, score, spec.dropout), arrays


def _seed(seed):
    """Tensors hold numbers of 64 bits as int64."""
    return None if seed is None else array_of(seed).view("uint64")


def new_results(q):
    """New tensors for ``out`` and ``lse``."""
    batch, nq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, nq), dtype=wide(q.dtype))


@define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] arrays, Tensor? seed, int handle)"
    " -> (Tensor out, Tensor lse)"
)
def _attention(q, k, v, arrays, seed, handle):
    spec = spec_of(handle)
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    with on_device_of(q):
        plan, native = _plan(spec, q, k, v, arrays)
        out, lse = new_results(q)
        plan.write_forward(*native, array_of(out), array_of(lse), _seed(seed))
    return out, lse


@define(f"attention_backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv)")
def _attention_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    spec = spec_of(handle)
    q, k, v, dout = with_rows(q), with_rows(k), with_rows(v), with_rows(dout)
    with on_device_of(q):
        plan, native = _plan(spec, q, k, v, arrays)
        gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        targets = [array_of(x) for x in gradients]
        results = _results(dout, native, out, lse, dlse)
        plan.write_backward(*results, *targets, _seed(seed), spec.deterministic)
    return tuple(gradients)


@define(f"score_backward({_BACKWARD}) -> Tensor[]")
def _score_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    spec = spec_of(handle)
    q, k, v, dout = with_rows(q), with_rows(k), with_rows(v), with_rows(dout)
    with on_device_of(q):
        plan, native = _plan(spec, q, k, v, arrays)
        sums = [lse.new_empty(shape) for shape in plan.score_shapes]
        results = _results(dout, native, out, lse, dlse)
        plan.write_score_backward(*results, tuple(array_of(x) for x in sums), _seed(seed))
    sums = [x for x, learned in zip(sums, spec.learned, strict=True) if learned]
    targets = [x for x, has in zip(arrays, spec.has_gradient, strict=True) if has]
    return [x.reshape(to.shape).to(to.dtype) for x, to in zip(sums, targets, strict=True)]


def _results(dout, native, out, lse, dlse):
    """As a plan takes them."""
    dlse = None if dlse is None else array_of(dlse)
    return array_of(dout), *native, array_of(out), array_of(lse), dlse


def _no_vmap(info, in_dims, *arguments):
    raise NotImplementedError(_NO_VMAP)


class Attention(torch.autograd.Function):
    """``Attention.apply(q, k, v, seed, handle, *arrays)``."""

    @staticmethod
    def forward(q, k, v, seed, handle, *arrays):
        with torch._C._AutoDispatchBelowAutograd():
            return ops.attention.default(q, k, v, arrays, seed, handle)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, seed, handle, *arrays = inputs
        ctx.save_for_backward(q, k, v, *output, seed, *arrays)
        ctx.handle, ctx.spec = handle, spec_of(handle)  # alive until the backward pass
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, seed, *arrays = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (5 + len(arrays))
        dout = torch.zeros_like(out) if dout is None else dout
        given = (dout, q, k, v, out, lse, dlse), arrays, seed, ctx.handle
        gradients, of_arrays = (None, None, None), [None] * len(arrays)
        if any(ctx.needs_input_grad[:3]):
            gradients = call(ops.attention_backward.default, AttentionBackward, *given)
        if any(ctx.needs_input_grad[5:]):
            made = iter(call(ops.score_backward.default, ScoreBackward, *given))
            of_arrays = [next(made) if has else None for has in ctx.spec.has_gradient]
        return *gradients, None, None, *of_arrays

    vmap = staticmethod(_no_vmap)


class _Backward(torch.autograd.Function):
    """A backward pass: ``apply(dout, q, k, v, out, lse, dlse, seed, handle, *arrays)``."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(_NO_SECOND)

    vmap = staticmethod(_no_vmap)


class AttentionBackward(_Backward):
    @staticmethod
    def forward(dout, q, k, v, out, lse, dlse, seed, handle, *arrays):
        given = dout, q, k, v, out, lse, dlse, arrays, seed, handle
        with torch._C._AutoDispatchBelowAutograd():
            return ops.attention_backward.default(*given)


class ScoreBackward(_Backward):
    @staticmethod
    def forward(dout, q, k, v, out, lse, dlse, seed, handle, *arrays):
        given = dout, q, k, v, out, lse, dlse, arrays, seed, handle
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(ops.score_backward.default(*given))


def _attention_autograd(q, k, v, arrays, seed, handle):
    return Attention.apply(q, k, v, seed, handle, *arrays)


def _attention_backward_autograd(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    return AttentionBackward.apply(dout, q, k, v, out, lse, dlse, seed, handle, *arrays)


def _score_backward_autograd(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    return list(ScoreBackward.apply(dout, q, k, v, out, lse, dlse, seed, handle, *arrays))


def call(operator, function, tensors, arrays, seed, handle):
    """An operator; or, within transforms of torch.func, the function that it is to autograd."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return function.apply(*tensors, seed, handle, *arrays)
    return operator(*tensors, arrays, seed, handle)


def attention(q, k, v, arrays, seed, handle):
    """``(out, lse)`` of the operator, differentiable."""
    operator = ops.attention.default
    return call(operator, Attention, (q, k, v), arrays, seed, handle)


_library.impl("attention", _attention_autograd, "Autograd")
_library.impl("attention_backward", _attention_backward_autograd, "Autograd")
_library.impl("score_backward", _score_backward_autograd, "Autograd")


@torch.library.register_fake("nbflash::attention", lib=_library)
def _fake_attention(q, k, v, arrays, seed, handle):
    return new_results(q)


@torch.library.register_fake("nbflash::attention_backward", lib=_library)
def _fake_attention_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


@torch.library.register_fake("nbflash::score_backward", lib=_library)
def _fake_score_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    has_gradient = spec_of(handle).has_gradient
    return [x.new_empty(x.shape) for x, has in zip(arrays, has_gradient, strict=True) if has]


for _name in ("attention", "attention_backward", "score_backward"):
    torch.library.register_vmap(f"nbflash::{_name}", _no_vmap, lib=_library)
