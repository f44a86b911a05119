"""masks.restrict: some queries and keys of every kind of mask, cell by cell and tile by tile."""

import numpy as np
import pytest
from mask_cases import BLOCK, assert_tiles_exact, plain_cases
from scipy import sparse

import masks
from masks import restriction
from masks.block import BlockSparse
from masks.interval import Interval
from masks.leaves import Columns
from masks.restriction import Restricted, restrict_past_the_end
from masks.tiles import OPEN, Grid

CASES = plain_cases()


def runs(n, tile, seed):
    """Every other run of `tile` tokens, about, in order."""
    starts = np.arange(0, n, tile)
    taken = np.random.default_rng(seed).random(starts.size) < 0.5
    taken[-1] = True  # the ragged one
    return np.flatnonzero(np.repeat(taken, tile)[:n])


def scattered(n, seed):
    return np.flatnonzero(np.random.default_rng(seed).random(n) < 0.6)


@pytest.mark.parametrize("few", [0, restriction._FEW_CELLS], ids=["many", "few"])
@pytest.mark.parametrize("name", CASES)
def test_restriction_is_exact(name, few, monkeypatch):
    """Whole tiles, other runs, and single tokens; tiles of the kinds that a kernel may take."""
    monkeypatch.setattr(restriction, "_FEW_CELLS", few)
    mask, dense = CASES[name]
    nq, nk = mask.shape
    for q, kv in (
        (runs(nq, 8, 0), runs(nk, 8, 1)),
        (runs(nq, BLOCK, 2), runs(nk, 12, 3)),
        (scattered(nq, 4), scattered(nk, 5)),
    ):
        restricted, expected = masks.restrict(mask, q, kv), dense[np.ix_(q, kv)]
        assert (restricted.dense() == expected).all()
        assert_tiles_exact(restricted, expected, 8, 4)
        assert_tiles_exact(restricted, expected, 5, 16)
        assert restricted.count_nonzero() == expected.sum()
        assert restricted.live_tiles(8)[0] == restricted.tiles(8).kinds.nnz


@pytest.mark.parametrize("name", ["axial", "complement", "neighbourhood-2d", "transposed-ragged"])
def test_algebra_of_a_restriction(name):
    mask, dense = CASES[name]
    q, kv = scattered(mask.shape[0], 6), scattered(mask.shape[1], 7)
    restricted, expected = masks.restrict(mask, q, kv), dense[np.ix_(q, kv)]
    assert (restricted.T.dense() == expected.T).all()
    assert ((~restricted).dense() == ~expected).all()
    again = masks.restrict(restricted, np.arange(0, q.size, 2), np.arange(1, kv.size, 3))
    assert again == masks.restrict(mask, q[::2], kv[1::3])
    assert (again.dense() == expected[::2, 1::3]).all()


def test_closed_forms_stay():
    whole = np.r_[0:BLOCK, 3 * BLOCK : 53]
    odd = np.arange(1, 53, 2)
    kept = {
        "documents": (odd, Interval),
        "butterfly": (whole, BlockSparse),
        "transposed-ragged": (np.arange(9), masks.algebra.Transposed),
    }
    for name, (index, kind) in kept.items():
        assert type(masks.restrict(CASES[name][0], index, index)) is kind
    assert type(masks.restrict(CASES["butterfly"][0], odd, odd)) is Restricted
    chosen = CASES["vertical-slash"][0]
    kinds = {type(m) for m in masks.restrict(chosen, odd, odd).operands}
    assert kinds == {Interval, masks.algebra.Union}
    assert type(masks.restrict(Columns(8, np.arange(8) > 3), [1], [2, 5])) is Columns


def test_the_prefix_of_a_tree_stays_an_interval():
    mask = masks.tree([-1, 0, 0, 1], prefix=30)
    kinds = masks.restrict(mask, [0, 2], [*range(2, 30), 33]).tiles(4, 8).kinds.toarray()
    assert kinds.tolist() == [[masks.FULL] * 3 + [masks.INTERVAL]]
    of_roots = masks.restrict(masks.tree(np.full(16, -1), 5), range(8, 16))
    assert_tiles_exact(of_roots, of_roots.dense(), 8, 8)


@pytest.mark.parametrize("few", [0, restriction._FEW_CELLS], ids=["many", "few"])
@pytest.mark.parametrize("name", CASES)
def test_keys_behind_a_mask_are_not_attended(name, few, monkeypatch):
    """One of them, and more than there are keys of the mask."""
    monkeypatch.setattr(restriction, "_FEW_CELLS", few)
    mask, dense = CASES[name]
    nq, nk = mask.shape
    for q, start, more in ((np.arange(nq), 0, 1), (runs(nq, 8, 0), 8, 13), ([2], nk - 2, 20)):
        wide = restrict_past_the_end(mask, q, range(start, nk + more))
        expected = np.pad(dense[q, start:], ((0, 0), (0, more)))
        assert (wide.dense() == expected).all()
        assert_tiles_exact(wide, expected, 8, 4)
        assert_tiles_exact(wide, expected, 5, 1)
        assert wide.count_nonzero() == expected.sum()


def test_intervals_before_keys_of_nobody_stay():
    mask = masks.per_head([masks.butterfly(16, 1), masks.causal(16)])
    wide = restrict_past_the_end(mask, range(4, 16), range(2, 20))
    assert (wide.plane_index == mask.plane_index).all()
    assert (wide.dense() == np.pad(mask.dense(), [(0, 0)] * 3 + [(0, 4)])[:, :, 4:, 2:]).all()
    assert type(wide.planes[1]) is Interval
    for keys in (range(2, 16), range(3)):
        within = restrict_past_the_end(mask, [3, 5], keys)
        assert within == masks.restrict(mask, [3, 5], keys)


def test_planes_are_restricted_one_by_one():
    mask = masks.per_head([masks.causal(9), masks.dense(9), masks.causal(9)])
    restricted = masks.restrict(mask, [1, 4], range(3, 9))
    assert restricted.heads == 3
    assert (restricted.plane_index == mask.plane_index).all()
    assert (restricted.dense() == mask.dense()[:, :, [1, 4], 3:]).all()


def test_everything_is_the_mask_itself():
    mask = masks.butterfly(64, 8)
    assert masks.restrict(mask) is mask
    assert masks.restrict(mask, kv_idx=range(64)) is mask
    assert masks.restrict(mask, []).shape == (0, 64)


BELOW_THE_DIAGONAL = sparse.coo_array((np.ones(10), (np.arange(1, 11), np.arange(10))), (11, 11))
WITHOUT_CLOSED_FORMS = {
    "diagonals": masks.toeplitz(64, [0, 1, 9]).T,
    "blocks": masks.from_scipy(BELOW_THE_DIAGONAL, 6, shape=(64, 64)),
}


@pytest.mark.parametrize("name", WITHOUT_CLOSED_FORMS)
def test_what_a_mask_knows_of_its_tiles_is_known_of_those_that_stay(name):
    """Not of tile row 1 and tile column 2, which are no whole tiles of the mask."""
    inner, grid = WITHOUT_CLOSED_FORMS[name], Grid(64, 64, 8, 8)
    q, kv = np.r_[8:16, 17:25, 40:64], np.r_[0:16, 16:48:4, 56:64]
    restricted = masks.restrict(inner, q, kv)
    rows, cols = np.divmod(np.arange(20), 4)
    whole = (rows != 1) & (cols != 2)
    at = q[8 * rows[whole]] // 8, kv[8 * cols[whole]] // 8
    for fact, unknown in (("_counts", -1), ("_patterns", -1), ("_state", OPEN)):
        found = getattr(restricted, fact)(Grid(*restricted.shape, 8, 8), rows, cols)
        np.testing.assert_array_equal(found[whole], getattr(inner, fact)(grid, *at), fact)
        assert (found[~whole] == unknown).all(), fact


def test_a_large_restriction_looks_at_no_cell(monkeypatch):
    """By whole tiles of a mask without closed form: what its tiles are is known."""
    n, tile = 1 << 14, 128
    q = np.flatnonzero(np.arange(n) // tile % 4 == 1)
    mask = masks.strided(n, 1, 512, 640)  # diagonals
    looked_at = []
    monkeypatch.setattr(Restricted, "_at", lambda *args: looked_at.append(args))
    kinds = masks.restrict(mask, q, q).tiles(tile).kinds
    assert looked_at == []
    assert (kinds.toarray() != 0).sum() == mask.tiles(tile).kinds[1::4, 1::4].nnz


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([3, 3], r"kv_idx\[1\]=3: must be greater"),
        ([2, 1], r"kv_idx\[1\]=1: must be greater"),
        ([9], r"kv_idx\[0\]=9: must lie in \[0, 8\]"),
    ],
)
def test_indices_that_are_refused(index, match):
    with pytest.raises(ValueError, match=match):
        masks.restrict(masks.dense(9), None, index)


def test_only_masks_are_restricted():
    with pytest.raises(TypeError, match="mask is ndarray: must be a Mask"):
        masks.restrict(np.ones((2, 2), bool))


def test_a_last_run_with_a_gap_is_no_whole_tile():
    """It ends where one does, but has fewer queries, or keys."""
    mask = masks.toeplitz(8, [0, 3])
    for q, kv in (([0, 1, 3], None), (None, [4, 6, 7]), ([4, 5, 7], [0, 2, 3])):
        restricted = masks.restrict(mask, q, kv)
        assert (restricted.tiles(4).dense() == restricted.dense()).all()
        assert restricted.count_nonzero() == np.count_nonzero(restricted.dense())
