"""Sparsified models with caches, step by step against the same ones without a cache.

In static caches keys have room behind the last token; in those of windows the first ones are gone.
"""

import itertools

import numpy as np
import pytest
import torch
from models import TOKENS, make
from tensors import assert_close
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache
from transformers import masking_utils as theirs

import masks
from nbflash import huggingface as nh
from nbflash.huggingface import mask_functions
from nbflash.huggingface.layer_masks import Override, last_rows

MASK = masks.block_diagonal(32, 5)  # no function of distance
DENSE = np.random.default_rng(0).random((12, 12)) < 0.5


def last_of(nq, nk):
    """As `MASK`, of as many tokens as there are."""
    return masks.restrict(masks.block_diagonal(nk, 5), range(nk - nq, nk))


OVERRIDES = {
    "mask": MASK,
    "function": last_of,
    "heads": masks.per_head([MASK, masks.strided(32, 1, 2, 5), masks.dense(32), MASK]),
}


def sparsified(name, override):
    """In float64, of a model with a window of 6 tokens where it has one."""
    return nh.sparsify(make(name).double(), OVERRIDES[override])


def assert_steps_are_those_without_a_cache(model, cache, pads=0):
    """Logits of generated tokens, of two samples, the second of them with padding on the left."""
    ids, kept = torch.randint(3, TOKENS, (2, 12)), torch.ones(2, 16, dtype=torch.long)
    kept[1, :pads] = 0
    given = {"cache_implementation": cache, "max_new_tokens": 5, "min_new_tokens": 5}
    given |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=kept[:, :12], do_sample=False, **given)
        want = model(out.sequences[:, :-1], attention_mask=kept, use_cache=False).logits[:, 11:]
    assert_close(torch.stack(out.logits, dim=1), want.float())


@pytest.mark.parametrize(
    ("name", "cache", "override", "pads"),
    [
        ("llama", "static", "mask", 0),
        ("llama", "static", "function", 3),
        ("llama", "static", "heads", 3),
        ("mistral", "dynamic", "mask", 3),
        ("mistral", "dynamic", "function", 0),
        ("mistral", "static", "mask", 0),
        ("mistral", "static", "heads", 3),
        ("gemma2", "static", "function", 0),  # layers of both kinds
    ],
)
def test_generated_step_by_step(name, cache, override, pads):
    assert_steps_are_those_without_a_cache(sparsified(name, override), cache, pads)


@pytest.mark.parametrize(("name", "override"), [("llama", "mask"), ("mistral", "function")])
def test_generated_by_compiled_layers(name, override):
    """A graph of a static cache serves every place."""
    model = sparsified(name, override)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    assert_steps_are_those_without_a_cache(model, "static")
    if name == "llama":
        assert counter.frame_count <= 2 * 3  # of two layers; a third one each without a cache


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize(
    ("name", "cache", "override"),
    [
        ("llama", "static", "mask"),
        ("llama", "static", "function"),
        ("mistral", "dynamic", "mask"),
        ("mistral", "dynamic", "heads"),
        ("mistral", "static", "function"),
    ],
)
def test_chunks_of_a_prompt(name, cache, override):
    """And single tokens; a static cache has room for more tokens than the mask."""
    model = sparsified(name, override)
    made = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
    }[cache]()
    ids = torch.randint(3, TOKENS, (2, 20))
    with torch.no_grad():
        parts = [
            model(ids[:, start:end], past_key_values=made).logits
            for start, end in itertools.pairwise((0, 4, 11, 17, 18, 19, 20))
        ]
        assert_close(torch.cat(parts, dim=1), model(ids, use_cache=False).logits)


PLACES = {  # queries, keys, first query, first key
    "a static cache": (3, 9, 2, 0),
    "one with room for more than the mask": (3, 20, 2, 0),
    "a window": (1, 5, 9, 5),
    "a window with room for more than the mask": (2, 6, 10, 8),
    "keys past the end alone": (2, 4, 0, 14),
}


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_rows_and_columns_by_definition(place, heads):
    """Keys past the end are not attended; of a function they are those behind the last query."""
    nq, nk, q_offset, kv_offset = PLACES[place]
    plain = masks.from_dense(DENSE)
    square = masks.per_head([plain, masks.causal(12)]) if heads else plain
    wide = np.pad(square.dense(), [(0, 0)] * (2 * heads) + [(0, 0), (0, 20)])
    want = wide[..., q_offset : q_offset + nq, kv_offset : kv_offset + nk]
    assert np.array_equal(Override(square).rows(*PLACES[place]).dense(), want)
    calls, n = [], q_offset + nq

    def function(*sizes):
        calls.append(sizes)
        return masks.restrict(square, range(n - nq, n), range(n))

    rows = Override(function).rows(*PLACES[place])
    assert calls == [(nq, n)]
    assert np.array_equal(rows.dense(), want & (np.arange(nk) + kv_offset < n))


def test_rows_of_a_causal_mask_in_a_longer_cache_are_decoded():
    for override in (masks.causal(12), lambda nq, nk: masks.causal(nq, nk)):
        assert last_rows(Override(override).rows(2, 20, 9, 0)) == (11, None)
        assert last_rows(Override(override).rows(2, 7, 9, 5)) == (6, None)


@pytest.mark.parametrize("place", [(1, 20, 12, 0), (4, 20, 9, 0), (1, 5, 12, 8), (1, 1, 12, 12)])
def test_more_tokens_than_the_mask_has(place):
    with pytest.raises(ValueError, match=r"mask of sparsify is \(12, 12\), too small for 13 tok"):
        Override(masks.causal(12)).rows(*place)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda nq, nk: masks.window(nk, left=2, right=0), ValueError, r"gave \(10, 10\) for"),
        (lambda nq, nk: masks.causal(nq, nk + 3), ValueError, r"gave \(1, 13\) for \(1, 10\)"),
        (lambda nq, nk: np.ones((nq, nk), bool), TypeError, "gave ndarray, no masks.Mask"),
    ],
)
def test_functions_of_other_masks_are_refused(function, error, match):
    with pytest.raises(error, match=match):
        Override(function).rows(1, 10)


def test_masks_of_other_places_are_others():
    """Offsets may be tensors, as those of static caches; equal masks are one all the same."""
    first, second = (nh.mask_of(1, 1, 5, torch.tensor(q), kv) for q, kv in ((4, 0), (7, 3)))
    assert (first.place, second.place) == ((4, 0), (7, 3))
    assert first.mask == second.mask
    assert mask_functions.numbered(int(first.number)) == (first.mask, (4, 0))
    assert mask_functions.numbered(int(second.number)) == (first.mask, (7, 3))
    assert nh.mask_of(1, 1, 5, 4, 0) is first


def test_attention_to_an_encoder_has_no_place():
    """A decoder's queries begin at 0 there whatever they are: the last ones are meant."""
    every = theirs.bidirectional_mask_function
    overlaid = theirs.and_masks(every, theirs.sliding_window_bidirectional_overlay(3))
    for function in (every, overlaid):
        assert nh.mask_of(1, 2, 9, mask_function=function).place == (7, 0)
        assert nh.mask_of(1, 2, 9, 3, 0, mask_function=function).place == (3, 0)
        assert nh.mask_of(1, 2, 9, 0, 3, mask_function=function).place == (0, 3)
    assert nh.mask_of(1, 2, 9).place == (0, 0)
