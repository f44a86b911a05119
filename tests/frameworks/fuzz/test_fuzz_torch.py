"""Any call of nbflash.torch, with gradients through all of it, against the plain definition."""

import dataclasses

import ml_dtypes
import numpy as np
import torch
from fuzzing import checked_calls, drawn_problems, plain_masks
from fuzzing.drawn_decode import check as check_decoded
from fuzzing.drawn_decode import contiguous
from fuzzing.drawn_masks import parts
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tensors import as_numpy

from nbflash import torch as nt

LAYOUTS = {
    "packed": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last axis first": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "strides of 2": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0],
    "a part": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[:, :, : x.shape[2]],
}
LAYOUT = st.sampled_from(sorted(LAYOUTS))


def tensor(x, layout="packed"):
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return LAYOUTS[layout](torch.tensor(x.view(np.int16)).view(torch.bfloat16))
    return LAYOUTS[layout](torch.tensor(x))


def run(call, attention, layouts):
    """The results of `checked_calls.run` by a function of tensors."""
    leaves = [
        tensor(x, layout).requires_grad_() for x, layout in zip(call.arrays, layouts, strict=True)
    ]
    learned = []

    def array(x):
        learned.append(torch.tensor(x, requires_grad=True))
        return learned[-1]

    options = dict(call.options)
    if "score" in options:
        options["score"] = call.drawn.build(nt.scores, array)
    if "seed" in options:
        options["seed"] = checked_calls.words_of(call)
    out, lse = attention(*leaves, call.mask, return_lse=True, **options)
    results, gradients = [out], [tensor(call.dout, layouts[0])]
    if call.dlse is not None:
        results, gradients = [out, lse], [*gradients, tensor(call.dlse)]
    found = torch.autograd.grad(results, (*leaves, *learned), gradients, allow_unused=True)
    arrays = [
        np.zeros(x.shape) if g is None else as_numpy(g)
        for g, x in zip(found[3:], learned, strict=True)
    ]
    return [as_numpy(x) for x in (out, lse, *found[:3])], arrays


def heads_first(q, k, v, *args, **options):
    """By the layout "bhsd"."""
    arrays = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = nt.attention(*arrays, *args, layout="bhsd", **options)
    return out.transpose(1, 2), lse


@examples(6)
@given(
    drawn_problems.calls(), st.tuples(*[LAYOUT] * 3), st.sampled_from([nt.attention, heads_first])
)
def test_attention(call, layouts, attention):
    checked_calls.check(call, lambda call: run(call, attention, layouts))


@examples(2)
@given(drawn_problems.calls(dtypes=[np.float32]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_autocast(call, dtype):
    """That of the arrays in the dtype, whose gradients come back in float32."""

    def attention(*args, **options):
        with torch.autocast("cpu", dtype):
            return nt.attention(*args, **options)

    kind = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16
    cast = [x.astype(kind) for x in (*call.arrays, call.dout)]
    names = "q", "k", "v", "dout"
    own = dataclasses.replace(call, **dict(zip(names, cast, strict=True)))

    def as_cast(_):
        wide = dataclasses.replace(call, dout=own.dout)
        results, arrays = run(wide, attention, ["packed"] * 3)
        assert [x.dtype for x in results] == [kind, np.float32, *[np.float32] * 3]
        return [results[0], results[1], *(x.astype(kind) for x in results[2:])], arrays

    checked_calls.check(own, as_cast)


@st.composite
def packed(draw):
    call = draw(drawn_problems.calls(scored=False))
    call, count = checked_calls.finite(call), draw(st.integers(1, 4))
    lengths, lengths_k = (draw(parts(x.shape[1], count)) for x in (call.q, call.k))
    causal = draw(st.booleans())
    keep = np.zeros(call.keep.shape, bool)
    keep[:] = plain_masks.documents(lengths, lengths_k, causal=causal)
    sums = [[0, *np.cumsum(x).tolist()] for x in (lengths, lengths_k)]
    one = {x: getattr(call, x)[:1] for x in ("q", "k", "v", "dout")}
    scale = {"scale": call.options.get("scale")}
    call = dataclasses.replace(call, **one, keep=keep[:1], options=scale, mask=None, dlse=None)
    return call, sums, causal


@examples(6)
@given(packed(), st.booleans())
def test_varlen_attention(given, as_tensors):
    call, sums, causal = given
    starts = [torch.tensor(x, dtype=torch.int32) for x in sums] if as_tensors else sums

    def attention(q, k, v, mask, **options):
        found = nt.varlen_attention(q[0], k[0], v[0], *starts, causal=causal, **options)
        return [x[None] for x in found]

    checked_calls.check(call, lambda call: run(call, attention, ["packed"] * 3))


@examples(6)
@given(contiguous())
def test_decode(given):
    q, k, v, lengths, options, plain = given
    call = [tensor(x) for x in (q, k, v, lengths)]
    with torch.no_grad():
        got = nt.decode(*call, return_lse=True, **options)
    held = [(k[b, :n], v[b, :n]) for b, n in enumerate(lengths)]
    check_decoded([as_numpy(x) for x in got], q, held, plain)
