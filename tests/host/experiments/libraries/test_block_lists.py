"""What libraries are given of a mask, and what they leave out."""

from itertools import pairwise

import numpy as np
import pytest

import masks
from experiments.harness.grid import BLOCKS, CAUSAL, DOCUMENTS, PREFIX, WINDOW, Case
from experiments.libraries.base import block_lists
from experiments.libraries.flash_attn_4 import FlashAttention4
from experiments.libraries.flex_attention import mask_mod_of
from experiments.libraries.registry import LIBRARIES
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, make_qkv


@pytest.mark.parametrize("tile", [16, 32])
def test_block_lists_of_a_block_mask_are_full(tile):
    mask = masks.random(256, 32, 0.3, seed=1)
    (partial_counts, _), (counts, columns) = block_lists(mask, tile)
    assert not partial_counts.any()
    assert counts.dtype == columns.dtype == np.int32
    blocks = mask.dense()[::tile, ::tile]
    for i, row in enumerate(blocks):
        np.testing.assert_array_equal(columns[i, : counts[i]], np.flatnonzero(row))
        assert not columns[i, counts[i] :].any()


def test_block_lists_of_causal_have_a_diagonal_in_part():
    (counts, columns), (full_counts, full_columns) = block_lists(masks.causal(128), 32)
    np.testing.assert_array_equal(counts, [1, 1, 1, 1])
    np.testing.assert_array_equal(columns[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(full_counts, [0, 1, 2, 3])
    np.testing.assert_array_equal(full_columns[3], [0, 1, 2, 0])


def test_block_lists_of_empty_rows():
    (_, _), (counts, columns) = block_lists(masks.local(128, 32, 0) & masks.window(128, left=0), 32)
    assert (counts.shape, columns.shape) == ((4,), (4, 4))
    assert not counts.any()


def test_sdpa_is_left_out_of_block_masks():
    blocks, causal = (
        Case("a mask", kind, masks.dense(128), 0.5, 32, (2, 128, 2, 16))
        for kind in (BLOCKS, CAUSAL)
    )
    sdpa, flex = LIBRARIES["sdpa-flash"].func, LIBRARIES["flex-attention"]
    assert sdpa.why_not(blocks) == "dense and causal alone"
    assert sdpa.why_not(causal) == ""
    assert flex.why_not(blocks) == ""


N, LENGTHS = 128, [40, 1, 87]
MASKS = {
    CAUSAL: (masks.causal(N), {}),
    WINDOW: (masks.window(N, left=20, right=3), {"left": 20, "right": 3}),
    PREFIX: (masks.prefix(N, 50), {"prefix_len": 50}),
    DOCUMENTS: (masks.documents(LENGTHS), {"lengths": LENGTHS, "causal": False}),
}
CAUSAL_DOCUMENTS = masks.documents(LENGTHS, causal=True), {"lengths": LENGTHS, "causal": True}


def cases_of(*kinds):
    pairs = [(kind, *MASKS[kind]) for kind in kinds]
    if DOCUMENTS in kinds:
        pairs.append((DOCUMENTS, *CAUSAL_DOCUMENTS))
    return [
        Case(kind, kind, mask, 1.0, 32, (2, N, 2, 16), arguments=arguments)
        for kind, mask, arguments in pairs
    ]


@pytest.mark.parametrize("case", cases_of(*MASKS), ids=lambda case: case.name)
def test_functions_for_flex_attention_are_the_masks(case):
    q_idx, kv_idx = np.ogrid[:N, :N]
    kept = mask_mod_of(case, np.asarray)(0, 0, q_idx, kv_idx)
    np.testing.assert_array_equal(kept, case.mask.dense())


class OnHost(FlashAttention4):
    """The adapter, with NumPy in the place of torch."""

    def __init__(self):
        pass

    def _beside(self, x):
        return x


class StandIn:
    """The two functions of flash-attn-4, as its documentation has them."""

    @staticmethod
    def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
        left, right = (0 if causal and side else window_size[side] for side in (0, 1))
        left = None if causal else left
        return reference.attention(q, k, v, masks.window(q.shape[1], left=left, right=right))[
            0
        ], None

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    ):
        assert (cu_seqlens_q.dtype, max_seqlen_q) == (np.int32, np.diff(cu_seqlens_q).max())
        parts = [[x[None, a:b] for x in (q, k, v)] for a, b in pairwise(cu_seqlens_q)]
        of = masks.causal if causal else masks.dense
        return np.concatenate([reference.attention(*x, of(x[0].shape[1]))[0][0] for x in parts])


@pytest.mark.parametrize("case", cases_of(CAUSAL, WINDOW, DOCUMENTS), ids=lambda case: case.name)
def test_flash_attn_4_is_told_the_mask(case, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: StandIn)
    q, k, v, _ = make_qkv(2, N, N, 2, 2, 16, "float32", seed=0)
    found = OnHost()._attention(case)(q, k, v)
    exact, _ = reference.attention(q, k, v, case.mask)
    low, _ = low_precision(q, k, v, case.mask)
    assert_within_reference(found, exact, low, "out")


def test_masks_that_peers_have_no_function_for():
    prefix, window = cases_of(PREFIX, WINDOW)
    assert FlashAttention4.why_not(prefix) == "a mask_mod in the CuTe language alone"
    assert FlashAttention4.why_not(window) == ""
    assert LIBRARIES["sdpa-cudnn"].func.why_not(window) == "dense and causal alone"
