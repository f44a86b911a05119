"""Statistics, reordering, pictures and attention coverage."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

import masks

CASES = [
    masks.causal(100),
    masks.window(100, 70, left=9, right=3),
    masks.butterfly(96, 8, stages=2),
    masks.axial(8, 12),
    ~masks.dense(40),
    masks.from_dense(np.random.default_rng(0).random((50, 50)) < 0.05),
]


@pytest.mark.parametrize("mask", CASES, ids=repr)
@pytest.mark.parametrize("tile", [16, (8, 32), 128])
def test_stats_from_the_dense_matrix(mask, tile):
    dense = mask.dense()
    stats = mask.stats(tile, head_dim=32, itemsize=4)
    tile_m, tile_n = tile if isinstance(tile, tuple) else (tile, tile)
    nq, nk = mask.shape
    live = [
        (r, c)
        for r in range(0, nq, tile_m)
        for c in range(0, nk, tile_n)
        if dense[r : r + tile_m, c : c + tile_n].any()
    ]
    cells = sum(dense[r : r + tile_m, c : c + tile_n].size for r, c in live)
    all_tiles = -(-nq // tile_m) * -(-nk // tile_n)
    assert (stats.tokens, stats.tiles, stats.all_tiles) == (dense.sum(), len(live), all_tiles)
    assert stats.interval + stats.full + stats.bits == len(live)
    assert stats.token_density == dense.sum() / dense.size
    assert stats.tile_density == len(live) / all_tiles
    assert stats.fill == (dense.sum() / cells if cells else 0.0)
    assert stats.flops == 4 * 32 * cells
    assert stats.dense_flops == 4 * 32 * nq * nk
    keys = sum(min(tile_n, nk - c) for _, c in live)
    once = nq * (2 * 32 * 4 + 4)
    assert stats.bytes == once + 2 * 32 * 4 * keys
    assert json.loads(json.dumps(asdict(stats)))["bytes"] == stats.bytes  # Python's own numbers
    assert stats.dense_bytes == once + 2 * 32 * 4 * nk * -(-nq // tile_m)
    rows = [sum(r == row for r, _ in live) for row in range(0, nq, tile_m)]
    assert (stats.row_min, stats.row_max) == (min(rows), max(rows))
    assert stats.row_mean == np.mean(rows)
    assert stats.imbalance == (max(rows) / np.mean(rows) if max(rows) else 1)
    assert stats.empty_rows == (~dense.any(1)).sum()


def _layers(dense):
    """Layers to reach by repeated boolean products; a token keeps its own value."""
    step = dense | np.eye(len(dense), dtype=bool)
    needed = np.tri(len(dense), dtype=bool) if not np.triu(dense, 1).any() else np.True_
    reach, layers = np.eye(len(dense), dtype=bool), 0
    while not (reach | ~needed).all():
        grown = (reach.astype(int) @ step) > 0
        if (grown == reach).all():
            return None
        reach, layers = grown, layers + 1
    return layers


@pytest.mark.parametrize(
    ("mask", "components"),
    [
        (masks.dense(20), 1),
        (masks.causal(20), 1),
        (masks.window(20, left=3, right=0), 1),
        (masks.window(20, left=1, right=2), 1),
        (masks.documents([5, 5, 10]), 3),
        (masks.butterfly(32, 1), 1),
        (masks.butterfly(32, 1, stages=3), 4),
        (masks.strided(36, 1, 6, 2), 1),
        (masks.dilated(30, 2, 3), 3),
        (masks.sinks(30, 2, 4), 1),
        (masks.axial(4, 5), 1),
        (~masks.dense(7), 7),
    ],
    ids=repr,
)
def test_reachability(mask, components):
    stats = mask.stats(8)
    assert stats.components == components
    assert stats.layers == _layers(mask.dense())
    assert stats.reach_exact


def test_reachability_of_a_long_sequence_is_that_of_its_blocks():
    """Whole blocks mix alike: 64 blocks of 128 tokens behave as 64 tokens."""
    stats, small = masks.butterfly(8192, 128).stats(128), masks.butterfly(64, 1).stats(8)
    assert (stats.components, stats.layers, stats.node) == (1, small.layers, 128)
    assert small.layers == 6
    assert stats.reach_exact
    ragged = masks.butterfly(8192 - 64, 128).stats(128)
    assert (ragged.layers, ragged.node, ragged.reach_exact) == (6, 128, True)
    assert not masks.window(8192, left=4, right=4).stats(128).reach_exact


def test_stats_of_rectangular_and_empty_masks():
    stats = masks.causal(8, 12).stats(4)
    assert (stats.components, stats.layers) == (None, None)
    empty = masks.dense(0, 0).stats(4)
    assert (empty.tokens, empty.tiles, empty.token_density, empty.imbalance) == (0, 0, 0.0, 1.0)
    assert "undefined for nq != nk" in str(stats)


def test_stats_text_is_readable():
    text = str(masks.butterfly(1024, 64, stages=2).stats(64))
    assert text.splitlines() == [
        "mask            1024 x 1024, tiles of 64 x 64",
        "token density   18.7500%   196,608 pairs",
        "tile density    18.7500%   48 of 256 tiles",
        "fill            100.0000%   of the live tiles' cells",
        "tile kinds      48 full, 0 interval, 0 bits (0 distinct)",
        "flops           18.7500%   of dense (5.03e+07)",
        "bytes           23.5996%   of dense (1.05e+06)",
        "tiles per row   3 / 3.00 / 3 (min / mean / max), imbalance 1.00",
        "empty rows      0",
        "components      4 (tokens)",
        "layers to reach never",
    ]


@pytest.mark.parametrize(
    ("mask", "before", "after"),
    [
        # causal with a stride of 32: 32 documents of 32 tokens, two to a tile
        (masks.toeplitz(1024, np.arange(0, 1024, 32), causal=True), 136, 16),
        # local part of 32 tokens fills the tiles next to the diagonal in any order
        (masks.dilated(1024, 16, 8), 74, 32),
        # patches of 8 x 8: a patch sees 4 + 4 - 1 of 16 patches
        (masks.axial(32, 32), 256, 16 * 7),
    ],
    ids=["strided", "dilated", "axial"],
)
def test_reorder_makes_periodic_patterns_dense_in_tiles(mask, before, after):
    permutation, reordered = masks.reorder(mask, 64)
    assert mask.tiles(64).kinds.nnz == before
    assert reordered.tiles(64).kinds.nnz == after
    assert (reordered.dense() == mask.dense()[permutation][:, permutation]).all()


def test_reorder_undoes_a_shuffle_of_blocks():
    """Cuthill-McKee finds the band again: at most the tiles of a band twice as wide."""
    n, size = 2048, 32
    rows, cols = np.nonzero(abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 1)
    order = np.random.default_rng(0).permutation(64)
    pattern = np.zeros((64, 64), bool)
    pattern[order[rows], order[cols]] = True
    mask = masks.from_dense(np.kron(pattern, np.ones((size, size), bool)))
    band = masks.local(n, size)
    permutation, reordered = masks.reorder(mask, 64)
    assert reordered.tiles(64).kinds.nnz <= 1.1 * band.tiles(64).kinds.nnz
    assert mask.tiles(64).kinds.nnz > 1.5 * band.tiles(64).kinds.nnz
    assert (reordered.dense() == mask.dense()[permutation][:, permutation]).all()


IMAGE = masks.neighborhood((16, 64), 9)  # patches of 8 x 8 see 2 x 3 patches at the most
STRIDED = masks.toeplitz(384, np.arange(0, 384, 24))  # 24 documents of 16 tokens


@pytest.mark.parametrize(
    ("mask", "tile", "before", "after"),
    [
        (IMAGE, 64, 144, 88),
        (IMAGE.T, 64, 144, 88),
        (STRIDED, 32, 144, 12),
        (STRIDED.T, 32, 144, 12),
        (masks.causal(384) - ~STRIDED, 32, 78, 12),
        (STRIDED | masks.neighborhood((16, 24), 5), 32, 144, 36),
    ],
    ids=["image", "transposed", "strided", "strided.T", "complement", "both"],
)
def test_reorder_knows_patterns_within_others(mask, tile, before, after):
    permutation, reordered = masks.reorder(mask, tile)
    assert (mask.tiles(tile).kinds.nnz, reordered.tiles(tile).kinds.nnz) == (before, after)
    assert permutation.dtype == np.int64
    assert (reordered.dense() == mask.dense()[permutation][:, permutation]).all()


def test_reorder_moves_whole_blocks():
    whole_block = sys.modules["masks.reorder"]._whole_block
    assert whole_block(masks.butterfly(96, 8)) == 8
    assert whole_block(masks.butterfly(24, 8)) == 8
    assert whole_block(masks.butterfly(92, 8)) == whole_block(masks.causal(96)) == 1


def test_reorder_keeps_what_is_dense_already():
    mask = masks.butterfly(256, 64)
    permutation, same = masks.reorder(mask)
    assert permutation.tolist() == list(range(256))
    assert same is mask


def test_draw():
    assert masks.causal(8).draw(4).splitlines() == ["▓▓······", "██▓▓····", "████▓▓··", "██████▓▓"]
    assert masks.strided(6, 1, 3, 0).draw(2).splitlines() == ["▒▒▒▒", "▒▒▒▒"]
    assert masks.dense(100, 50).draw(4) == "\n".join(["████"] * 4)
    assert masks.dense(0, 5).draw() == ""
    cells = np.arange(12).reshape(2, 6)
    shares = [1, 3, 4, 7, 8, 11, 12]  # of twelve: thirds are of the darker shade
    drawn = [masks.from_dense(np.kron(cells < n, np.ones((3, 1), bool))).draw(1) for n in shares]
    assert drawn == ["░░", "░░", "▒▒", "▒▒", "▓▓", "▓▓", "██"]
    assert masks.per_head([masks.dense(2), ~masks.dense(2)]).draw(1).splitlines() == [
        "plane 0",
        "██",
        "plane 1",
        "··",
    ]


def test_a_picture_has_32_characters_a_side():
    causal = masks.causal(31 * 32)
    for mask in (causal, masks.per_head([causal, ~causal])):
        assert mask.draw() == mask.draw(32) != mask.draw(31)


def test_plot(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    axes = masks.causal(100, 60).plot(tile=20)
    image = axes.images[0].get_array()
    expected = np.add.reduceat(masks.causal(100, 60).dense().astype(float), range(0, 100, 20))
    expected = np.add.reduceat(expected, range(0, 60, 20), axis=1) / 400
    assert np.array_equal(image, expected)
    assert axes.get_xlim() == (0, 60)
    assert axes.get_ylim() == (100, 0)
    assert axes.images[0].get_extent() == [0, 60, 100, 0]
    for nk in (0, 1):
        assert masks.dense(1, nk).plot(axes).get_xlim() == (0, 1)
    assert axes.images[0].get_clim() == (0, 1)
    assert masks.causal(1000).plot(axes).images[-1].get_array().shape == (250, 250)
    same = masks.dense(4).plot(axes)
    assert same is axes
    axes.figure.savefig(tmp_path / "mask.png")
    plt.close("all")


def _coverage_by_hand(q, k, keep, allowed, scale):
    batch, nq, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.empty((batch, heads))
    for b in range(batch):
        for h in range(heads):
            rows = []
            for i in range(nq):
                s = (k[b, :, h // group] @ q[b, i, h]) * scale
                p = np.exp(s - s.max()) * allowed[i]
                if p.sum():
                    rows.append(p[keep[b, h, i]].sum() / p.sum())
            out[b, h] = np.mean(rows)
    return out


@pytest.fixture
def qk():
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 9, 4, 8)), rng.standard_normal((2, 11, 2, 8))


def test_coverage_against_a_loop(qk, monkeypatch):
    q, k = qk
    a, b = masks.window(9, 11, left=2, right=1), masks.from_function(lambda i, j: i != j, 9, 11)
    mask = masks.per_batch([masks.per_head([a, b, a & b, ~a]), b])
    keep = np.broadcast_to(mask.dense(), (2, 4, 9, 11))
    every = np.ones((9, 11), bool)
    causal = masks.causal(9, 11)
    expected = _coverage_by_hand(q, k, keep, every, 8**-0.5)
    within = _coverage_by_hand(q, k, keep, causal.dense(), 0.7)
    budget = 64 * np.finfo(float).eps  # 11 terms of a sum, two sums and a division
    assert abs(masks.coverage(q, k, mask) - expected).max() <= budget
    assert abs(masks.coverage(q.tolist(), k.tolist(), mask) - expected).max() <= budget
    assert abs(masks.coverage(q, k, mask, scale=0.7, within=causal) - within).max() <= budget
    for scores in (22, 5):  # of two rows, and of less than one
        monkeypatch.setattr(sys.modules["masks.coverage"], "SCORES_PER_CHUNK", scores)
        assert abs(masks.coverage(q, k, mask) - expected).max() <= budget


@pytest.mark.parametrize("size", [1.0, 40.0, 1e4])
def test_coverage_of_scores_whose_exponentials_overflow(size):
    """Equal keys share the attention, whatever their size."""
    q = k = np.full((1, 8, 1, 4), size, np.float32)
    each = (np.arange(8) + 1) / 8
    np.testing.assert_allclose(masks.coverage(q, k, masks.causal(8)), each.mean(), rtol=1e-12)
    np.testing.assert_allclose(masks.coverage(q, -k, masks.causal(8)), each.mean(), rtol=1e-12)


def test_coverage_of_queries_in_small_integers():
    """A mask computes with them, beyond what their dtype counts."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 4)) for n in (300, 700))
    rows = np.array([3, 255])
    mask = masks.from_function(lambda q, kv: (q + q + kv) % 7 < 3, 300, 700)
    expected = masks.coverage(q, k, mask, queries=rows)
    assert (masks.coverage(q, k, mask, queries=rows.astype(np.uint8)) == expected).all()


def test_coverage_of_some_queries(qk, monkeypatch):
    q, k = qk
    mask, rows = masks.causal(9, 11), np.array([7, 0, 4, 4])
    some = masks.coverage(q, k, mask, queries=rows)
    each = [masks.coverage(q, k, mask, queries=[row]) for row in rows]
    budget = 8 * np.finfo(float).eps  # a sum of four, and a division
    assert abs(some - np.mean(each, axis=0)).max() <= budget
    alone = masks.restrict(mask, q_idx=[7])
    assert (each[0] == masks.coverage(q[:, [7]], k, alone)).all()
    monkeypatch.setattr(sys.modules["masks.coverage"], "SCORES_PER_CHUNK", 22)
    assert abs(masks.coverage(q, k, mask, queries=rows) - some).max() <= budget
    assert np.isnan(masks.coverage(q, k, mask, queries=np.zeros(0, int))).all()


@pytest.mark.parametrize("shape", [(2, 9, 4), (1, 2, 9, 4, 8)])
def test_coverage_takes_arrays_of_four_axes(qk, shape):
    with pytest.raises(ValueError, match=r"q\.shape=.* must be \(batch, seqlen, heads, dim\)"):
        masks.coverage(np.zeros(shape), qk[1], masks.dense(9, 11))


def test_coverage_of_extremes(qk):
    q, k = qk
    assert (masks.coverage(q, k, masks.dense(9, 11)) == 1).all()
    assert (masks.coverage(q, k, ~masks.dense(9, 11)) == 0).all()
    uniform = masks.coverage(np.zeros_like(q), k, masks.window(9, 11, left=0, right=0))
    assert abs(uniform - 1 / 11).max() <= np.finfo(float).eps
    assert np.isnan(masks.coverage(q, k, masks.dense(9, 11), within=~masks.dense(9, 11))).all()
    causal = masks.causal(9, 11)
    assert (masks.coverage(q, k, causal, within=causal) == 1).all()
    assert masks.coverage(q, k, causal).shape == (2, 4)


def test_coverage_of_no_key_and_of_one(qk):
    q, k = qk
    assert np.isnan(masks.coverage(q, k[:, :0], masks.dense(9, 0))).all()
    assert (masks.coverage(q[:, :1], k[:, :1], masks.dense(1)) == 1).all()
    odd = masks.from_function(lambda i, j: j % 2 == 1, 9, 11)
    allowed = masks.per_head([odd, ~odd, odd, ~odd])
    some = masks.coverage(q, k, odd, within=allowed)
    assert (some == [[1, 0, 1, 0]] * 2).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_coverage_of_low_precision_inputs(qk, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k = (x.astype(dtype) for x in qk)
    mask = masks.causal(9, 11)
    exact = masks.coverage(q.astype(float), k.astype(float), mask)
    budget = 64 * np.finfo(np.float32).eps  # scores and exponentials in float32
    assert abs(masks.coverage(q, k, mask) - exact).max() <= budget


def test_import_needs_numpy_and_scipy_only():
    code = (
        "import sys, masks; "
        "print(sorted({m.split('.')[0] for m in sys.modules}"
        " & {'numba', 'cupy', 'matplotlib', 'nbflash', 'torch', 'jax'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_what_a_mask_of_everything_keeps_is_everything():
    """Kept and whole sums are of float64, and the same to the bit."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 8)).astype(np.float32) for n in (16, 5000))
    assert masks.coverage(q, k, masks.dense(16, 5000)) == 1
