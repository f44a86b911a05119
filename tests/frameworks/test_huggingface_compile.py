"""Models under torch.compile: layers in one graph each, which serves masks of any contents."""

import pytest
import torch
from models import LENGTH, TOKENS, inputs, make
from tensors import assert_close
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounterWithBackend

import masks
import nbflash
from nbflash import huggingface as nh
from nbflash.huggingface import layer_masks

SPARSE = masks.local(64, block=4, width=1)
OVERRIDES = {
    "mask": SPARSE,
    "function": lambda nq, nk: masks.window(nq, nk, left=5, right=0),
}


@pytest.fixture(autouse=True)
def compiles_anew():
    torch.compiler.reset()


def layers_in_one_graph(model):
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    return counter


def padded(pads):
    """Two samples, with so many tokens of padding on the left."""
    ids = torch.randint(3, TOKENS, (2, LENGTH))
    kept = (torch.arange(LENGTH) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids, "attention_mask": kept, "labels": ids.masked_fill(kept == 0, -100)}


def trained(model, given):
    """Loss and gradients."""
    loss = model(**given).loss
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", OVERRIDES)
def test_layers_serve_any_padding(name):
    model = nh.sparsify(make("mistral").train(), OVERRIDES[name])
    batches = [padded(pads) for pads in ((0, 5), (3, 1), (2, 2), (0, 0))]
    want = [trained(model, given) for given in batches]
    counter = layers_in_one_graph(model)
    for given, expected in zip(batches, want, strict=True):
        assert_close(trained(model, given), expected)
    assert counter.frame_count <= 4  # two layers; the last batch has no padding


def test_layers_checkpointed_under_autocast():
    model, given = nh.sparsify(make("llama").train(), SPARSE), inputs("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = trained(model, given)
        model.gradient_checkpointing_enable()
        layers_in_one_graph(model)
        assert_close(trained(model, given), want)


def test_override_that_changes():
    model, given = nh.sparsify(make("llama"), SPARSE), inputs("llama")
    layers_in_one_graph(model)
    with torch.no_grad():
        first = model(**given).logits
        nh.sparsify(model, OVERRIDES["function"])
        second = model(**given).logits
    other = nh.sparsify(make("llama"), OVERRIDES["function"])
    assert_close(second, other(**given).logits.detach())
    assert not torch.equal(first, second)


def test_model_in_one_graph():
    model = nh.sparsify(make("llama").train(), SPARSE)
    ids = torch.randint(3, TOKENS, (2, LENGTH))
    with torch.inference_mode():
        mask = nh.mask_of(2, LENGTH, LENGTH)
    given = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    want = trained(model, given)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = run(**given).loss
    del given, mask
    nbflash.clear_cache()  # the graph alone knows the mask now
    got = loss, *torch.autograd.grad(loss, list(model.parameters()))
    assert_close(got, want)


def test_generates_by_decode(monkeypatch):
    model = nh.sparsify(make("llama"), lambda nq, nk: masks.dense(nq, nk))
    ids = torch.randint(3, TOKENS, (2, 9))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}
    want = model.generate(ids, **options)
    decode, calls = layer_masks.decode, []
    monkeypatch.setattr(layer_masks, "decode", lambda *x, **y: calls.append(x) or decode(*x, **y))
    counter = layers_in_one_graph(model)
    assert torch.equal(model.generate(ids, **options), want)
    assert len(calls) == 2 * 6
    assert counter.frame_count <= 4  # two layers, for nine queries and for one


def tensor_mask(kind):
    attended = (torch.rand(2, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    if kind == "boolean":
        return attended
    mask = torch.zeros(2, 1, 12, 12).masked_fill(~attended, torch.finfo(torch.float32).min)
    return mask if kind == "added" else mask + torch.rand(2, 1, 12, 12)


def test_masks_are_made_outside_of_a_graph():
    make = lambda x: x + nh.mask_of(1, 4, 4).shape[2]
    with pytest.raises(TorchDynamoException, match=r"nbflash\.huggingface\.mask_of outside"):
        torch.compile(make, fullgraph=True, backend="eager")(torch.zeros(1))
    run = torch.compile(make, backend="eager")
    assert run(torch.zeros(1)) == 4


def test_queries_of_any_number_by_one_graph():
    """As many as are decoded, and more."""
    counter = CompileCounterWithBackend("eager")
    call = lambda q, k, v: nh.attention_of(torch.nn.Identity(), q, k, v, None)[0]
    run = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for n in (70, 80, 9, 20):
        q, k, v = torch.randn(3, 1, 2, n, 8)
        assert_close(run(q, k, v), call(q, k, v))
    assert counter.frame_count == 2


STARTS = torch.tensor([0, 4, 9, 12])
GIVEN = {
    "causal": lambda: {"attention_mask": None},
    "bidirectional": lambda: {"attention_mask": None, "is_causal": False},
    "mask": lambda: {"attention_mask": masks.window(12, 12, left=3, right=1)},
    "boolean": lambda: {"attention_mask": tensor_mask("boolean")},
    "added": lambda: {"attention_mask": tensor_mask("added")},
    "bias": lambda: {"attention_mask": tensor_mask("bias")},
    "packed": lambda: {"attention_mask": None, "cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS},
    "sinks": lambda: {"attention_mask": None, "s_aux": torch.ones(4), "softcap": 5.0},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_function_of_a_layer(given):
    given, layer = given(), torch.nn.Identity()
    q, k, v = (torch.randn(2, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    if "cu_seq_lens_q" in given:
        q, k, v = (x.detach()[:1].requires_grad_() for x in (q, k, v))

    def run(q, k, v):
        return nh.attention_of(layer, q, k, v, **given)[0]

    results = [f(q, k, v) for f in (torch.compile(run, fullgraph=True, backend="aot_eager"), run)]
    assert_close(*results)
    gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in results]
    assert_close(*gradients)
