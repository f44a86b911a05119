"""BlockMap: lists, maps and CSR against their dense masks, and what is made of wrong contents."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from api_calls import run_all
from cuda_arrays import DeviceArray
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import masks
import nbflash
from nbflash import BlockMap
from nbflash.planning.dispatch import IMPLEMENTATIONS, plans_on_device
from nbflash.testing import make_qkv

SEED = st.integers(0, 2**32 - 1)


@st.composite
def block_maps(draw, valid=False):
    """A map and its definition (batch, heads, nq, nk): unsorted, with duplicates, out of range."""
    rng = np.random.default_rng(draw(SEED))
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    block = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    extent = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    k = draw(st.integers(0, 2 * columns))
    beyond = 0 if valid else 3
    indices = rng.integers(-beyond, columns + beyond, (*extent, rows, k))
    counts = rng.integers(0, k + 1, (*extent, rows)) if draw(st.booleans()) else None
    within = draw(st.sampled_from([None, "causal", "window"]))
    within = {
        None: None,
        "causal": masks.causal(*shape),
        "window": masks.window(*shape, left=9, right=3),
    }[within]
    made = BlockMap(indices, counts, shape=shape, block=block, within=within)
    return made, definition(indices, counts, shape, block, within)


def definition(indices, counts, shape, block, within=None):
    """Cell by cell: is the key's block among the first entries of the query's row?"""
    q, kv = np.arange(shape[0])[:, None], np.arange(shape[1])
    cells = np.zeros((*indices.shape[:2], *shape), bool)
    for place in np.ndindex(cells.shape[:2]):
        for r, row in enumerate(indices[place]):
            listed = row if counts is None else row[: counts[place][r]]
            cells[place] |= (q // block[0] == r) & np.isin(kv // block[1], listed)
    return cells if within is None else cells & within.dense()


def every_plane(mask, extent):
    return np.broadcast_to(mask.dense(), (*extent, *mask.shape))


@settings(max_examples=150)
@given(block_maps())
def test_mask_of_a_map_is_its_definition(case):
    made, cells = case
    assert np.array_equal(every_plane(made.to_mask(), cells.shape[:2]), cells)


@settings(max_examples=50)
@given(block_maps())
def test_map_of_booleans_and_csr_are_the_same_map(case):
    made, cells = case
    again = BlockMap.from_dense(made.dense(), shape=made.shape, block=made.block)
    assert np.array_equal(again.dense(), made.dense())
    of_csr = []
    for plane in made.dense().reshape(-1, *made.grid_shape):
        lists = sparse.csr_array(plane)
        form = {"shape": made.shape, "block": made.block, "within": made.within}
        part = BlockMap.from_csr(lists.indptr, lists.indices, **form)
        assert part.within is made.within
        of_csr.append(part.dense()[0, 0])
    assert np.array_equal(np.reshape(of_csr, made.dense().shape), made.dense())
    if made.within is not None:
        assert np.array_equal(every_plane((again & made.within).to_mask(), cells.shape[:2]), cells)
        assert np.array_equal(every_plane((made.within & again).to_mask(), cells.shape[:2]), cells)


@settings(max_examples=30)
@given(block_maps())
def test_a_map_within_several_masks(case):
    made, cells = case
    other = masks.window(*made.shape, left=3, right=20)
    for joined in (made & other, other & made):
        found = every_plane(joined.to_mask(), cells.shape[:2])
        assert np.array_equal(found, cells & other.dense())


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint64])
def test_lists_of_several_heads_in_one_csr(dtype):
    indptr = np.array([[[0, 2, 2], [2, 3, 6]]], dtype)
    indices = np.array([3, 0, 1, 2, 2, 0], dtype)
    made = BlockMap.from_csr(indptr, indices, shape=(8, 16), block=4)
    assert made.width == 3
    rows = [[[1, 0, 0, 1], [0, 0, 0, 0]], [[0, 1, 0, 0], [1, 0, 1, 0]]]
    assert np.array_equal(made.dense(), np.array([rows], bool))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_takes_a_map_where_it_takes_a_mask(impl, heads):
    """A map for every query head, for every K/V head, or for all; with causal."""
    rng = np.random.default_rng(heads)
    indices = rng.integers(0, 5, (2, heads, 4, 3))
    made = BlockMap(indices, shape=(29, 37), block=8)
    arrays = make_qkv(2, 29, 37, 4, 2, 16, ml_dtypes.bfloat16)
    got, expected = (run_all(impl, *arrays, mask, causal=True) for mask in (made, made.to_mask(4)))
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a, b)
    plan = nbflash.plan(*arrays[:3], made, causal=True, impl=impl)
    assert np.array_equal(plan(*arrays[:3])[0], got[0])
    assert nbflash.why_not(impl, *arrays[:3], made) == []


def test_contents_are_read_when_the_call_runs():
    indices = np.zeros((1, 1, 2, 1), np.int32)
    made = BlockMap(indices, shape=(8, 8), block=4)
    q, k, v, _ = make_qkv(1, 8, 8, 1, 1, 4)
    first = nbflash.attention(q, k, v, made)
    indices[...] = 1
    assert np.array_equal(
        nbflash.attention(q, k, v, made), nbflash.attention(q, k, v, made.to_mask())
    )
    assert not np.array_equal(nbflash.attention(q, k, v, made), first)


def test_decode_takes_a_map():
    q, k, v, _ = make_qkv(2, 4, 32, 4, 2, 8)
    made = BlockMap(np.array([[[[0, 2]]]]), shape=(4, 32), block=(4, 8))
    lengths = np.array([32, 32], np.int32)
    got, expected = (nbflash.decode(q, k, v, lengths, mask=mask) for mask in (made, made.to_mask()))
    assert np.array_equal(got, expected)


@settings(max_examples=30)
@given(block_maps(valid=True))
def test_valid_contents_pass_the_check(case):
    case[0].check()


def made(indices, counts=None, **changes):
    given = {"shape": (8, 12), "block": 4} | changes
    return BlockMap(np.array(indices), counts, **given)


def test_each_axis_of_the_lists_is_in_the_key_of_a_plan():
    shapes = (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 2, 3)
    layouts = [made(np.zeros(shape, np.int32)).layout for shape in shapes]
    assert len(set(layouts)) == len(shapes)


def test_too_many_entries_are_an_error_that_says_how_many():
    counts = np.array([[[1, 7]]])
    full = made([[[[0, 1], [2, 1]]]], counts)
    for call in (
        full.check,
        full.to_mask,
        lambda: made([[[[0, 1], [2, 1]]]], counts, checked=True),
    ):
        with pytest.raises(ValueError, match=r"needs 7 entries, and indices has room for k=2"):
            call()


FAR = [(3, np.int64), (-1, np.int64), (2**32, np.int64), (-(2**32), np.int64), (200, np.uint8)]
FAR += [(x, np.int32) for x in (3, 4, -1, -2, -4, 2**31 - 1, -(2**31))]  # which are not copied


@pytest.mark.parametrize(("bad", "dtype"), FAR)
def test_index_out_of_range_is_ignored_or_refused(bad, dtype):
    """By what is made of the lists and by attention alike."""
    indices = np.array([[[[0, bad], [2, 1]]]], dtype)
    kept = [[True, False, False], [False, True, True]]
    assert made(indices).dense().tolist() == [[kept]]
    mask = made(indices).to_mask()
    assert np.array_equal(mask.dense(), np.repeat(np.repeat(kept, 4, 0), 4, 1))
    q, k, v, _ = make_qkv(1, 8, 12, 1, 1, 8)
    out = nbflash.attention(q, k, v, made(indices))
    assert np.array_equal(out, nbflash.attention(q, k, v, mask))
    with pytest.raises(ValueError, match=r"indices\[\(0, 0, 0, 1\)\] is out of range: there are 3"):
        made(indices, checked=True)


WRONG = {
    "floats": (lambda: made([[[[0.5], [1.0]]]]), TypeError, "indices must be of integers, got fl"),
    "axes": (lambda: made([[0], [1]]), ValueError, r"indices must have 4 axes .* got shape \(2, 1"),
    "rows": (lambda: made([[[[0]]]]), ValueError, "indices must have 2 rows of blocks, got 1"),
    "no heads": (
        lambda: made(np.zeros((1, 0, 2, 1), int)),
        ValueError,
        "at least one batch element and one head",
    ),
    "counts": (
        lambda: made([[[[0], [1]]]], np.zeros((1, 1, 3), int)),
        ValueError,
        r"counts must have shape \(1, 1, 2\), one for each row",
    ),
    "block": (lambda: made([[[[0], [1]]]], block=(4, 4, 4)), ValueError, "block=.*must be a pair"),
    "within an array": (
        lambda: made([[[[0], [1]]]], within=np.ones((8, 12), bool)),
        TypeError,
        "within is ndarray: must be a masks.Mask",
    ),
    "within of another size": (
        lambda: made([[[[0], [1]]]], within=masks.causal(8)),
        ValueError,
        r"within has shape \(8, 8\): must have \(8, 12\)",
    ),
    "within blocks": (
        lambda: made([[[[0], [1]]]]) & masks.strided(8, 1, 2, 2),
        ValueError,
        "within has shape",
    ),
    "within no intervals": (
        lambda: BlockMap(np.zeros((1, 1, 2, 1), int), shape=8, block=4) & masks.butterfly(8, 2),
        TypeError,
        "must have an interval of keys in each row",
    ),
    "within another batch": (
        lambda: made(np.zeros((2, 1, 2, 1), int), within=masks.padding([1, 2, 3], 8, 12)),
        ValueError,
        "within has batch=3, but the block map has batch=2",
    ),
    "within other heads": (
        lambda: made(np.zeros((1, 2, 2, 1), int), within=masks.per_head([masks.causal(8, 12)] * 3)),
        ValueError,
        "within has heads=3, but the block map has heads=2",
    ),
    "heads": (
        lambda: made(np.zeros((1, 2, 2, 1), int)).to_mask(3),
        ValueError,
        "heads=3: must be a multiple of the 2 heads of the map",
    ),
    "dense of numbers": (
        lambda: BlockMap.from_dense(np.zeros((1, 1, 2, 3)), shape=(8, 12), block=4),
        TypeError,
        "keep must be bool",
    ),
    "dense of another size": (
        lambda: BlockMap.from_dense(np.zeros((1, 1, 2, 4), bool), shape=(8, 12), block=4),
        ValueError,
        "keep must have 3 columns of blocks, got 4",
    ),
    "csr of two axes": (
        lambda: BlockMap.from_csr(np.zeros((1, 3), int), np.zeros(0, int), shape=(8, 12), block=4),
        ValueError,
        "indptr must have shape",
    ),
    "csr without an end": (
        lambda: BlockMap.from_csr(np.zeros(0, int), np.zeros(0, int), shape=(8, 12), block=4),
        ValueError,
        "indptr must have shape",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_as_many_entries_as_the_intervals_have():
    """Or one for all of them; each is under its own."""
    lengths = [5, 12]
    within = masks.padding(lengths, 12)
    for batch in (1, 2):
        keep = np.ones((batch, 1, 3, 3), bool)
        found = BlockMap.from_dense(keep, shape=(12, 12), block=4, within=within)
        for plane, length in zip(found.to_mask(1).planes, lengths, strict=True):
            assert (plane.dense() == masks.padding([length], 12).dense()).all()


def test_nothing_but_a_mask_is_joined():
    with pytest.raises(TypeError):
        made([[[[0], [1]]]]) & True


def test_repr():
    text = repr(made([[[[0], [1]]]]) & masks.causal(8, 12))
    assert text == (
        "<BlockMap 8 x 12, blocks of 4x4, batch=None, heads=None, k=1, in host memory, within "
        "<Interval mask 8 x 12>>"
    )


def test_a_map_is_planned_on_the_device_for_kernels_in_its_own_memory(cupy):
    on_host = BlockMap(np.zeros((1, 1, 2, 1), np.int32), shape=16, block=8)
    q, on_device = np.zeros((1, 16, 1, 8), np.float32), DeviceArray((1, 16, 1, 8))
    plans = {impl: plans_on_device(impl, q, on_host) for impl in ("auto", *IMPLEMENTATIONS, None)}
    kernels = {"sm90", "sm80", "simt"}
    assert {impl for impl, planned in plans.items() if planned} == kernels
    of_device = SimpleNamespace(indices=DeviceArray((1, 1, 2, 1), np.int32))
    of_another = SimpleNamespace(indices=DeviceArray((1, 1, 2, 1), np.int32, device_id=1))
    for impl in ("auto", "simt", "cpu"):
        assert plans_on_device(impl, on_device, of_device)
        assert not plans_on_device(impl, on_device, of_another)
        assert not plans_on_device(impl, on_device, on_host)
        assert not plans_on_device(impl, q, of_device)
