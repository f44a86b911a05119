"""The Hopper decode kernel over 8-bit quantised caches, and what their scales may be."""

import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES, check, check_tokens, contiguous, paged, same_bits
from decode_sm90_runs import run

import masks
from nbflash.definitions.quantised import dequantise, quantise

T = 64  # keys of a tile
CAPACITY = 3 * T
LENGTHS = np.array([0, 2, T + 1, CAPACITY], np.int32)
STORAGE = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}
NQ = 4
OUTLIER = np.float32(1e30)  # as a scale: float16 holds no two weights that are so far apart


def stored(nq, heads=(4, 2), storage="int8", dtype="bf16", lengths=LENGTHS):
    """q, caches and their scales; what lies behind ``lengths`` is NaN in all that can be."""
    q, *caches = contiguous(nq, heads, 16, DTYPES[dtype], lengths, CAPACITY)
    pairs = [quantise(x, STORAGE[storage]) for x in caches]
    return q, *zip(*pairs, strict=True)


def real(caches, scales):
    """The keys and values that the caches stand for."""
    return [dequantise(x, y, np.dtype(np.float32)) for x, y in zip(caches, scales, strict=True)]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("nq", "heads"), [(5, (8, 2)), (33, (1, 1)), (17, (4, 4))])
def test_more_rows_than_a_row_tile(nq, heads, storage):
    lengths = np.array([3, T + 20], np.int32)
    q, caches, scales = stored(nq, heads, storage, lengths=lengths)
    got = run(q, *caches, lengths, scales=scales)
    check(got, q, *real(caches, scales), lengths)


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("storage", STORAGE)
def test_scales_below_zero(storage, per):
    q, caches, scales = stored(2, storage=storage)
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (2, *scales[0].shape))
    scales = [x * sign for x, sign in zip(scales, signs, strict=True)]
    if per == "head":
        scales = [np.array(x, np.float32) for x in ([-0.01, 0.5], [2.0, -0.003])]
    got = run(q, *caches, LENGTHS, scales=scales)
    check(got, q, *real(caches, scales), LENGTHS)


@pytest.mark.parametrize("which", [0, 1], ids="kv")
def test_scales_of_zero(which):
    """All keys of one head, and some of the other's."""
    q, caches, scales = stored(2)
    scales[which][:, :, 0] = 0
    scales[which][:, ::3, 1] = 0
    got = run(q, *caches, LENGTHS, scales=scales)
    check(got, q, *real(caches, scales), LENGTHS)


@pytest.mark.parametrize("least", [1e-34, 1e-36])
def test_values_next_to_the_least_numbers(least):
    """The unit of their scales ends where its inverse does."""
    lengths = np.array([T + 5], np.int32)
    q, caches, scales = stored(1, lengths=lengths)
    scales[1][...] = least
    got = run(q, *caches, lengths, scales=scales)
    assert got[0].any()
    check(got, q, *real(caches, scales), lengths)


def test_lse_of_a_single_score_of_zero_is_zero():
    lengths = np.ones(1, np.int32)
    q, caches, scales = stored(1, lengths=lengths)
    scales[0][...] = 0
    got = run(q, *caches, lengths, scales=scales)
    assert not got[1].any()
    check(got, q, *real(caches, scales), lengths)


@pytest.mark.parametrize("page_size", [8, 24, 64, 96])
def test_page_sizes(page_size):
    q, caches, scales = stored(2, storage="e4m3")
    expected = run(q, *caches, LENGTHS, scales=scales)
    check(expected, q, *real(caches, scales), LENGTHS)
    *pages, table = paged(*caches, lengths=LENGTHS, page_size=page_size)
    *paged_scales, _ = paged(*scales, lengths=LENGTHS, page_size=page_size)
    assert same_bits(expected, run(q, *pages, LENGTHS, table, scales=paged_scales))


@pytest.mark.parametrize("masked", [False, True])
def test_splits_without_a_tile(masked):
    q, caches, scales = stored(2)
    mask = masks.dense(2, CAPACITY) if masked else None
    keep = (lambda b: np.ones((2, LENGTHS[b]), bool)) if masked else None
    got = run(q, *caches, LENGTHS, mask=mask, scales=scales, splits=7)
    check(got, q, *real(caches, scales), LENGTHS, keep=keep)


@pytest.mark.parametrize("storage", STORAGE)
def test_outliers_of_later_tokens(storage):
    """Without a mask: every draft has a scale, and each token sees its own and those before."""
    lengths = np.array([NQ, T + 2, CAPACITY], np.int32)
    q, caches, scales = stored(NQ, (4, 1), storage, lengths=lengths)
    for b, length in enumerate(lengths):
        scales[1][b, length - NQ + 1 : length] *= np.float32([1e10, 1e20, 1e30])[:, None]
    got = run(q, *caches, lengths, scales=scales)
    keys, tokens = np.arange(CAPACITY), np.arange(NQ)[:, None]
    dense = np.stack([keys <= length - NQ + tokens for length in lengths])
    check_tokens(got, q, *real(caches, scales), lengths, dense)


@pytest.mark.parametrize("splits", [1, 2])
def test_outliers_of_some_tokens(splits):
    """Of a tree's tokens each sees another outlier, nobody sees one; full tiles come after."""
    lengths = np.full(2, CAPACITY, np.int32)
    q, caches, scales = stored(NQ, (4, 1), lengths=lengths)
    scales[1][...] *= np.float32(1e-15)
    dense = np.ones((2, NQ, CAPACITY), bool)
    for b, first in enumerate((3, T + 9)):
        dense[b, :, first : first + NQ] = np.eye(NQ, dtype=bool)
        dense[b, :, first + NQ] = False
        scales[1][b, first : first + NQ] *= np.float32([1, 1e30, 1e-20, 1e10])[:, None]
        scales[1][b, first + NQ] = OUTLIER
    mask = masks.per_batch([masks.from_dense(x) for x in dense])
    got = run(q, *caches, lengths, mask=mask, scales=scales, splits=splits)
    check_tokens(got, q, *real(caches, scales), lengths, dense)


def test_an_outlier_behind_a_window():
    """The keys of a tile that no row sees, and those that the first rows see alone."""
    lengths = np.full(1, CAPACITY, np.int32)
    q, caches, scales = stored(NQ, (4, 1), "e4m3", lengths=lengths)
    scales[1][...] *= np.float32(1e-15)
    mask = masks.window(NQ, CAPACITY, left=100)
    dense = mask.dense()[None]
    first = dense[0].argmax(axis=1)
    scales[1][0, first[0] - 1] = scales[1][0, first[2] - 1] = OUTLIER
    got = run(q, *caches, lengths, mask=mask, scales=scales, splits=1)
    check_tokens(got, q, *real(caches, scales), lengths, dense)
