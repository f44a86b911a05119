"""Models with any padding, any mask of `sparsify` and any cache against plain attention.

The plain model attends by its definition, in float64, to all tokens at once.
"""

import itertools

import numpy as np
import pytest
import torch
import transformers
from fuzzing import drawn_masks
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from models import DECODERS, TOKENS, exact, exact_mask, like, make
from tensors import assert_close
from transformers import DynamicCache, StaticCache

import masks
from nbflash import huggingface as nh

MODELS = {name: make(name).double() for name in DECODERS}
_within = [None]


def exact_within(module, query, key, value, mask, **options):
    """Plain attention, within the pairs of `_within` besides."""
    n = query.shape[2]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool) if mask is None else mask
    return exact(module, query, key, value, mask & _within[0], **options)


transformers.AttentionInterface.register("exact_within", exact_within)
transformers.AttentionMaskInterface.register("exact_within", exact_mask)
PLAIN = {name: like(model, "exact_within") for name, model in MODELS.items()}


@st.composite
def prompts(draw):
    """A model, tokens of which some are padding, in parts, and a mask or none."""
    name, n = draw(st.sampled_from(DECODERS)), draw(st.integers(2, 20))
    batch = draw(st.integers(1, 2))
    kept = np.ones((batch, n), int)
    for row in kept:
        pads = draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0
        row[:pads] = 0
    cuts = draw(st.lists(st.integers(1, n - 1), max_size=4, unique=True).map(sorted))
    room = n + draw(st.integers(0, 5))
    drawn = draw(st.none() | drawn_masks.plain(room, room) | per_head(room))
    return name, kept, [0, *cuts, n], drawn, room


@st.composite
def per_head(draw, n):
    few = draw(st.lists(drawn_masks.plain(n, n, 1), min_size=4, max_size=4))
    return drawn_masks.joined("per_head", few)


def override_of(drawn, as_function):
    """A mask, or the function that makes that of the last queries."""
    if drawn is None or not as_function:
        return drawn and drawn.mask
    return lambda nq, nk: masks.restrict(drawn.mask, range(nk - nq, nk), range(nk))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@examples(3)
@given(prompts(), st.sampled_from(["none", "dynamic", "static"]), st.booleans(), drawn_masks.SEEDS)
def test_prompts_in_parts(given, kind, as_function, seed):
    name, kept, cuts, drawn, room = given
    model, plain, (batch, n) = MODELS[name], PLAIN[name], kept.shape
    torch.manual_seed(seed)
    ids, kept = torch.randint(3, TOKENS, (batch, n)), torch.tensor(kept)
    cells = np.ones((n, n), bool) if drawn is None else drawn.cells[..., :n, :n]
    _within[0] = torch.tensor(cells)
    nh.sparsify(model, override_of(drawn, as_function))
    cache = {
        "none": lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=room),
    }[kind]()
    cuts = [0, n] if cache is None else cuts
    with torch.no_grad():
        want = plain(ids, attention_mask=kept, use_cache=False).logits
        parts = [
            model(
                ids[:, start:end],
                attention_mask=kept[:, :end],
                past_key_values=cache,
                use_cache=cache is not None,
            ).logits
            for start, end in itertools.pairwise(cuts)
        ]
    real = kept > 0
    assert_close(torch.cat(parts, dim=1)[real], want[real])


@examples(2)
@given(prompts(), drawn_masks.SEEDS)
def test_gradients(given, seed):
    name, kept, _, drawn, _ = given
    torch.manual_seed(seed)
    ids, kept = torch.randint(3, TOKENS, kept.shape), torch.tensor(kept)
    n, labels = ids.shape[1], ids.masked_fill(kept == 0, -100)
    _within[0] = torch.tensor(True if drawn is None else drawn.cells[..., :n, :n])
    nh.sparsify(MODELS[name], drawn and drawn.mask)
    found = []
    for model in (MODELS[name], PLAIN[name]):
        model.zero_grad()
        logits = model(ids, attention_mask=kept, use_cache=False).logits
        logits[labels >= 0].square().mean().backward()
        found.append([x.grad for x in model.parameters() if x.grad is not None])
    assert_close(*found)
