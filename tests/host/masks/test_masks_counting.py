"""Cells of tiles in closed form, by smaller tiles and by samples; pictures of a million tokens."""

import gc
import time

import numpy as np
import pytest
from mask_cases import plain_cases, plant

import masks
from masks import algebra, base, block, counting, leaves, trees
from masks.tiles import Grid

CASES = plain_cases()
#: Not of a function, of bits, or where two patterns of tokens meet.
CLOSED = {
    name: CASES[name]
    for name in (
        *("dense", "causal", "causal-tall", "window", "window-tall", "documents", "chunked"),
        *("butterfly", "butterfly-radix3", "fixed", "dilated", "complement", "empty", "tree"),
    )
}
MILLION = 1 << 20
LONG = {
    "causal": lambda n: masks.causal(n),
    "butterfly": lambda n: masks.butterfly(n, 128),
    "README": lambda n: (masks.butterfly(n, 128) | masks.local(n, 128)) & masks.causal(n),
    "sinks": lambda n: masks.sinks(n, 64, 4096),
    "bigbird": lambda n: masks.bigbird(n, 128),
    "strided": lambda n: masks.strided(n, 1, 128, causal=True),
    "strided-blocks": lambda n: masks.strided(n, 128, 32),
    "butterfly-causal": lambda n: masks.butterfly(n, 128) & masks.causal(n),
    "butterfly-xor-causal": lambda n: masks.butterfly(n, 128) ^ masks.causal(n),
    "vertical-slash": lambda n: masks.vertical_slash(n, range(0, n, 9000), [0, 1, 70000]),
    "neighborhood": lambda n: masks.neighborhood((n >> 10, 1 << 10), 7),
    "function": lambda n: masks.from_function(lambda q, kv: kv <= q, n),
}


def tiled(dense, tile):
    """Attended cells of every tile."""
    rows = np.add.reduceat(dense.astype(int), np.arange(0, dense.shape[0], tile))
    return np.add.reduceat(rows, np.arange(0, dense.shape[1], tile), axis=1)


def counts_of(mask, tile):
    """`Mask._counts` of all tiles."""
    grid = Grid(*mask.shape, tile, tile)
    rows, cols = np.divmod(np.arange(grid.n_row * grid.n_col), grid.n_col)
    return mask._counts(grid, rows, cols).reshape(grid.n_row, grid.n_col)


def check(cases, must_be_known):
    for mask, dense in cases.values():
        for m, cells in ((mask, dense), (mask.T, dense.T)):
            for tile in (1, 5, 6, 16, 60):
                counts, expected = counts_of(m, tile), tiled(cells, tile)
                known = counts >= 0
                assert (counts[known] == expected[known]).all()
                assert known.all() or not must_be_known


def check_all():
    check(CLOSED, must_be_known=True)
    check(CASES, must_be_known=False)


def test_counts_are_exact_and_closed_forms_know_all_tiles():
    check_all()


FAULTS = {
    "interval-unknown": (
        base.Mask,
        "_counts",
        "state == tiles.INTERVAL",
        "state == tiles.BITS + 1",
    ),
    "full-as-unknown": (base.Mask, "_counts", "grid.area(rows, cols), -1", "-1, -1"),
    "two-operands": (algebra._Nary, "_counts", "len(states) - 1", "len(states) - 2"),
    "complement": (algebra.Complement, "_counts", "- inner", "- inner - 1"),
    "transposed": (algebra.Transposed, "_counts", "grid.T, cols, rows", "grid.T, rows, cols"),
    "diagonals": (leaves.Diagonals, "_counts", "q1 - 1 +", "q1 +"),
    "columns": (leaves.Columns, "_counts", "(stop - start)", "grid.tile_m"),
    "tree": (trees.Tree, "_in_prefix", "0, grid.tile_n", "0, grid.nk"),
    "blocks": (block, "_most_overlapped", "+ 1", "+ 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_all()


@pytest.mark.parametrize("most_tiles", [9, 1 << 16])
def test_smaller_tiles_add_up(most_tiles, monkeypatch):
    """However deep tiles are cut, and in however many pieces."""
    monkeypatch.setattr(counting, "FINEST", 2)
    monkeypatch.setattr(counting, "MOST_TILES", most_tiles)
    for mask, dense in CASES.values():
        assert mask.count_nonzero() == dense.sum()
        area = tiled(np.ones_like(dense), 24)
        assert (counting.shares(mask, 24) == tiled(dense, 24) / area).all()


def test_samples_are_close(monkeypatch):
    """512 cells of each tile: a share is off by less than five deviations of independent ones."""
    monkeypatch.setattr(counting, "MOST_CELLS", 0)
    monkeypatch.setattr(counting, "SAMPLE", 4 * 512)
    mask = masks.from_function(lambda q, kv: (q * 7919 + kv * 104729) % 101 < 30, 600)
    shares = counting.shares(mask, 300)
    exact = tiled(mask.dense(), 300) / 300**2
    assert (abs(shares - exact) < 5 * np.sqrt(exact * (1 - exact) / 512)).all()
    assert (counting.shares(mask, 300) == shares).all()


@pytest.fixture
def no_collection():
    """The collector takes 0.3 s where many tests went before."""
    gc.disable()
    yield
    gc.enable()


def timed(run):
    """The processor time of a call, and what it returns."""
    started = time.thread_time()
    found = run()
    return time.thread_time() - started, found


#: Times of a stable sort of a million numbers, which has no vector instructions: 0.2 s on a slow
#: machine, where the slowest picture takes 0.19.
MOMENT = 1.5


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", LONG)
def test_a_picture_of_a_million_tokens_takes_a_moment(name):
    mask = LONG[name](MILLION)
    mask.count_nonzero  # noqa: B018 - imported before the time is taken
    numbers = np.random.default_rng(0).random(MILLION)
    before, _ = timed(lambda: np.sort(numbers, kind="stable"))
    taken, picture = timed(mask.draw)
    after, _ = timed(lambda: np.sort(numbers, kind="stable"))
    assert taken < MOMENT * max(before, after)
    small = LONG[name](MILLION >> 9) if name in ("causal", "function") else None
    assert small is None or picture == small.draw()


#: Parent and depth of node i; a root has depth 1.
TREES = {
    "binary": (lambda i: (i - 1) // 2, lambda i: np.log2(i + 1).astype(int) + 1),
    "chains": (lambda i: np.where(i % 1024 == 0, -1, i - 1), lambda i: i % 1024 + 1),
    "comb": (lambda i: np.where(i % 64 == 0, i - 64, i - 1), lambda i: i // 64 + i % 64 + 1),
    "side-by-side": (lambda i: i - 1024, lambda i: i // 1024 + 1),
    "chain": (lambda i: i - 1, lambda i: i + 1),
}


@pytest.mark.parametrize("name", TREES)
def test_a_picture_of_a_tree_costs_its_nodes_and_not_its_pairs(name, monkeypatch):
    """Of up to 2**39 pairs: four keys sorted for each node at most, no cell looked at."""
    node = np.arange(MILLION)
    parent, depth = TREES[name]
    keys = []
    sums = trees.sums
    monkeypatch.setattr(trees, "sums", lambda k, v: keys.append(k.size) or sums(k, v))
    monkeypatch.setattr(base.Mask, "_cells", None)
    mask = masks.tree(np.maximum(parent(node), -1))
    monkeypatch.setattr(trees.Tree, "_at", None)
    mask.draw()
    assert sum(keys) < 4 * MILLION
    assert mask.count_nonzero() == depth(node).sum()


def test_a_million_tokens_are_counted_in_closed_form():
    n = MILLION
    assert masks.causal(n).count_nonzero() == n * (n + 1) // 2
    assert masks.butterfly(n, 128).count_nonzero() == (n >> 7) * 14 * 128**2
    offsets = [d for d in range(n) if d <= 1 or d % 4096 == 0]
    expected = sum(n - d for d in offsets)
    assert masks.strided(n, 1, 4096, causal=True).count_nonzero() == expected
    halves = masks.butterfly(n, 128) | masks.local(n, 128)
    both = (halves & masks.causal(n)).count_nonzero() + (~halves & masks.causal(n)).count_nonzero()
    assert both == n * (n + 1) // 2


def test_the_tile_of_a_picture_is_cut_well():
    for n in (1, 31, 32, 100, 4096, 5000, 99_991, MILLION, 2**31 - 1):
        mask = masks.from_function(np.equal, n)
        for size in (1, 7, 32, 256):
            tile = counting.picture_tile(mask, size)
            least = max(1, -(-n // size))
            assert least <= tile < least + max(1, least / counting.FINEST)
            while tile >= 4 * counting.FINEST:
                assert tile % 4 == 0
                tile //= 4
