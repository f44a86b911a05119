"""Tiles of block masks: what is told from the blocks alone, and what that spares."""

import sys

import numpy as np
import pytest
from scipy import sparse

import masks
from masks.block import BlockSparse
from masks.interval import Interval
from masks.tiles import BITS, INTERVAL, Grid, _BitPool
from nbflash.schedule.tile_schedule import TileSchedule

SIZES = [(8, 8), (2, 4), (16, 16), (16, 8), (12, 7), (3, 5), (32, 24)]


def block_mask(nq=90, nk=101, block=(8, 8), density=0.4, seed=0):
    blocks = -(-nq // block[0]), -(-nk // block[1])
    matrix = sparse.random_array(blocks, density=density, rng=np.random.default_rng(seed))
    return masks.from_scipy(matrix.tocsr(), block=block, shape=(nq, nk))


def joined(name, own):
    nq, nk = own.shape
    return {
        "alone": own,
        "causal": own & masks.causal(nq, nk),
        "window": own & masks.window(nq, nk, left=40, right=9),
        "union": own | masks.window(nq, nk, left=4, right=0),
        "two": own & block_mask(nq, nk, (4, 16), seed=1),
        "outside": masks.causal(nq, nk) & ~own,
        "transposed": own.T,
    }[name]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name", ["alone", "causal", "window", "union", "two", "outside", "transposed"]
)
@pytest.mark.parametrize("block", [(8, 8), (6, 10)], ids=str)
def test_tiles_are_those_of_the_cells(block, name, size):
    mask = joined(name, block_mask(block=block))
    tiles = mask.tiles(*size)
    np.testing.assert_array_equal(tiles.dense(), mask.dense())
    words = {bits.tobytes() for bits in tiles.bits}
    assert len(words) == len(tiles.bits)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["alone", "causal", "window"])
def test_numbers_of_tiles_without_cells(name, size):
    """Exact for blocks alone, and off by the tiles at the diagonal at most with an interval."""
    mask = joined(name, block_mask())
    kinds = mask.tiles(*size).kinds.data
    live, full = type(mask).live_tiles(joined(name, block_mask()), *size)
    assert full == np.count_nonzero(kinds == masks.FULL)
    if name == "alone":
        assert live == kinds.size
    else:
        assert kinds.size <= live <= kinds.size * 9 / 8 + 1


def test_few_blocks_of_a_large_grid(monkeypatch):
    """Both axes are ragged: the last block has a tile of one cell, and parts without cells."""
    monkeypatch.setattr(sys.modules["masks.block"], "_SMALL_GRID", 0)
    blocks = sparse.coo_array((np.ones(3), ([0, 5, 11], [3, 3, 12])), shape=(12, 13))
    mask = masks.from_scipy(blocks, block=(8, 8), shape=(91, 101))
    np.testing.assert_array_equal(mask.tiles(2, 4).dense(), mask.dense())


@pytest.mark.parametrize("block", [(64, 4), (4, 64)])
def test_numbers_of_a_few_tiles_by_the_blocks_that_they_overlap(block):
    mask, tile = block_mask(256, 256, block), 16
    rows, cols = np.array([0, 3, 9]), np.array([2, 3, 8])
    cells = mask.dense().reshape(16, tile, 16, tile).sum((1, 3))
    np.testing.assert_array_equal(
        mask._counts(Grid(256, 256, tile, tile), rows, cols), cells[rows, cols]
    )


@pytest.fixture
def looked_at(monkeypatch):
    """Numbers of tiles whose cells were looked at."""
    found, classify = [], _BitPool.classify

    def counted(self, mask, lo, hi, rows, cols):
        found.append(rows.size)
        return classify(self, mask, lo, hi, rows, cols)

    monkeypatch.setattr(_BitPool, "classify", counted)
    return found


def test_tiles_of_one_of_two_intervals_are_not_looked_at(looked_at):
    """A band, and keys long before: what the band bounds is told without its cells."""
    n = 256
    near, far = masks.window(n, left=20, right=0), Interval(n, np.zeros(n, int), range(-99, n - 99))
    tiles = (near | far).tiles(16)
    assert tiles.counts()["interval"] == near.tiles(16).counts()["interval"]
    assert sum(looked_at) == far.tiles(16).counts()["interval"]


def test_a_pattern_is_looked_at_once(looked_at):
    """Of 64-blocks at N = 16384 under 128-tiles there are 15 patterns, not 5672 tiles."""
    mask = block_mask(16384, 16384, (64, 64), 0.1)
    tiles = mask.tiles(128)
    assert tiles.kinds.nnz > 5000
    assert sum(looked_at) <= 15
    looked_at.clear()
    (mask & masks.causal(16384)).tiles(128)
    assert sum(looked_at) <= 15 + 2 * 128


def test_a_mask_is_tiled_for_the_chosen_configuration_alone(monkeypatch):
    from nbflash.backends.sm90.forward.choice import choose
    from nbflash.backends.sm90.forward.config import forward_configs

    tiled = []
    monkeypatch.setattr("masks.tiles.build", lambda *given: pytest.fail("tiled"))
    mask = block_mask(2048, 2048, (64, 64), 0.1)
    config, _ = choose(forward_configs("bfloat16", 64), mask, lambda c: tiled.append(c) or EMPTY)
    assert tiled == [config]
    assert config.tile_n == 64


def test_blocks_of_a_grid_and_no_bits():
    assert block_mask(90, 101, (8, 16)).grid_shape == (12, 7)
    assert masks.causal(40).tiles(8, 16).bit_cells().shape == (0, 8, 16)


def test_a_row_of_a_union_that_one_interval_lacks_is_the_others():
    """The intervals of the second row do not meet: the union is none, and its first row one."""
    lacks, has = (Interval(8, *np.array(bounds)) for bounds in ([[0, 0], [0, 2]], [[5, 5], [8, 8]]))
    for mask in (lacks | has, has | lacks):
        tiles = mask.tiles(1, 8)
        assert tiles.kinds.toarray()[:, 0].tolist() == [INTERVAL, BITS]
        assert (tiles.lo[0], tiles.hi[0]) == (5, 8)


EMPTY = TileSchedule.from_mask(masks.dense(1), 64, 64)


def test_parts_of_the_last_block_behind_the_end_are_no_tiles(monkeypatch):
    """Of so few blocks that tiles are not counted one by one."""
    monkeypatch.setattr("masks.block._SMALL_GRID", 0)
    last = np.array([156])
    mask = BlockSparse(10_000, 10_000, (64, 64), last, last)
    assert mask._live(Grid(10_000, 10_000, 16, 16)).tolist() == [624 * 625 + 624]
