"""The function of a layer by its definition: each argument, of few queries and many, in graphs."""

import itertools

import pytest
import torch
from models import exact
from tensors import DEVICE, as_numpy, assert_close

import masks
from nbflash import huggingface as nh
from nbflash.huggingface import attention as layers
from nbflash.huggingface import layer_masks
from nbflash.huggingface.layer_masks import Override
from nbflash.testing import assert_within_reference

HEADS, NK = 4, 12
LOCAL = masks.local(16, block=2, width=1)
DOCUMENTS = torch.tensor([0, 5, NK])


class Layer(torch.nn.Module):
    """Without an opinion on what is causal."""


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def boolean(nq):
    return torch.rand(2, 1, nq, NK) < 0.7


def added(nq):
    """With the least number in the first batch entry, and -inf in the second one."""
    least = torch.tensor([torch.finfo(torch.float64).min, -torch.inf], dtype=torch.float64)
    return torch.where(boolean(nq), random(2, 1, nq, NK), least.view(2, 1, 1, 1))


def documents(nq):
    ends = torch.tensor([0, nq // 2, nq])
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": DOCUMENTS}, masks.documents(
        ends.diff().tolist(), DOCUMENTS.diff().tolist()
    )


# By the number of queries: arguments, and which keys are attended besides the mask.
ARGUMENTS = {
    "nothing": lambda nq: ({}, None),
    "softcap": lambda nq: ({"softcap": 0.5}, None),
    "sinks": lambda nq: ({"s_aux": random(HEADS)}, None),
    "bias of positions": lambda nq: ({"position_bias": random(1, HEADS, nq, NK)}, None),
    "softcap and bias": lambda nq: (
        {"softcap": 0.5, "position_bias": random(2, HEADS, nq, NK)},
        None,
    ),
    "documents": documents,
    "override": lambda nq: ({}, Override(LOCAL).rows(nq, NK)),
    "documents and override": lambda nq: (
        documents(nq)[0],
        documents(nq)[1] & Override(LOCAL).rows(nq, NK),
    ),
}
MASKS = {
    "causal": lambda nq: masks.causal(nq, NK),
    "window": lambda nq: masks.window(nq, NK, left=4, right=0),
    "dense": lambda nq: masks.dense(nq, NK),
    "boolean": boolean,
    "boolean by head": lambda nq: torch.rand(2, HEADS, nq, NK) < 0.7,
    "added": added,
    "model": lambda nq: nh.mask_of(2, nq, NK, NK - nq, 0),
}
CASES = [
    ("causal", "nothing"),
    *itertools.product(("window", "added"), ARGUMENTS),
    *itertools.product(("boolean", "model"), ("nothing", "sinks", "documents", "override")),
    ("boolean by head", "override"),
    ("dense", "override"),
]


def definition(q, k, v, mask, given, attended):
    """What is attended, and what is added, as `models.exact` takes them."""
    nq = q.shape[2]
    given = {name: x for name, x in given.items() if not name.startswith("cu_")}
    if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool:
        bias = given.get("position_bias", 0) + mask.masked_fill(mask < -1e300, 0)
        given["position_bias"], mask = bias, mask >= -1e300
    mask = mask.mask if isinstance(mask, nh.mask_functions.ModelMask) else mask
    if isinstance(mask, masks.Mask):
        mask = torch.tensor(mask.dense()).expand(1, 1, nq, NK)
    if attended is not None:
        mask = mask & torch.tensor(attended.dense())
    return exact(None, q, k, v, mask, scaling=0.3, **given)[0]


def inputs(nq, width=8):
    return [random(2, heads, n, d) for heads, n, d in ((HEADS, nq, 8), (2, NK, 8), (2, NK, width))]


@pytest.mark.parametrize(
    ("way", "nq"),
    [("without gradients", 1), ("without gradients", 3), ("eager", NK), ("in a graph", 3)],
)
@pytest.mark.parametrize(("mask", "argument"), CASES)
def test_by_definition(mask, argument, nq, way):
    """Rows of a layer's few queries are decoded where nothing is learned."""
    q, k, v = inputs(nq)
    layer, mask = Layer(), MASKS[mask](nq)
    given, attended = ARGUMENTS[argument](nq)
    layer.nbflash_mask = Override(LOCAL) if "override" in argument else None

    def call(q, k, v):
        return nh.attention_of(layer, q, k, v, mask, scaling=0.3, **given)[0]

    run = call
    if way == "in a graph":
        torch.compiler.reset()
        run = torch.compile(call, fullgraph=True, backend="eager")
    learned = [x.requires_grad_(way != "without gradients") for x in (q, k, v)]
    got, want = run(q, k, v), definition(q, k, v, mask, given, attended)
    assert_close(got, want)
    assert got.is_contiguous()
    if way != "without gradients":
        dout = random(*got.shape)
        results = [torch.autograd.grad(x, learned, dout) for x in (got, want)]
        assert_close(*results)


@pytest.mark.parametrize("way", ["eager", "in a graph"])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_few_queries_are_decoded(kind, way, monkeypatch):
    """With scale, softcap, sinks, and grouped heads; keys behind the last query are not there."""
    q, k, v = inputs(3)
    mask = masks.restrict(MASKS[kind](NK), range(5, 8), range(NK))
    given = {"softcap": 0.5, "s_aux": random(HEADS)}
    call = lambda q, k, v: nh.attention_of(Layer(), q, k, v, mask, scaling=0.3, **given)[0]
    calls, decode = [], layer_masks.decode
    monkeypatch.setattr(layer_masks, "decode", lambda *x, **y: calls.append(x) or decode(*x, **y))
    if way == "in a graph":
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    got = call(q, k, v)
    ((*_, lengths),) = calls
    assert (lengths.dtype, lengths.tolist()) == (torch.int32, [8, 8])
    assert_close(got, definition(q, k, v, mask, given, None))


@pytest.mark.parametrize("learned", range(3), ids="qkv")
def test_few_queries_with_a_gradient_are_not_decoded(learned, monkeypatch):
    given = inputs(3)
    calls, decode = [], layer_masks.decode
    monkeypatch.setattr(layer_masks, "decode", lambda *x, **y: calls.append(y) or decode(*x, **y))
    given[learned].requires_grad_()
    out, _ = nh.attention_of(Layer(), *given, masks.causal(3, NK), scaling=0.3)
    out.sum().backward()
    with torch.no_grad():
        assert not calls
        again, _ = nh.attention_of(Layer(), *given, masks.causal(3, NK), scaling=0.3)
    assert len(calls) == 1
    assert_close(out, again)
    assert given[learned].grad.any()


@pytest.mark.parametrize("nq", [3, NK])
def test_narrower_values(nq):
    q, k, v = inputs(nq, width=5)
    mask = masks.causal(nq, NK)
    got, weights = nh.attention_of(Layer(), q, k, v, mask, scaling=0.3)
    assert weights is None
    assert_close(got, definition(q, k, v, mask, {}, None))


def test_packed_queries_alone_say_where_keys_begin():
    q, k, v = inputs(NK)
    got, _ = nh.attention_of(Layer(), q, k, v, None, scaling=0.3, cu_seq_lens_q=DOCUMENTS)
    attended = masks.causal(NK) & masks.documents([5, 7])
    assert_close(got, definition(q, k, v, attended, {}, None))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("nq", "causal"), [(1, None), (3, False)])
def test_queries_without_a_mask_see_all_keys(nq, causal, compiled):
    q, k, v = inputs(nq)
    call = lambda *x: nh.attention_of(Layer(), *x, None, scaling=0.3, is_causal=causal)[0]
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    assert_close(call(q, k, v), definition(q, k, v, masks.dense(nq, NK), {}, None))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_of_few_queries(compiled):
    """Rotated queries and keys are float32 beside values of the lower precision."""
    q, k, v = (x.bfloat16() for x in inputs(3))
    mask = masks.causal(3, NK)
    call = lambda *x: nh.attention_of(Layer(), *x, mask, scaling=0.3)[0]
    want = call(q, k, v)
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    with torch.autocast(DEVICE, torch.bfloat16):
        got = call(q.float(), k.float(), v)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


def test_an_added_mask_of_integers_is_refused():
    q, k, v = inputs(3)
    with pytest.raises(TypeError, match="must be boolean or floating, got torch"):
        nh.attention_of(Layer(), q, k, v, boolean(3).int())


def test_an_added_mask_of_half_precision():
    """Its least number hides, as do lower ones; a larger one is a bias."""
    q, k, v = (x.half() for x in inputs(NK))
    hidden = boolean(NK)
    for least in (torch.finfo(torch.float16).min, -torch.inf):
        mask = torch.zeros(2, 1, NK, NK).half().masked_fill(hidden, least)
        kind, given, bias = layers._kind_of(Layer(), mask, None, NK, NK)
        assert (kind, bias) == ("boolean", None)
        assert torch.equal(given, ~hidden)
    mask = torch.zeros(2, 1, NK, NK).half().masked_fill(hidden, -1000)
    kind, given, bias = layers._kind_of(Layer(), mask, None, NK, NK)
    assert (kind, given) == ("dense", None)
    assert bias is not None
    got, _ = nh.attention_of(Layer(), q, k, v, mask, scaling=0.3)
    want, low = (
        definition(*(x.to(dtype) for x in (q, k, v, mask)), {}, None)
        for dtype in (torch.float64, torch.float16)
    )
    assert_within_reference(*map(as_numpy, (got, want, low)))


@pytest.mark.parametrize("value", [None, False])
def test_weights_that_are_not_asked_for(value):
    q, k, v = inputs(NK)
    options = {"output_attentions": value, "head_mask": None, "scaling": 0.3}
    got, _ = nh.attention_of(Layer(), q, k, v, None, **options)
    assert_close(got, definition(q, k, v, masks.causal(NK), {}, None))
    with pytest.raises(ValueError, match="nbflash has no head_mask"):
        nh.attention_of(Layer(), q, k, v, None, head_mask=torch.ones(1))
