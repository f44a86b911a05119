"""What cudnn-frontend is given of a mask, and what it is left out of; NumPy in its place."""

import sys

import numpy as np
import pytest
from scipy.sparse import csr_array

import masks
from experiments.harness.grid import BLOCKS, CAUSAL, Case, random_rows
from experiments.libraries.cudnn_frontend import CudnnFrontend, index_lists
from experiments.libraries.registry import LIBRARIES, why_not_here
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, make_qkv

N, TILE = 256, 64


def case_of(mask, tile=TILE, kind=BLOCKS, head_dim=64):
    return Case("a mask", kind, mask, 1.0, tile, (2, mask.shape[0], 3, head_dim))


def test_lists_of_rows_of_one_length():
    mask = masks.butterfly(N, TILE)
    lists = index_lists(case_of(mask))
    index = lists.pop("q2k_block_index")
    assert lists == {"block_sparse_num": 3, "sparse_block_size": 64}
    assert (index.dtype, index.shape) == (np.int32, (2, 3, 4, 3))
    assert index.flags.c_contiguous
    expected = [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]
    np.testing.assert_array_equal(index, np.broadcast_to(expected, index.shape))


def test_lists_of_rows_of_other_lengths():
    lists = index_lists(case_of(masks.local(N, TILE, 1)))
    index, nums = lists.pop("q2k_block_index"), lists.pop("q2k_block_nums")
    assert lists == {"sparse_block_size": 64}
    assert (nums.dtype, nums.shape) == (np.int32, (2, 3, 4))
    np.testing.assert_array_equal(nums, np.broadcast_to([2, 3, 3, 2], nums.shape))
    expected = [[0, 1, 0], [0, 1, 2], [1, 2, 3], [2, 3, 0]]
    np.testing.assert_array_equal(index, np.broadcast_to(expected, index.shape))


def test_a_mask_without_blocks_has_room_for_one():
    empty = masks.local(N, TILE, 0) - masks.dense(N)
    lists = index_lists(case_of(empty))
    assert lists["q2k_block_index"].shape == (2, 3, 4, 1)
    assert not lists["q2k_block_nums"].any()


def test_blocks_in_part_are_refused():
    with pytest.raises(ValueError, match="masks of whole blocks of 64 or 128 alone"):
        index_lists(case_of(masks.bigbird(N, TILE, causal=True)))


def test_what_it_is_left_out_of():
    why_not = LIBRARIES["cudnn-frontend"].why_not
    blocks = masks.local(N, TILE, 1)
    assert why_not(case_of(blocks)) == ""
    assert why_not(case_of(masks.local(384, 128, 1), tile=128, head_dim=128)) == ""
    whole = "masks of whole blocks of 64 or 128 alone"
    assert why_not(case_of(masks.causal(N), kind=CAUSAL)) == whole
    assert why_not(case_of(masks.local(N, 32, 1), tile=32)) == whole
    assert why_not(case_of(masks.local(250, TILE, 1))) == whole
    assert why_not(case_of(blocks, head_dim=256)) == "head_dim 64, 96 and 128 alone"


def test_a_machine_may_lack_it(monkeypatch):
    monkeypatch.setattr("experiments.libraries.registry.why_not_torch", lambda: "")
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "cudnn" in why_not_here("cudnn-frontend")
    assert why_not_here("sdpa-cudnn") == ""


class OnHost(CudnnFrontend):
    """The adapter, with NumPy in the place of torch."""

    def _own(self, x):
        return x.swapaxes(1, 2)

    _public = _own

    def _beside(self, x):
        return x


class StandIn:
    """The two functions, as their documentation has them, by the reference."""

    def __init__(self):
        self.calls = []

    def block_sparse_attention_forward(self, q, k, v, allow_empty_block_nums=False, **lists):
        self.calls.append(("forward", set(lists), allow_empty_block_nums))
        out, lse = reference.attention(*_public(q, k, v), _mask(q.shape, **lists))
        return {"o_tensor": out.swapaxes(1, 2), "lse_tensor": lse}

    def block_sparse_attention_backward(self, dout, q, k, v, out, lse, **lists):
        self.calls.append(("backward", set(lists)))
        mask = _mask(q.shape, **lists)
        exact_out, exact_lse = reference.attention(*_public(q, k, v), mask)
        np.testing.assert_array_equal(out.swapaxes(1, 2), exact_out)
        np.testing.assert_array_equal(lse, exact_lse)
        found = reference.attention_backward(*_public(dout, q, k, v), mask)
        names = ("dq_tensor", "dk_tensor", "dv_tensor")
        return {name: x.swapaxes(1, 2) for name, x in zip(names, found, strict=True)}


def _public(*arrays):
    return [x.swapaxes(1, 2) for x in arrays]


def _mask(
    shape,
    q2k_block_index,
    sparse_block_size,
    block_sparse_num=None,
    q2k_block_nums=None,
):
    """Of the first batch entry and head."""
    rows = q2k_block_index[0, 0]
    if q2k_block_nums is None:
        q2k_block_nums = np.full((1, 1, len(rows)), block_sparse_num)
    counts = q2k_block_nums[0, 0]
    dense = np.zeros((len(rows), shape[2] // sparse_block_size), bool)
    for row, columns, count in zip(dense, rows, counts, strict=True):
        row[columns[:count]] = True
    return masks.from_dense(dense.repeat(sparse_block_size, 0).repeat(sparse_block_size, 1))


BLOCKS_WITH_AN_EMPTY_ROW = csr_array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]])
MASKS = {
    "equal": (random_rows(N, TILE, 2), "block_sparse_num", False),
    "unequal": (masks.local(N, TILE, 1), "q2k_block_nums", False),
    "empty row": (masks.from_scipy(BLOCKS_WITH_AN_EMPTY_ROW, TILE), "q2k_block_nums", True),
}


@pytest.mark.parametrize("name", MASKS)
def test_it_is_told_the_mask(name, monkeypatch):
    mask, form, empty = MASKS[name]
    module = StandIn()
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    q, k, v, dout = make_qkv(1, N, N, 2, 2, 16, "float32", seed=0)
    case = Case("a mask", BLOCKS, mask, 1.0, TILE, q.shape)
    library = OnHost(q, k, v)
    exact, _ = reference.attention(q, k, v, mask)
    low, _ = low_precision(q, k, v, mask)
    assert_within_reference(library.forward(case)(), exact, low, "out")
    gradients = reference.attention_backward(dout, q, k, v, mask)
    for found in library.backward(case, dout)(), library.both(case, dout)():
        for got, expected in zip(found, gradients, strict=True):
            np.testing.assert_array_equal(got, expected)
    lists = {"q2k_block_index", "sparse_block_size", form}
    forward, backward = ("forward", lists, empty), ("backward", lists)
    assert module.calls == [forward, forward, backward, forward, backward]
