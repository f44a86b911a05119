"""In eager mode attention goes around torch's dispatcher, with the operators' bits."""

import copy

import pytest
import torch
from tensors import of_torch, qkv
from torch.autograd import forward_ad
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import masks
from nbflash import torch as nt
from nbflash.planning.plan import AttentionPlan
from nbflash.torch import autograd


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def with_lse(**options):
    return lambda q, k, v: nt.attention(q, k, v, masks.causal(33), return_lse=True, **options)


CALLS = {
    "plain": lambda x: {},
    "dropout": lambda x: {"dropout": 0.25, "seed": 5},
    "seed of a tensor": lambda x: {"dropout": 0.25, "seed": torch.tensor([5, -1])},
    "heads first": lambda x: {"layout": "bhsd"},
    "learned bias": lambda x: {"score": nt.scores.bias(x)},
    "softcap": lambda x: {"score": nt.scores.softcap(5.0)},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_bits_of_the_operators(options, dtype, monkeypatch):
    q, k, v, dout = qkv(dtype=dtype)
    bias = torch.randn(1, 4, 33, 33, requires_grad=True)
    options = options(bias)
    if "layout" in options:
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
        dout = dout.transpose(1, 2)
    learned = [q, k, v, bias] if "score" in options and options["score"].tensors else [q, k, v]
    got = []
    for eager in (True, False):
        if not eager:
            monkeypatch.setattr(autograd, "is_eager", lambda tensors: False)
        out, lse = with_lse(**options)(q, k, v)
        with torch.no_grad():
            alone = nt.attention(q, k, v, masks.causal(33), **options)
        got.append([out, lse, alone, *torch.autograd.grad(out, learned, dout)])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


def test_calls_no_operator():
    q, k, v, dout = qkv()
    lengths = torch.full((2,), 33, dtype=torch.int32)

    def operators():
        with profile() as profiled:
            of_torch(with_lse(), q, k, v, dout)
            with torch.no_grad():
                nt.attention(q, k, v)
                nt.decode(q[:, :1], k, v, lengths)
        return [event.name for event in profiled.function_events if "nbflash" in event.name]

    assert operators() == []
    with Functions():  # which are off in a backward pass; above autograd and below it
        assert operators() == ["nbflash::attention"] * 4 + ["nbflash::decode"]


def test_an_lse_that_nobody_reads_is_not_written(monkeypatch):
    q, k, v, _ = qkv()
    seen, run = [], AttentionPlan.run_forward

    def noted(plan, *given, with_lse=True):
        seen.append(with_lse)
        return run(plan, *given, with_lse=with_lse)

    monkeypatch.setattr(AttentionPlan, "run_forward", noted)
    nt.attention(q, k, v)  # which the backward pass reads
    with torch.no_grad():
        nt.attention(q, k, v)
        nt.attention(q, k, v, return_lse=True)
    assert seen == [True, False, True]


def test_modes_see_the_operators():
    q, k, v, dout = qkv()
    with Operators() as mode:
        of_torch(with_lse(), q, k, v, dout)
    ours = [name for name in mode.seen if name.startswith("nbflash")]
    assert ours == ["nbflash.attention.default", "nbflash.attention_backward.default"]


def test_who_listens(monkeypatch):
    x = torch.ones(2)
    assert autograd.is_eager((x, None, torch.nn.Parameter(x)))
    negated = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    for other in (x.as_subclass(Subclass), negated, x.to_sparse(), x.to("meta")):
        assert not autograd.is_eager((x, other))
    seen = []
    torch.func.grad(lambda y: seen.append(autograd.is_eager((x,))) or y.sum())(x)
    with Functions():
        seen.append(autograd.is_eager((x,)))
        with torch.device("meta"):
            seen.append(autograd.is_eager((x,)))
    with Operators():
        seen.append(autograd.is_eager((x,)))
    with forward_ad.dual_level():
        seen.append(autograd.is_eager((x,)))
    with torch.device("meta"):  # a mode of functions, that of torch.set_default_device
        assert autograd.is_eager((x,))
        assert not autograd.is_eager((x.as_subclass(Subclass),))
    monkeypatch.setattr(torch._C, "_get_tracing_state", object)
    seen.append(autograd.is_eager((x,)))
    assert seen == [False] * 6


@pytest.mark.parametrize("changed", range(4), ids=["q", "k", "v", "out"])
def test_a_change_of_what_is_saved_is_noticed(changed):
    q, k, v, _ = (2 * x for x in qkv())
    out = nt.attention(q, k, v)
    loss = out.sum()
    with torch.no_grad():
        (q, k, v, out)[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_saved_tensors_serve_twice_and_are_freed():
    q, k, v, dout = qkv()
    out = nt.attention(q, k, v)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (q, k, v), dout)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, (q, k, v), dout)


def test_hooks_of_saved_tensors():
    q, k, v, dout = qkv()
    want = of_torch(with_lse(), q, k, v, dout)
    packed = []

    def pack(x):
        packed.append(x)
        return x.detach().mT.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.mT):
        got = of_torch(with_lse(), q, k, v, dout)
    assert all(map(torch.equal, got, want))
    assert len(packed) == 5


def test_hooks_of_tensors_and_nodes():
    q, k, v, dout = qkv()
    seen = []
    q.register_hook(lambda gradient: gradient * 2)
    out = nt.attention(q, k, v)
    out.grad_fn.register_hook(lambda inputs, outputs: seen.append(len(inputs)))
    doubled, dk = torch.autograd.grad(out, (q, k), dout)
    assert seen == [3]
    other = q.detach().requires_grad_()
    want = torch.autograd.grad(nt.attention(other, k, v), (other, k), dout)
    assert torch.equal(doubled, 2 * want[0])
    assert torch.equal(dk, want[1])


def test_a_module_is_copied():
    q, k, v, _ = qkv()
    layer = nt.Attention(causal=True)
    assert torch.equal(copy.deepcopy(layer)(q, k, v), layer(q, k, v))


def test_tangents_are_refused():
    """They are not dropped."""
    q, k, v, _ = (x.detach() for x in qkv())
    refused = pytest.raises(NotImplementedError, match="no derivatives in forward mode")
    with forward_ad.dual_level(), refused:
        nt.attention(forward_ad.make_dual(q, q), k, v)
    with refused:
        torch.func.hessian(lambda q: nt.attention(q, k, v).sum())(q)


def test_in_inference_mode():
    q, k, v, _ = qkv()
    with torch.inference_mode():
        out = nt.attention(q, k, v)
    assert out.is_inference()
    assert torch.equal(out, nt.attention(q, k, v))
