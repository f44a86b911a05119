"""transformers' models under attn_implementation="nbflash" against its own eager attention."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from models import DECODERS, LENGTH, MODELS, PADS, TOKENS, exact, inputs, like, make
from tensors import as_numpy, assert_close

import masks
from nbflash import huggingface as nh
from nbflash import torch as nt
from nbflash.huggingface import attention as layers
from nbflash.huggingface import registration
from nbflash.huggingface.layer_masks import Override, decoded
from nbflash.testing import assert_within_reference


def results(model, given):
    """Logits of tokens that are no padding, the loss, and all gradients."""
    model.zero_grad()
    given = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()}
    out = model(**given)
    out.loss.backward()
    logits = out.logits
    if "attention_mask" in given and logits.shape[1] == LENGTH:
        logits = logits[given["attention_mask"].bool()]
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [as_numpy(x) for x in (logits, out.loss, torch.cat(gradients))]


@pytest.mark.parametrize("name", MODELS)
def test_model_within_budget_of_eager(name):
    model, given = make(name), inputs(name)
    got = results(model, given)
    exact = results(like(model, "exact", torch.float64), given)
    plain = results(like(model, "eager"), given)
    for what, *three in zip(("logits", "loss", "gradients"), got, exact, plain, strict=True):
        assert_within_reference(*three, f"{name}: {what}")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_generates_what_eager_does(name, cache):
    model, given = make(name), inputs(name)
    given.pop("labels")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    got, want = (m.generate(**given, **options) for m in (model, like(model, "eager")))
    assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "windows"), [("gemma2", {None, (5, 0)}), ("mistral", {(5, 0)})])
def test_softcaps_and_windows_are_decoded(name, windows, monkeypatch):
    """The prompt and every token: no mask is planned. Caches of windows hold no other keys."""
    calls = []

    def noted(q, k, v, rows, scale, score):
        calls.append((q.shape[1], rows.window, score is not None))
        return decoded(q, k, v, rows, scale, score)

    monkeypatch.setattr(nh.attention, "decoded", noted)
    ids = torch.randint(3, TOKENS, (2, 9))
    make(name).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(calls) == 2 * 4
    assert {window for nq, window, _ in calls if nq == 9} == windows
    assert {capped for *_, capped in calls} == {name == "gemma2"}


def changed_rows(model, ids, at, **given):
    """Which tokens' logits change with the token ``at``."""
    other = ids.clone()
    other[0, at] = (other[0, at] + 1) % TOKENS
    with torch.no_grad():
        a, b = (model(input_ids=x, **given).logits[0] for x in (ids, other))
    return (a != b).any(dim=1).nonzero().flatten().tolist()


def test_packed_documents_do_not_see_each_other():
    model = make("llama")
    ids = torch.randint(3, TOKENS, (1, 12))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])
    assert changed_rows(model, ids, 5, position_ids=places, use_cache=False) == [5, 6, 7, 8]
    starts = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, 9, 12]))
    assert changed_rows(model, ids, 5, **starts) == [5, 6, 7, 8]


def test_packed_documents_of_more_keys_than_queries():
    q, k, v = (torch.randn(1, 4, n, 8, dtype=torch.float64) for n in (5, 9, 9))
    starts = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 5, 9])}
    mask = masks.dense(5, 9)
    got, _ = nh.attention_of(LAYER, q, k, v, mask, scaling=0.5, **starts)
    attended = torch.tensor(masks.documents([2, 3], [5, 4]).dense())[None, None]
    want, _ = exact(LAYER, q, k, v, attended, scaling=0.5)
    assert_close(got, want)


def test_a_few_tokens_with_dropout_are_not_decoded(monkeypatch):
    monkeypatch.setattr(layers, "decoded", None)
    q, k, v = (torch.randn(1, 4, n, 8) for n in (2, 9, 9))
    torch.manual_seed(1)
    got, _ = nh.attention_of(LAYER, q, k, v, masks.causal(2, 9), dropout=0.5, scaling=0.5)
    torch.manual_seed(1)
    given = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(got, nt.attention(*given, masks.causal(2, 9), dropout=0.5, scale=0.5))


def test_padding_is_not_seen():
    model, ids = make("llama"), torch.randint(3, TOKENS, (1, 12))
    kept = torch.ones(1, 12, dtype=torch.long)
    kept[0, 3] = 0
    assert changed_rows(model, ids, 3, attention_mask=kept) in ([], [3])


@pytest.mark.parametrize("kind", ["boolean", "added", "bias"])
def test_mask_of_four_axes(kind):
    model, ids = make("gpt2"), torch.randint(3, TOKENS, (2, 12))
    attended = (torch.rand(2, 1, 12, 12) < 0.5) | torch.eye(12, dtype=torch.bool)
    mask = attended
    if kind != "boolean":
        mask = torch.zeros(2, 1, 12, 12).masked_fill(~attended, torch.finfo(torch.float32).min)
    if kind == "bias":
        mask = mask + torch.rand(2, 1, 12, 12)
    eager, exact = like(model, "eager"), like(model, "eager", torch.float64)
    added = mask if kind != "boolean" else torch.zeros(2, 1, 12, 12).masked_fill(~mask, -1e30)
    with torch.no_grad():
        got = model(input_ids=ids, attention_mask=mask).logits
        plain = eager(input_ids=ids, attention_mask=added).logits
        want = exact(input_ids=ids, attention_mask=added.double()).logits
    assert_within_reference(*map(as_numpy, (got, want, plain)))


def test_a_mask_of_more_keys_is_of_the_first_ones():
    """As those of caches with room are."""
    q, k, v = (torch.randn(1, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(1, 1, 6, 9) < 0.5
    got, _ = nh.attention_of(LAYER, q, k, v, mask, scaling=0.5)
    want, _ = exact(LAYER, q, k, v, mask[..., :6], scaling=0.5)
    assert_close(got, want)


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize("of_call", [None, False, True])
def test_without_a_mask_the_call_says_whether_it_is_causal_before_the_layer(of_layer, of_call):
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float64)
    layer.is_causal = of_layer
    got, _ = nh.attention_of(layer, q, k, v, None, is_causal=of_call)
    causal = of_layer if of_call is None else of_call
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close(got, want.transpose(1, 2))


def test_an_added_mask_without_a_bias_is_no_bias():
    least = torch.finfo(torch.float32).min
    added = torch.tensor([0.0, least]).expand(1, 1, 2, 2)
    for given, kind in ((added, "boolean"), (added + torch.tensor([0.5, 0.0]), "dense")):
        found, _, bias = layers._kind_of(LAYER, given, None, 2, 2)
        assert (found, bias is None) == (kind, kind == "boolean")


def test_a_bias_of_positions_for_a_few_tokens():
    """Of the last three of nine: as many as are decoded without one."""
    q, k, v = (torch.randn(1, 4, n, 8, dtype=torch.float64) for n in (3, 9, 9))
    bias = torch.randn(1, 4, 3, 9, dtype=torch.float64)
    given = {"scaling": 0.5, "position_bias": bias}
    mask = masks.causal(3, 9)
    got, _ = nh.attention_of(LAYER, q, k, v, mask, **given)
    want, _ = exact(LAYER, q, k, v, torch.tensor(mask.dense())[None, None], **given)
    assert_close(got, want)


def test_sparsified_model():
    model = make("gpt2")
    ids = torch.randint(3, TOKENS, (1, 16))
    sparse = masks.local(32, block=4, width=0)
    nh.sparsify(model, sparse)
    assert changed_rows(model, ids, 5) == [5, 6, 7]
    nh.sparsify(model, lambda nq, nk: masks.window(nq, nk, left=1, right=0))
    assert changed_rows(model, ids, 5) == [5, 6, 7]  # two layers see two tokens back
    nh.sparsify(model, None)
    assert changed_rows(model, ids, 5) == list(range(5, 16))
    first = nh.sparsify(model, sparse, where=lambda name, _: name.startswith("transformer.h.0."))
    assert changed_rows(first, ids, 5) == list(range(5, 16))


@pytest.mark.parametrize(("nq", "nk"), [(32, 32), (16, 16), (3, 20)])
def test_a_larger_mask_of_heads_is_cut_head_by_head(nq, nk):
    whole = masks.per_head([masks.causal(32), masks.window(32, left=3, right=0)])
    rows = Override(whole).rows(nq, nk)
    assert np.array_equal(rows.dense(), whole.dense()[..., nk - nq : nk, :nk])


def test_masks_of_parts_are_of_their_sizes():
    """A mask of one size for several calls; of a call as it is; too small for either length."""
    whole = masks.random(12, 1, 0.5)
    for nq, nk in itertools.product((2, 3, 5), (5, 6, 9)):
        rows = Override(whole).rows(nq, nk)
        assert np.array_equal(rows.dense(), whole.dense()[nk - nq : nk, :nk])
    assert np.array_equal(
        Override(masks.random(12, 1, 0.4)).rows(5, 9).dense(),
        masks.random(12, 1, 0.4).dense()[4:9, :9],
    )
    cross = masks.window(5, 9, left=2, right=1)
    assert Override(cross).rows(5, 9) is cross
    for nq, nk in ((13, 4), (4, 13)):
        with pytest.raises(ValueError, match=r"the mask of sparsify is \(12, 12\), too small for"):
            Override(whole).rows(nq, nk)


def test_sparsified_model_generates_from_its_cache():
    model = nh.sparsify(make("llama"), masks.local(32, block=4, width=1))
    ids = torch.randint(3, TOKENS, (2, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached, anew = (model.generate(ids, **options, use_cache=flag) for flag in (True, False))
    assert torch.equal(cached, anew)


def test_compiled_and_checkpointed():
    model, given = make("llama"), inputs("llama")
    want = results(model, given)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        logits = compiled(**given).logits[given["attention_mask"].bool()]
    assert_close(logits, torch.tensor(want[0]))
    model.train().gradient_checkpointing_enable()
    for got, expected in zip(results(model, given), want, strict=True):
        assert np.array_equal(got, expected)


def test_dropout_in_training():
    model, given = make("gpt2", attn_pdrop=0.5).train(), inputs("gpt2")
    first, second = (results(model, given)[1] for _ in range(2))
    assert first != second


def test_bidirectional_decoder():
    model = make("llama", is_causal=False)
    ids = torch.randint(3, TOKENS, (1, 12))
    assert changed_rows(model, ids, 5) == list(range(12))


def test_name_is_no_kernel_of_flash_attn():
    from transformers import modeling_utils
    from transformers.utils import generic, logging

    for module in (modeling_utils, generic):
        asked = module.is_flash_attention_requested
        assert not asked(requested_attention_implementation="nbflash")
        assert asked(requested_attention_implementation="flash_attention_2")
    assert not generic.is_flash_attention_requested(make("gpt2").config)
    # Where nobody asks, nothing is put.
    assert not hasattr(logging, "is_flash_attention_requested")


def test_other_names_are_asked_of_transformers():
    """With all that the question has."""
    asked = registration._but_for_ours(lambda *given: given)
    ours, others = (SimpleNamespace(_attn_implementation=x) for x in ("nbflash", "eager"))
    assert asked(ours) is False
    assert asked(others, "nbflash") is False
    assert asked(others, "flash_attention_2", 3) == (others, "flash_attention_2", 3)
    assert asked(None, None, 2) == (None, None, 2)


def test_a_model_of_another_implementation_is_sparsified():
    model = nh.sparsify(make("gpt2", "eager"), masks.local(32, block=4, width=0))
    assert model.config._attn_implementation == "nbflash"
    assert changed_rows(model, torch.randint(3, TOKENS, (1, 16)), 5) == [5, 6, 7]


def test_modules_are_chosen_by_name_and_kind():
    model = make("gpt2")
    kind = type(model.transformer.h[0].attn)
    chosen = lambda name, module: isinstance(module, kind) and name.endswith("h.1.attn")
    nh.sparsify(model, masks.local(32, block=4), where=chosen)
    given = [name for name, x in model.named_modules() if getattr(x, layers.OVERRIDE, None)]
    assert given == ["transformer.h.1.attn"]


LAYER = torch.nn.Identity()
X = torch.zeros(1, 2, 4, 8)
REFUSED = {
    "weights": ({"output_attentions": True}, ValueError, "no output_attentions"),
    "two axes": ({"attention_mask": torch.ones(1, 4)}, ValueError, "must have 4 axes"),
    "list": ({"attention_mask": [1]}, TypeError, r"must be a masks\.Mask or a tensor"),
    "longer keys": ({"key": torch.zeros(1, 2, 6, 8)}, ValueError, "must be given for 4 queries"),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given, error, message):
    given = {"query": X, "key": X, "value": X, "attention_mask": None} | given
    with pytest.raises(error, match=message):
        nh.attention_of(LAYER, **given)


def test_sparsify_refuses():
    model = make("gpt2")
    with pytest.raises(TypeError, match=r"mask must be a masks\.Mask"):
        nh.sparsify(model, 3)
    nh.sparsify(model, masks.local(8, block=4))
    with pytest.raises(ValueError, match="too small"):
        model(input_ids=torch.zeros(1, 12, dtype=torch.long))


def test_pads_of_the_inputs_are_on_both_sides():
    kept = [inputs(name)["attention_mask"][1] for name in ("llama", "bert")]
    assert [int(x[0]) for x in kept] == [0, 1]
    assert int(kept[0].sum()) == LENGTH - PADS
    assert transformers.__version__
