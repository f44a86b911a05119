"""Tiles of every mask are exact for any tile size, also ragged, rectangular and empty."""

import itertools
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from mask_cases import assert_tiles_exact, plain_cases, plant
from scipy import sparse

import masks
from masks import algebra, block, interval, leaves, tiles, token

CASES = plain_cases()

# Below one tile, dividing nothing, one row or column, more than a word of bits, beyond the mask.
TILES = [(16, 16), (7, 13), (1, 5), (8, 40), (128, 64), (6, 6)]


@pytest.mark.parametrize("name", CASES)
def test_dense_is_the_definition(name):
    mask, dense = CASES[name]
    assert mask.shape == dense.shape
    assert (mask.dense() == dense).all()


@pytest.mark.parametrize("name", CASES)
def test_call_is_the_definition(name):
    mask, dense = CASES[name]
    q, kv = np.random.default_rng(0).integers(0, mask.shape, (200, 2)).T
    assert (mask(q, kv) == dense[q, kv]).all()
    assert mask(q[:, None], kv[None, :5]).shape == (200, 5)


@pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("name", CASES)
def test_tiles_are_exact(name, tile):
    assert_tiles_exact(*CASES[name], *tile)


@pytest.mark.parametrize("name", CASES)
def test_tiles_of_the_transpose_are_exact(name):
    mask, dense = CASES[name]
    assert_tiles_exact(mask.T, dense.T, 16, 8)


@pytest.mark.parametrize("nq", [0, 1, 5])
@pytest.mark.parametrize("nk", [0, 1, 5])
@pytest.mark.parametrize("tile", [1, 4, 16])
def test_tiles_of_tiny_masks_are_exact(nq, nk, tile):
    for mask in (
        masks.dense(nq, nk),
        masks.causal(nq, nk),
        ~masks.dense(nq, nk),
        masks.from_function(lambda q, kv: q != kv, nq, nk),
        masks.from_dense(np.eye(nq, nk, dtype=bool)),
    ):
        assert_tiles_exact(mask, mask.dense(), tile, tile)
        assert_tiles_exact(mask.T, mask.dense().T, tile, tile)


def test_sizes_around_a_tile():
    for n in (1, 15, 16, 17, 31, 32, 33):
        for mask in (masks.causal(n), masks.butterfly(n, 4), masks.strided(n, 1, 5, 1)):
            assert_tiles_exact(mask, mask.dense(), 16, 16)


def test_kinds_of_a_causal_mask():
    tiles = masks.causal(256).tiles(64, 64)
    assert tiles.kinds.toarray().tolist() == [
        [1, 0, 0, 0],
        [2, 1, 0, 0],
        [2, 2, 1, 0],
        [2, 2, 2, 1],
    ]
    assert tiles.counts() == {"interval": 4, "full": 6, "bits": 0}


def test_ragged_queries_stay_full_and_ragged_keys_do_not():
    assert masks.dense(100).tiles(64, 64).kinds.toarray().tolist() == [[2, 1], [2, 1]]


def test_butterfly_with_local_and_causal_needs_no_bits():
    n, size = 4096, 128
    mask = (masks.butterfly(n, size) | masks.local(n, size)) & masks.causal(n)
    for tile in (64, 128):
        counts = mask.tiles(tile, tile).counts()
        assert counts["bits"] == 0
        assert counts["interval"] == n // tile


def test_equal_bit_tiles_are_stored_once():
    checkerboard = masks.from_function(lambda q, kv: (q + kv) % 2 == 0, 64)
    tiles = checkerboard.tiles(16, 16)
    assert tiles.counts()["bits"] == 16
    assert tiles.bits.shape == (1, 16, 1)
    assert tiles.bits[0, :2, 0].tolist() == [0x5555, 0xAAAA]


def test_bounds_that_are_the_same_for_all_queries_keep_one_element():
    mask = masks.dense(6, 7)
    assert mask.lo.strides == mask.hi.strides == (0,)
    assert repr(mask) == "<Interval mask 6 x 7>"


def test_a_plane_for_all_heads():
    mask = masks.per_batch([masks.causal(4), masks.dense(4)])
    assert [bool(mask(0, 3, head=7, batch=batch)) for batch in (0, 1)] == [False, True]


def test_tiles_are_cached_and_read_only():
    mask = masks.butterfly(64, 8) | masks.strided(64, 1, 7)
    tiles = mask.tiles(16)
    assert mask.tiles(16, 16) is tiles
    for array in (tiles.lo, tiles.hi, tiles.bits, tiles.kinds.data, tiles.kinds.indices):
        assert not array.flags.writeable
    assert tiles.lo.dtype == tiles.hi.dtype == tiles.kinds.dtype == np.int32
    assert tiles.kinds.indices.dtype == tiles.kinds.indptr.dtype == np.int32
    assert tiles.bits.dtype == np.uint32
    assert tiles.kinds.has_canonical_format
    with pytest.raises(FrozenInstanceError):
        tiles.grid.nq = 1


# Who names more tiles than have cells, at some size; and who can only bound how many it names.
NAME_MORE = {
    *("butterfly-causal", "strided-token", "dilated", "vertical-slash", "axial", "bits"),
    *(
        "function",
        "intersection",
        "small-blocks-window",
        "complement",
        "difference",
        "diagonals-wide",
        "bits-wide",
    ),
}
BOUNDED = {
    *("butterfly", "butterfly-radix3", "local", "strided", "fixed", "global-local", "blocks-tall"),
    *("dilated", "sinks", "axial", "union", "intersection", "two-intervals"),
    *("diagonals-wide", "diagonals-tall"),
}


@pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("name", CASES)
def test_tiles_without_cells_are_not_visited(name, tile):
    """What tiling costs; the size, by which an intersection chooses, is as much or a bound."""
    mask, dense = CASES[name]
    grid = tiles.Grid(*mask.shape, *tile)
    live, size = mask._live(grid), mask._size(grid)
    assert (np.diff(live) > 0).all()
    assert live.size <= size
    assert name in BOUNDED or live.size == size
    q, kv = np.nonzero(dense)
    with_cells = np.unique(q // tile[0] * grid.n_col + kv // tile[1])
    assert np.isin(with_cells, live).all()
    assert name in NAME_MORE or (live == with_cells).all()


@pytest.mark.parametrize(
    ("tile", "rows", "cols"),
    [
        *[((12, 12), 1, 1), ((24, 12), 1, 1), ((4, 12), 3, 1), ((12, 6), 1, 2), ((3, 4), 4, 3)],
        *[((5, 12), 4, 1), ((12, 5), 1, 4), ((16, 12), 2, 1), ((12, 16), 1, 2), ((11, 12), 2, 1)],
    ],
)
def test_size_of_blocks(tile, rows, cols):
    """32 of 12 × 36 tokens, each in as many tiles as a block can touch; or all tiles."""
    blocks = masks.butterfly(8, 1).to_scipy(1)
    mask = masks.from_scipy(blocks, block=(12, 36))
    grid = tiles.Grid(*mask.shape, tile[0], 3 * tile[1])
    assert mask._size(grid) == min(32 * rows * cols, grid.n_row * grid.n_col)
    assert mask._size(tiles.Grid(*mask.shape, 48, 99)) == 2 * 3


@pytest.mark.parametrize(
    ("tile", "in_row"),
    [((8, 8), 3 + 3 + 3), ((2, 8), 2 + 2 + 2), ((2, 4), 2 + 3 + 2), ((8, 28), 6), ((8, 29), 4)],
)
def test_size_of_diagonals(tile, in_row):
    """In a tile row three runs, of one, three and one offsets, 29 apart; or one run of all."""
    mask = masks.toeplitz(240, [0, 1, 30])
    assert mask._size(tiles.Grid(240, 240, *tile)) == -(-240 // tile[0]) * in_row


def test_an_intersection_names_the_tiles_of_its_smallest_operand():
    """Whichever comes first: two blocks of a corner, 8 diagonals, and all below one of them."""
    corner = masks.from_scipy(sparse.coo_array(([1, 1], ([3, 3], [0, 1])), (4, 4)), 16)
    others = masks.toeplitz(64, range(0, 64, 8)), masks.causal(64)
    grid = tiles.Grid(64, 64, 8, 8)
    for operands in itertools.permutations((corner, *others)):
        mask = algebra.Intersection(operands)
        assert mask._size(grid) == corner._size(grid) == 8
        np.testing.assert_array_equal(mask._live(grid), corner._live(grid))


def test_intervals_that_touch_in_some_rows_are_one_there():
    """Their hull bounds such tiles; without it they would be bits."""
    n, q = 256, np.arange(256)
    before = interval.Interval(n, q - 40, np.where(q < 128, q - 20, q - 30))
    kinds = (masks.window(n, left=20, right=0) | before).tiles(16).kinds.toarray()
    assert (kinds[:8] < masks.BITS).all()
    assert (kinds[8:] >= masks.BITS).any()


#: (owner, function, text, faulty text): each fault must be seen by the checks above.
FAULTS = {
    "interval-full-ignores-lo": (interval.Interval, "_state", "(lo_max <= start) & ", ""),
    "interval-absent-off-by-one": (
        interval.Interval,
        "_state",
        "lo_min >= stop",
        "lo_min >= stop - 1",
    ),
    "interval-stop-exclusive": (tiles, "interval_cells", "kv < hi[q]", "kv <= hi[q]"),
    "hint-not-compared": (algebra, "_matches_hint", "(hi == bounds[1])", "(hi == hi)"),
    "union-overlap-is-interval": (algebra.Union, "_state", "(present == 1)", "(present >= 1)"),
    "intersection-forgets-open": (
        algebra.Intersection,
        "_state",
        "state[pending[own == OPEN]] = OPEN",
        "pass",
    ),
    "complement-keeps-full": (
        algebra.Complement,
        "_state",
        "[FULL, OPEN, ABSENT",
        "[FULL, OPEN, FULL",
    ),
    "transpose-forgets-order": (algebra.Transposed, "_cells", "swapaxes(1, 2)", "swapaxes(0, 0)"),
    "block-always-full": (
        block.BlockSparse,
        "_state",
        "counts == grid.area(rows, cols)",
        "counts > 0",
    ),
    "block-shares-too-much": (block, "_blocks_within", "(blocks + 1) * block", "stop"),
    "block-last-tile-lost": (block.BlockSparse, "_live", "[0]", "[0][:-1]"),
    "diagonal-shifted": (leaves.Diagonals, "_cells", "+ grid.tile_n\n", "+ grid.tile_n - 1\n"),
    "diagonal-range-short": (
        leaves.Diagonals,
        "_state",
        "high = q0 + shift - k1 + 1",
        "high = q0 + shift - k1 + 2",
    ),
    "column-full-off-by-one": (leaves, "_by_count", "count == total", "count >= total - 1"),
    "neighbour-run-short": (token.Neighborhood, "_make_live", "begin + 1", "begin"),
    "ragged-keys-full": (tiles, "build", "kinds[ragged] = OPEN", "pass"),
    "one-bit-tile-for-all": (tiles._BitPool, "_add", "len(self.number))", "0)"),
    "bit-order-big": (tiles._BitPool, "_add", '"little"', '"big"'),
    "padding-bits-set": (
        tiles._BitPool,
        "classify",
        "cells = mask._cells(grid, rows, cols) & existing",
        "cells = mask._cells(grid, rows, cols).copy()",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises((AssertionError, IndexError)):
        _check_all_cases()


def _check_all_cases():
    for mask, dense in plain_cases().values():
        for tile in ((16, 16), (7, 13), (6, 6)):
            assert_tiles_exact(mask, dense, *tile)
            assert_tiles_exact(mask.T, dense.T, *tile)
