"""Attention to autograd: in eager mode around torch's dispatcher, elsewhere by the operators.

The dispatcher takes longer than a launch, and only its listeners need it: compilers, transforms of
functions, modes, and subclasses of tensors.
"""

from __future__ import annotations

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext

from nbflash.inputs.tensors import is_plain
from nbflash.torch import operators
from nbflash.torch.handles import spec_of
from nbflash.torch.operators import ops

_NO_VMAP = (
    "nbflash: torch.vmap has no rule for attention; fold the mapped axis into the batch axis of "
    "q, k and v"
)
_NO_SECOND = "nbflash: attention has no second derivatives"
_NO_FORWARD = "nbflash: attention has no derivatives in forward mode (jvp, jacfwd, hessian)"


def is_eager(tensors) -> bool:
    """Whether nobody listens to operators of these tensors, each of which may be None."""
    c = torch._C
    if has_torch_function(tensors) and not _only_default_devices():  # of a mode, too
        return False
    if c._len_torch_dispatch_stack():
        return False
    if c._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if c._get_tracing_state() is not None:
        return False
    for x in tensors:  # noqa: SIM110 - all() and a generator cost a microsecond
        if not (x is None or (is_plain(x) and (x.is_cuda or x.is_cpu))):
            return False
    return True


def _only_default_devices():
    """Whether the modes of functions are those of `torch.set_default_device`, if there are any."""
    modes = range(torch._C._len_torch_function_stack())
    return all(type(torch._C._get_function_stack_at(i)) is DeviceContext for i in modes)


def attention(q, k, v, arrays, seed, handle, with_lse=True, is_late=False):
    """``(out, lse)``, differentiable; without ``with_lse`` the second may hold nothing.

    ``is_late``: the mask is made when the operator runs, see `nbflash.torch.late_masks`.
    """
    run = operators.attention if with_lse else operators.attention_alone
    operator = ops.late_attention if is_late else ops.attention
    given = (q, k, v), arrays, seed, handle
    return _call(operator.default, run, operators.attention, Attention, *given)


def _call(operator, run, run_to_learn, function, tensors, arrays, seed, handle):
    """``run`` what an operator runs, or the operator."""
    if torch.compiler.is_compiling():
        return operator(*tensors, arrays, seed, handle)
    needed = (*tensors, *arrays) if arrays else tensors
    if is_eager(needed):
        if torch.is_grad_enabled():
            for x in needed:
                if x is not None and x.requires_grad:
                    return function.apply(run_to_learn, *tensors, seed, handle, *arrays)
        return run(*tensors, arrays, seed, handle)
    if torch._C._are_functorch_transforms_active():
        run = _below_autograd(operator)
        return function.transformed.apply(run, *tensors, seed, handle, *arrays)
    return operator(*tensors, arrays, seed, handle)


def _below_autograd(operator):
    """What runs an operator whose autograd is dealt with."""

    def run(*given):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*given)

    return run


def _no_vmap(info, in_dims, *arguments):
    raise NotImplementedError(_NO_VMAP)


class Attention(Function):
    """``Attention.apply(run, q, k, v, seed, handle, *arrays)``: ``run`` computes the results."""

    @staticmethod
    def forward(ctx, run, q, k, v, seed, handle, *arrays):
        results = run(q, k, v, arrays, seed, handle)
        _keep(ctx, (run, q, k, v, seed, handle, *arrays), results)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, seed, *arrays = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (6 + len(arrays))
        dout = torch.zeros_like(out) if dout is None else dout
        given = (dout, q, k, v, out, lse, dlse), arrays, seed, ctx.handle
        late = ctx.spec.late is not None
        needed, gradients, of_arrays = ctx.needs_input_grad, (None,) * 3, [None] * len(arrays)
        if any(needed[1:4]):
            operator = ops.late_attention_backward if late else ops.attention_backward
            run = operators.attention_backward
            gradients = _call(operator.default, run, run, _Backward, *given)
        if any(needed[6:]):
            operator = ops.late_score_backward if late else ops.score_backward
            run = operators.score_backward
            made = iter(_call(operator.default, run, run, _Backward, *given))
            of_arrays = [next(made) if has else None for has in ctx.spec.has_gradient]
        return None, *gradients, None, None, *of_arrays

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD)


def _keep(ctx, inputs, output):
    """What the backward pass needs."""
    _, q, k, v, seed, handle, *arrays = inputs
    ctx.save_for_backward(q, k, v, *output, seed, *arrays)
    ctx.handle, ctx.spec = handle, spec_of(handle)  # alive until the backward pass
    ctx.set_materialize_grads(False)


class _Backward(Function):
    """A backward pass: ``apply(run, dout, q, k, v, out, lse, dlse, seed, handle, *arrays)``."""

    @staticmethod
    def forward(ctx, run, *given):
        return _gradients(run, *given)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(_NO_SECOND)


def _gradients(run, dout, q, k, v, out, lse, dlse, seed, handle, *arrays):
    return tuple(run(dout, q, k, v, out, lse, dlse, arrays, seed, handle))


# Transforms of functions need setup_context, for which torch binds the arguments of every call by
# inspect.signature.
class _TransformedAttention(Attention):
    @staticmethod
    def forward(run, q, k, v, seed, handle, *arrays):
        return run(q, k, v, arrays, seed, handle)

    setup_context, vmap = staticmethod(_keep), staticmethod(_no_vmap)


class _TransformedBackward(_Backward):
    forward, vmap = staticmethod(_gradients), staticmethod(_no_vmap)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


Attention.transformed, _Backward.transformed = _TransformedAttention, _TransformedBackward


def _of_operator(name, function):
    """Give an operator its autograd and its rule of vmap."""
    run = _below_autograd(getattr(ops, name).default)

    def autograd(*given):
        *tensors, arrays, seed, handle = given
        given = run, *tensors, seed, handle, *arrays
        if torch._C._are_functorch_transforms_active():
            # A transform in a graph has handed the call to here; Function.apply would hand it back.
            with enable_single_level_autograd_function():
                return super(Function, function).apply(*given)
        return function.apply(*given)

    operators.library.impl(name, autograd, "Autograd")
    torch.library.register_vmap(f"nbflash::{name}", _no_vmap)


for _prefix in ("", "late_"):
    _of_operator(_prefix + "attention", Attention)
    _of_operator(_prefix + "attention_backward", _Backward)
    _of_operator(_prefix + "score_backward", _Backward)
