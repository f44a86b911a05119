"""mask_of: for every function of transformers the cells that its own dense masks have."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from tensors import DEVICE, as_numpy
from transformers import masking_utils as theirs

import masks
import nbflash
from masks.interval import Interval
from nbflash.huggingface import mask_functions, mask_of
from nbflash.huggingface.layer_masks import LayerMask, Override, last_rows

#: Older releases do not remap positions.
remapped = getattr(theirs, "remap_positions_for_packed_sequence", lambda function, places: function)

SIZES = {  # queries, keys, first query, first key
    "square": (12, 12, 0, 0),
    "one query": (1, 12, 11, 0),
    "behind a cache": (4, 12, 8, 0),
    "a longer cache": (4, 20, 8, 0),
    "keys of a window": (3, 7, 9, 5),
    "queries before the keys": (6, 5, 0, 3),
}
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(5),
    "window of later keys": theirs.sliding_window_overlay(3),
    "window of both sides": theirs.sliding_window_bidirectional_mask_function(3),
    "union": theirs.or_masks(
        theirs.sliding_window_causal_mask_function(2),
        theirs.sliding_window_bidirectional_overlay(1),
    ),
    "padding among functions": theirs.and_masks(
        theirs.causal_mask_function,
        theirs.padding_mask_function(torch.arange(48).reshape(2, 24) % 5 > 0),
    ),
}
PADDING = {
    "none": None,
    "left": [[0] * 3 + [1] * 9, [1] * 12],
    "right": [[1] * 10 + [0] * 2, [1] * 5 + [0] * 7],
    "holes": [[1, 0] * 6, [1] * 12],
    "equal holes": 2 * [[2, 0] * 6],  # of integers, as tokenizers give them
}
CASES = list(itertools.product(FUNCTIONS, SIZES, PADDING))


def dense(**given):
    """What transformers makes, as an array of all batch entries."""
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return theirs.sdpa_mask(**given).cpu().numpy()


def cells(mask, batch):
    array = mask.mask.dense()
    array = array if array.ndim == 4 else array[None, None]
    return np.broadcast_to(array, (batch, *array.shape[1:]))


@pytest.mark.parametrize(("function", "size", "padding"), CASES, ids="-".join)
def test_known_functions(function, size, padding, monkeypatch):
    nq, nk, q_offset, kv_offset = SIZES[size]
    kept = PADDING[padding]
    given = {
        "batch_size": 2,
        "q_length": nq,
        "kv_length": nk,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": None if kept is None else torch.tensor(kept),
    }
    as_flags = {"attention_mask": None if kept is None else torch.tensor(kept) > 0}
    want = dense(**given | as_flags)
    monkeypatch.setattr(mask_functions._Place, "evaluate", None)  # all of them are read
    mask = mask_of(**given)
    assert np.array_equal(cells(mask, 2), want)
    if function == "padding among functions":
        return
    if padding == "equal holes":
        assert mask.mask.batch is None
    elif padding != "holes":
        assert all(isinstance(plane, Interval) for plane in mask.mask.planes)


def packed(function, places, nested=False):
    ids = theirs.find_packed_sequence_indices(places)
    within = remapped(function, places)
    if nested:
        both = theirs.and_masks(theirs.bidirectional_mask_function, within)
        within = theirs.or_masks(both, within)
    return theirs.and_masks(within, theirs.packed_sequence_mask_function(ids))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("function", [x for x in FUNCTIONS if "padding" not in x])
def test_packed_sequences(function, nested, monkeypatch):
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]])
    sizes = {"batch_size": 2, "q_length": 8, "kv_length": 8}
    given = sizes | {"mask_function": packed(FUNCTIONS[function], places, nested)}
    want = dense(**given)
    monkeypatch.setattr(mask_functions._Place, "evaluate", None)
    assert np.array_equal(cells(mask_of(**given), 2), want)


def images(b, h, q, kv):
    return (q // 3 == kv // 3) & (b >= 0)


OTHERS = {
    "one's own": images,
    "joined": theirs.or_masks(theirs.causal_mask_function, images),
    "chunks": theirs.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "blocks": theirs.blockwise_overlay(torch.tensor([[0] * 6 + [-1] * 6, [1] * 12])),
    "other places": remapped(
        theirs.causal_mask_function, torch.tensor([[5, 3, 1] * 4, list(range(12))])
    ),
}


@pytest.mark.parametrize("size", ["square", "behind a cache", "keys of a window"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_evaluated(name, size):
    names = "q_length", "kv_length", "q_offset", "kv_offset"
    given = dict(zip(names, SIZES[size], strict=True))
    given |= {"batch_size": 2, "mask_function": OTHERS[name], "device": DEVICE}
    assert np.array_equal(cells(mask_of(**given), 2), dense(**given))


def test_a_function_of_one_batch_entry_alone_is_mapped():
    """transformers says whether a function takes tensors of indices, or numbers alone."""

    def function(b, h, q, kv):
        return torch.stack([q, kv]).max() == q

    given = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": function}
    mask = mask_of(**given, use_vmap=True).mask
    assert np.array_equal(mask.dense(), masks.causal(6).dense())


def test_what_is_evaluated_and_where(monkeypatch):
    seen = []
    evaluate = lambda **given: seen.append(given) or torch.ones(3, 1, 4, 9, dtype=torch.bool)
    monkeypatch.setattr(theirs, "sdpa_mask", evaluate)
    mask_of(3, 4, 9, 5, 2, images, use_vmap=True, device="meta")
    sizes = {"batch_size": 3, "q_length": 4, "kv_length": 9, "q_offset": 5, "kv_offset": 2}
    how = {"mask_function": images, "use_vmap": True, "device": "meta"}
    how |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    assert seen == [sizes | how]


def test_functions_of_the_same_name_are_others():
    sliding_window, padding_mask = 2, torch.zeros(1, 6, dtype=torch.bool)

    def inner_mask(b, h, q, kv):
        return (kv > q - sliding_window) & (kv > q - 1 - padding_mask.sum())

    for name in ("sliding_window_overlay", "padding_mask_function"):
        inner_mask.__qualname__ = f"{name}.<locals>.inner_mask"
        given = {"batch_size": 1, "q_length": 6, "kv_length": 6, "device": DEVICE}
        given["mask_function"] = inner_mask
        assert np.array_equal(cells(mask_of(**given), 1), dense(**given))


def test_what_transformers_asks_of_a_mask():
    mask = mask_of(3, 5, 7, 2)
    assert (mask.shape, mask.ndim) == ((3, 1, 5, 7), 4)
    assert mask.to("cpu", torch.float32) is mask
    assert repr(mask) == str(mask) == f"ModelMask({mask.mask})"
    assert mask_functions.numbered(int(mask.number))[0] is mask.mask


def test_equal_batch_entries_have_one_mask():
    dense = (torch.rand(1, 2, 5, 7) < 0.5).repeat(3, 1, 1, 1)
    mask = mask_functions.from_tensor(dense)
    assert (mask.batch, mask.heads) == (None, 2)
    dense[2, 1, 4, 6] ^= True
    assert np.array_equal(mask_functions.from_tensor(dense).dense(), as_numpy(dense))


def test_no_queries_are_decoded():
    assert last_rows(masks.dense(0, 5)) is None


def test_masks_of_more_sequences_are_others():
    one, two = (mask_of(batch, 8, 8) for batch in (1, 2))
    assert (one.shape[0], two.shape[0]) == (1, 2)


def test_equal_masks_are_one_object():
    first, second = (mask_of(1, 8, 8) for _ in range(2))
    assert first is second
    offsets = dict.fromkeys(("q_offset", "kv_offset"), torch.tensor(0))
    assert mask_of(1, 8, 8, **offsets) is first


def test_a_mask_cannot_be_cut():
    with pytest.raises(TypeError, match="cannot be cut"):
        mask_of(2, 6, 8)[:, :, :, :8]


def of_a_layer(kind, override=None):
    return LayerMask(kind, None, override, False, False).mask(7, 7)


MADE = {
    "model": lambda: mask_of(3, 7, 7).mask,
    "causal": lambda: of_a_layer("causal"),
    "dense": lambda: of_a_layer("dense"),
    "cut": lambda: of_a_layer("dense", Override(masks.random(9, 1, 0.4))),
}


@pytest.mark.parametrize("kind", MADE)
def test_clear_cache_lets_masks_go(kind):
    held = weakref.ref(MADE[kind]())
    assert held() is not None  # for the next layer
    nbflash.clear_cache()
    gc.collect()
    assert held() is None


def test_a_mask_of_inference_may_be_kept_for_a_training():
    with torch.inference_mode():
        mask = mask_of(1, 5, 5)
    assert not mask.number.is_inference()
