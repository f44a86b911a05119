"""The custom operators ``nbflash::attention``, its two backward passes, and ``nbflash::decode``.

They take q, k and v as (batch, seqlen, heads, head_dim), and what else there is by a handle.
``nbflash::late_attention`` and its passes are the same under masks that are made when they run.
Compiled graphs and torch's transforms have the operators; in eager mode `nbflash.torch.autograd`
calls the functions here that they run.
"""

from __future__ import annotations

import torch

from nbflash.inputs.arrays import as_tensor
from nbflash.inputs.tensors import CudaTensor
from nbflash.planning.plan import lookup
from nbflash.torch.handles import spec_of
from nbflash.torch.memory import native_of, wide, with_rows

ops = torch.ops.nbflash
library = torch.library.Library("nbflash", "DEF")
_BACKWARD = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
    " Tensor[] arrays, Tensor? seed, int handle"
)
# CUDA graphs leave out what plans in every call.
_LATE_TAGS = [getattr(torch.Tag, x) for x in ("cudagraph_unsafe",) if hasattr(torch.Tag, x)]


def define(schema, *, late=False):
    """Define an operator; what is decorated runs it on the CPU and on CUDA devices.

    ``late``: also a second one, ``late_`` before its name.
    """

    def register(fn):
        for prefix, tags in (("", ()), ("late_", _LATE_TAGS))[: 1 + late]:
            library.define(prefix + schema, tags=tags)
            for key in ("CPU", "CUDA"):
                library.impl(prefix + schema.partition("(")[0], fn, key)
        return fn

    return register


def _fake(name):
    """What is decorated gives the shapes of an operator's results, and of its late twin's."""

    def register(fn):
        for prefix in ("", "late_"):
            torch.library.register_fake(f"nbflash::{prefix}{name}", fn)
        return fn

    return register


def _plan(spec, q, k, v, tensors):
    """The plan of a call, with q, k and v as native arrays."""
    native = [native_of(with_rows(x)) for x in (q, k, v)]
    mask, tensors = spec.mask_and_arrays(q.shape[1], k.shape[1], tensors)
    score = spec.score(tensors, q.dtype) if spec.stages else None
    _, causal, window, scale, impl = spec.given
    return lookup(*native, mask, causal, window, scale, impl, score, spec.dropout), native


def _seed(seed):
    """Tensors hold numbers of 64 bits as int64, which only host memory tells from negative ones."""
    if seed is None:
        return None
    seed = native_of(seed)
    return seed if isinstance(seed, CudaTensor) or seed.dtype != "int64" else seed.view("uint64")


def new_results(q):
    """New tensors for ``out`` and ``lse``."""
    batch, nq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, nq), dtype=wide(q.dtype))


@define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] arrays, Tensor? seed, int handle)"
    " -> (Tensor out, Tensor lse)",
    late=True,
)
def attention(q, k, v, arrays, seed, handle):
    """``(out, lse)`` of `nbflash.attention`."""
    spec = spec_of(handle)
    if spec.late is not None and spec.late.decodes:
        mask, own = spec.mask_and_arrays(q.shape[1], k.shape[1], arrays)
        found = spec.late.instead(q, k, v, mask, spec.given.scale, spec.score(own, q.dtype))
        if found is not None:
            return found
    out, lse = _forward(q, k, v, arrays, seed, handle, with_lse=True)
    return as_tensor(out), as_tensor(lse)


def attention_alone(q, k, v, arrays, seed, handle):
    """``(out, None)``."""
    return as_tensor(_forward(q, k, v, arrays, seed, handle, with_lse=False)[0]), None


def _forward(q, k, v, arrays, seed, handle, with_lse):
    plan, native = _plan(spec_of(handle), q, k, v, arrays)
    return plan.run_forward(*native, None, _seed(seed), with_lse=with_lse)


@define(f"attention_backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv)", late=True)
def attention_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    """The gradients of q, k and v."""
    spec = spec_of(handle)
    plan, native = _plan(spec, q, k, v, arrays)
    results = _results(dout, native, out, lse, dlse)
    dq, dk, dv = plan.run_backward(*results, _seed(seed), spec.deterministic)
    return as_tensor(dq), as_tensor(dk), as_tensor(dv)


@define(f"score_backward({_BACKWARD}) -> Tensor[]", late=True)
def score_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    """The gradients of the tensors of the score that have one."""
    spec = spec_of(handle)
    plan, native = _plan(spec, q, k, v, arrays)
    results = _results(dout, native, out, lse, dlse)
    sums = map(as_tensor, plan.run_score_backward(*results, _seed(seed)))
    sums = [x for x, learned in zip(sums, spec.learned, strict=True) if learned]
    targets = [x for x, has in zip(arrays, spec.has_gradient, strict=True) if has]
    return [x.reshape(to.shape).to(to.dtype) for x, to in zip(sums, targets, strict=True)]


def _results(dout, native, out, lse, dlse):
    """As a plan takes them."""
    dlse = None if dlse is None else native_of(dlse)
    return native_of(with_rows(dout)), *native, native_of(out), native_of(lse), dlse


@_fake("attention")
def _fake_attention(q, k, v, arrays, seed, handle):
    return new_results(q)


@_fake("attention_backward")
def _fake_attention_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


@_fake("score_backward")
def _fake_score_backward(dout, q, k, v, out, lse, dlse, arrays, seed, handle):
    has_gradient = spec_of(handle).has_gradient
    return [x.new_empty(x.shape) for x, has in zip(arrays, has_gradient, strict=True) if has]
