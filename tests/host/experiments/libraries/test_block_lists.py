"""Block lists for libraries that take them, and what libraries leave out."""

import numpy as np
import pytest

import masks
from experiments.harness.grid import BLOCKS, CAUSAL, Case
from experiments.libraries.base import block_lists
from experiments.libraries.registry import LIBRARIES


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
