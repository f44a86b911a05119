"""Every argument of attention and decode arrives, whatever way a call takes."""

import numpy as np
import pytest
import torch
from tensors import OPTIONS, N, as_numpy, assert_same_bits, of_core, of_torch, only_rank, qkv
from torch._dynamo.exc import TorchDynamoException

import masks
import nbflash
from nbflash import torch as nt
from nbflash.distributed import Sharding
from nbflash.planning.plan import AttentionPlan
from nbflash.torch import distributed as over_ranks


def eager(q, k, v, mask=None, **options):
    return nt.attention(q, k, v, mask, return_lse=True, **options)


def heads_first(q, k, v, mask=None, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = nt.attention(q, k, v, mask, layout="bhsd", return_lse=True, **options)
    return out.transpose(1, 2), lse


def in_graph(q, k, v, mask=None, **options):
    torch.compiler.reset()
    run = torch.compile(lambda *given: eager(*given, **options), fullgraph=True, backend="eager")
    mask = mask.to_mask(q.shape[2]) if isinstance(mask, nbflash.BlockMap) else mask
    return run(q, k, v, mask)


WAYS = {"eager": eager, "heads first": heads_first, "in a graph": in_graph}


def expected(options, inputs, **more):
    options = {"mask": None} | options | more
    if isinstance(options["mask"], nbflash.BlockMap):
        options["mask"] = options["mask"].to_mask(inputs[0].shape[2])
    return of_core(*inputs, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_arguments_of_attention(option, way):
    given, options = qkv(dtype="float32"), OPTIONS[option]
    dlse = torch.randn(2, 4, N)
    got = of_torch(lambda *x: WAYS[way](*x, **options), *given, dlse)
    assert_same_bits(got, expected(options, given, dlse=dlse))
    plain = of_core(*given, dlse=dlse)
    assert (option == "nothing") == np.array_equal(as_numpy(got[0]), plain[0])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("option", [x for x in OPTIONS if x != "impl"])
def test_arguments_of_the_module(option, layout):
    q, k, v, dout = given = qkv(dtype="float32")
    options = dict(OPTIONS[option])
    if option == "dropout":
        options.pop("seed")
    layer = nt.Attention(**options, layout=layout)
    inputs = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    torch.manual_seed(5)
    out = layer(*inputs)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    if option == "dropout":
        torch.manual_seed(5)
        options["seed"] = torch.randint(2**63 - 1, (2,)).tolist()
        assert torch.equal(layer.eval()(*inputs), nt.Attention(layout=layout)(*inputs))
    want = expected(options, given)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip((out, *got), (want[0], *want[2:]), strict=True):
        assert np.array_equal(as_numpy(a), b)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_of_other_types_beside_an_equal_one(way):
    q, k, v, _ = qkv(1, 9, 9)
    for window in ((3.0, 0), (3, False)):
        for call in (WAYS[way], nt.decode) if way == "eager" else (WAYS[way],):
            given = [x.detach() for x in (q, k, v)]
            given += [torch.tensor([9], dtype=torch.int32)] if call is nt.decode else []
            call(*given, window=(3, 0))
            with pytest.raises((TypeError, TorchDynamoException), match="window must be"):
                call(*given, window=window)


X, LSE = torch.zeros(2, 4, 3, 8), torch.zeros(2, 3, 4)
MISFITS = {
    "layout": (lambda: nt.Attention(layout="sbhd"), "layout must be one of bshd, bhsd"),
    "batch": (lambda: nt.merge(X, LSE, X[:1], LSE), "out_b must have shape"),
    "queries": (lambda: nt.merge(X, LSE[..., :1], X, LSE), "lse_a must have shape"),
    "axes": (lambda: nt.merge(X[0], LSE, X, LSE), "out_a must have 4 axes"),
    "lse of a sink": (lambda: nt.merge_sink(X, LSE[:1], torch.zeros(3)), "lse must have shape"),
    "sink of another number": (
        lambda: nt.merge_sink(X, LSE, torch.zeros(1)),
        r"sink must have shape \(3,\)",
    ),
    "sequences": (
        lambda: nt.varlen_attention(X[0], X[0], X[0], [0, 2]),
        r"cu_seqlens must end at \(4, 4\), got \(2, 2\)",
    ),
}


def test_parts_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"lse_b must be a torch\.Tensor, got list"):
        nt.merge(X, LSE, X, [1.0])
    with pytest.raises(TypeError, match=r"sink must be a torch\.Tensor, got list"):
        nt.merge_sink(X, LSE, [1.0])


@pytest.mark.parametrize(("call", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_text_of_the_module():
    options = {"mask": masks.causal(9), "window": (3, 0), "scale": 0.5, "dropout": 0.25}
    score = nt.scores.softcap(2.0)
    text = repr(nt.Attention(**options, causal=True, score=score))
    for name, value in (options | {"causal": True, "score": score}).items():
        assert f"{name}={value}" in text
    assert repr(nt.Attention()) == "Attention()"
    made = nt.Attention(sinks=4, layout="bhsd", deterministic=False)
    assert repr(made) == "Attention(deterministic=False, sinks=4, layout='bhsd')"


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("of_torch_itself", [False, True])
def test_deterministic_gradients_are_asked_for(asked, of_torch_itself, monkeypatch):
    q, k, v, dout = qkv(1, 9, 9)
    seen, write = [], AttentionPlan.write_backward

    def noted(plan, *given):
        seen.append(given[-1])
        write(plan, *given)

    monkeypatch.setattr(AttentionPlan, "write_backward", noted)
    comm, sharding = only_rank(), Sharding.of(masks.dense(9, 9), 1, 16)
    of_ranks = {"return_lse": True, "deterministic": asked}
    calls = [
        lambda: eager(q, k, v, deterministic=asked)[0],
        lambda: in_graph(q, k, v, deterministic=asked)[0],
        lambda: nt.Attention(deterministic=asked)(q, k, v),
        lambda: nt.varlen_attention(q[0], k[0], v[0], [0, 9], deterministic=asked)[None],
        lambda: over_ranks.attention(q, k, v, sharding, comm, **of_ranks)[0],
    ]
    torch.use_deterministic_algorithms(of_torch_itself)
    try:
        for call in calls:
            torch.autograd.grad(call(), (q, k, v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [of_torch_itself if asked is None else asked] * len(calls)
