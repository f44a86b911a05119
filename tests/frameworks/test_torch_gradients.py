"""Gradients of any inputs by any results: of attention, of its merged parts, and under autocast."""

import functools
import itertools

import numpy as np
import pytest
import torch
from tensors import DEVICE, as_numpy, assert_close, of_core, qkv, sdpa

import masks
import nbflash
from nbflash import torch as nt
from nbflash.testing import assert_within_reference

NAMES = "q", "k", "v", "bias", "table"
LEARNED = [x for n in (1, 2, 5) for x in itertools.combinations(NAMES, n)]
RESULTS = {"out": (0,), "lse": (1,), "both": (0, 1)}
CASES = [x for x in itertools.product(LEARNED, RESULTS) if x != (("v",), "lse")]
MASK = masks.causal(9)
PLACES = (torch.arange(9) - torch.arange(9)[:, None] + 2).clamp(0, 4)


def inputs():
    q, k, v, _ = (x.detach() for x in qkv(2, 9, 9, head_dim=8))
    bias, table = torch.randn(2, 1, 1, 9), torch.randn(4, 5)
    return dict(zip(NAMES, (q, k, v, bias.double(), table.double()), strict=True))


def attend(q, k, v, bias, table):
    score = nt.scores.compose(nt.scores.bias(bias), nbflash.scores.softcap(2.0))
    score = nt.scores.compose(score, nt.scores.relative(table))
    return nt.attention(q, k, v, MASK, score=score, return_lse=True)


def defined(q, k, v, bias, table):
    score = lambda s: 2 * torch.tanh((s + bias) / 2) + table[:, PLACES]
    return sdpa(q, k, v, torch.tensor(MASK.dense()), score)


@pytest.mark.parametrize(("learned", "used"), CASES)
def test_of_some_inputs_by_some_results(learned, used):
    given, results = inputs(), []
    for function in (attend, defined):
        each = {x: y.clone().requires_grad_(x in learned) for x, y in given.items()}
        made = [function(**each)[i] for i in RESULTS[used]]
        weights = [torch.arange(x.numel()).view_as(x) / x.numel() for x in made]
        loss = sum((x * y).sum() for x, y in zip(made, weights, strict=True))
        wanted = [each[x] for x in learned]
        results.append(torch.autograd.grad(loss, wanted, materialize_grads=True))
    assert_close(*results)


@pytest.mark.parametrize("in_graph", [False, True])
def test_of_functions(in_graph):
    """By torch.func, of all inputs, with dropout: its seed is none of them."""
    given = inputs()

    def loss(q, k, v, bias, table):
        score = nt.scores.compose(nt.scores.bias(bias), nt.scores.relative(table))
        options = {"score": score, "dropout": 0.25, "seed": 3, "return_lse": True}
        out, lse = nt.attention(q, k, v, MASK, **options)
        return out.sin().sum() + lse.cos().sum()

    gradient = torch.func.grad(loss, tuple(range(5)))
    if in_graph:
        torch.compiler.reset()
        gradient = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    each = [x.clone().requires_grad_() for x in given.values()]
    want = torch.autograd.grad(loss(*each), each)
    assert_close(gradient(*given.values()), want)


class Undefined(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_results_that_nobody_uses_have_no_gradient():
    q, k, v, _ = qkv(1, 9, 9)
    score = nt.scores.relative(torch.randn(4, 5, dtype=q.dtype, requires_grad=True))
    out = Undefined.apply(nt.attention(q, k, v, score=score))
    learned = q, k, v, *score.tensors
    assert torch.autograd.grad(out.sum(), learned, allow_unused=True) == (None,) * 4


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("in_graph", [False, True])
def test_autocast_casts_to_its_dtype(dtype, in_graph):
    """Not those of float64, and not within a region where it is off."""
    q, k, v, dout = qkv(dtype="float32")
    run = lambda q, k, v: nt.attention(q, k, v, causal=True)
    if in_graph:
        torch.compiler.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE, dtype=dtype):
        out = run(q, k, v)
        mixed = run(q, k.to(dtype), v)
        with torch.autocast(DEVICE, enabled=False):
            outside = run(q, k, v)
    halves = [x.detach().to(dtype) for x in (q, k, v)]
    want = of_core(*halves, dout.to(dtype), causal=True)
    assert np.array_equal(as_numpy(out), want[0])
    assert torch.equal(mixed, out)
    assert torch.equal(outside, nt.attention(q, k, v, causal=True))
    got = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    for a, b in zip(got, want[2:], strict=True):
        assert np.array_equal(as_numpy(a), b.astype(np.float32))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_within_and_around_a_graph(inside):
    q, k, v, dout = qkv(dtype="float32")

    def layer(q, k, v):
        return nt.attention(q, k, v, causal=True)

    def under(function):
        def run(*given):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return function(*given)

        return run

    torch.compiler.reset()
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    run = compiled(under(layer)) if inside else under(compiled(layer))
    out = run(q, k, v)
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    want = of_core(*halves, dout.bfloat16(), causal=True)
    assert out.dtype == torch.bfloat16
    assert np.array_equal(as_numpy(out), want[0])
    got = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    for a, b in zip(got, want[2:], strict=True):
        assert np.array_equal(as_numpy(a), b.astype(np.float32))


def parts(dtype, large):
    """Two of all keys; rows attend nothing of one of them, and of both."""
    q, k, v, _ = qkv(2, 9, 9, dtype=dtype, head_dim=8)
    made = []
    for i, where in enumerate((slice(4), slice(4, 9))):
        out, lse = nt.attention(q, k[:, where], v[:, where], return_lse=True)
        out, lse = out.detach().clone(), lse.detach() + large
        for row in (0, i + 1):
            out[:, row], lse[:, :, row] = 0, -torch.inf
        made += [out.requires_grad_(), lse.requires_grad_()]
    return made


def part_and_sink(dtype, large):
    """The sink is of another dtype."""
    of_sink = torch.float32 if dtype == "float64" else torch.float64
    sink = torch.tensor([0.5, -1.0, 2.0, 30.0], dtype=of_sink) + large
    return [*parts(dtype, large)[:2], sink.requires_grad_()]


JOINED = {
    "merge": (nt.merge, nbflash.merge, nbflash.merge_backward, parts),
    "sink": (nt.merge_sink, nbflash.merge_sink, nbflash.merge_sink_backward, part_and_sink),
}


@pytest.mark.parametrize("large", [0, 1000])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("how", JOINED)
def test_joined_parts(how, dtype, large):
    """Both results, and gradients by both; of an LSE that exp cannot hold, too."""
    join, of_arrays, backward, make = JOINED[how]
    given = make(dtype, large)
    made = join(*given)
    weights = [torch.randn_like(x) for x in made]
    weights[1][torch.isinf(made[1])] = 0
    got = *made, *torch.autograd.grad(made, given, weights)
    dout, dlse = map(as_numpy, weights)
    arrays = [as_numpy(x) if x.ndim == 4 else as_numpy(x).astype(dlse.dtype) for x in given]
    of_core = lambda dout, dlse, *x: (*of_arrays(*x), *backward(dout, *x, dlse=dlse))
    plain = of_core(dout, dlse, *arrays)
    exact = of_core(*(x.astype(np.float64) for x in (dout, dlse, *arrays)))
    for result, x, want, low in zip(got, (*given[:2], *given), exact, plain, strict=True):
        assert result.dtype == x.dtype
        result = as_numpy(result)
        coarser = low.dtype.itemsize <= result.dtype.itemsize
        assert_within_reference(result, want, low if coarser else low.astype(result.dtype))
