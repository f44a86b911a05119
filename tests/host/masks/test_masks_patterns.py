"""Generators against literal matrices and against the closed-form counts of their sources."""

import numpy as np
import pytest

import masks


def picture(mask):
    return ["".join(".x"[int(cell)] for cell in row) for row in mask.dense()]


# One token per block, small enough to check by eye.
LITERAL = {
    "causal": (masks.causal(4), ["x...", "xx..", "xxx.", "xxxx"]),
    "causal wide": (masks.causal(2, 4), ["xxx.", "xxxx"]),
    "causal tall": (masks.causal(4, 2), ["..", "..", "x.", "xx"]),
    "window": (masks.window(5, left=2, right=1), ["xx...", "xxx..", "xxxx.", ".xxxx", "..xxx"]),
    "window left": (masks.window(4, left=1), ["xxxx", "xxxx", ".xxx", "..xx"]),
    "prefix": (masks.prefix(4, 2), ["xx..", "xx..", "xxx.", "xxxx"]),
    "documents": (masks.documents([2, 0, 1, 2]), ["xx...", "xx...", "..x..", "...xx", "...xx"]),
    "documents causal": (masks.documents([2, 2], causal=True), ["x...", "xx..", "..x.", "..xx"]),
    "documents cross": (
        masks.documents([1, 2], [2, 3], causal=True),
        ["xx...", "..xx.", "..xxx"],
    ),
    "documents tall": (masks.documents([3], [2], causal=True), ["..", "x.", "xx"]),
    "chunked": (masks.chunked(5, 2), ["x....", "xx...", "..x..", "..xx.", "....x"]),
    "chunked wide": (masks.chunked(2, 2, nk=5), ["..xx.", "....x"]),
    "block diagonal": (masks.block_diagonal(4, 2), ["xx..", "xx..", "..xx", "..xx"]),
    "butterfly": (
        masks.butterfly(8, 1),
        [
            "xxx.x...",
            "xx.x.x..",
            "x.xx..x.",
            ".xxx...x",
            "x...xxx.",
            ".x..xx.x",
            "..x.x.xx",
            "...x.xxx",
        ],
    ),
    "butterfly truncated": (
        masks.butterfly(5, 1),
        ["xxx.x", "xx.x.", "x.xx.", ".xxx.", "x...x"],
    ),
    "butterfly ragged": (masks.butterfly(5, 2), ["xxxxx", "xxxxx", "xxxx.", "xxxx.", "xx..x"]),
    "butterfly one stage": (
        masks.butterfly(6, 1, stages=1),
        ["xx....", "xx....", "..xx..", "..xx..", "....xx", "....xx"],
    ),
    "butterfly radix 3": (
        masks.butterfly(9, 1, radix=3),
        [
            "xxxx..x..",
            "xxx.x..x.",
            "xxx..x..x",
            "x..xxxx..",
            ".x.xxx.x.",
            "..xxxx..x",
            "x..x..xxx",
            ".x..x.xxx",
            "..x..xxxx",
        ],
    ),
    "local": (masks.local(4, 1), ["xx..", "xxx.", ".xxx", "..xx"]),
    "local causal": (masks.local(4, 2, causal=True), ["x...", "xx..", "xxx.", "xxxx"]),
    "strided": (
        masks.strided(6, 1, 3, 0),
        ["x..x..", ".x..x.", "..x..x", "x..x..", ".x..x.", "..x..x"],
    ),
    "fixed": (
        masks.fixed(6, 1, 3, causal=True),
        ["x.....", "xx....", "xxx...", "..xx..", "..xxx.", "..xxxx"],
    ),
    "global": (masks.global_local(4, 1, 1, 0), ["xxxx", "xx..", "x.x.", "x..x"]),
    "toeplitz": (masks.toeplitz(4, [0, 3]), ["x..x", ".x..", "..x.", "x..x"]),
    "dilated": (
        masks.dilated(6, 1, 2),
        ["x.x...", ".x.x..", "x.x.x.", ".x.x.x", "..x.x.", "...x.x"],
    ),
    "sinks": (masks.sinks(5, 1, 2), ["x....", "xx...", "xxx..", "x.xx.", "x..xx"]),
    "sinks wide": (masks.sinks(2, 1, 2, nk=5), ["x.xx.", "x..xx"]),
    "vertical slash": (
        masks.vertical_slash(5, [1], [0, 3]),
        ["x....", ".x...", ".xx..", "xx.x.", ".x..x"],
    ),
    "axial": (masks.axial(2, 3), ["xxxx..", "xxx.x.", "xxx..x", "x..xxx", ".x.xxx", "..xxxx"]),
    "tree": (masks.tree([-1, 0, 0, 2], prefix=1), ["xx...", "xxx..", "xx.x.", "xx.xx"]),
    "tree-wide": (masks.tree([-1, 0, 0], 1, nk=6), ["xx....", "xxx...", "xx.x.."]),
    "forest": (masks.tree([-1, -1, 1]), ["x..", ".x.", ".xx"]),
    "neighbourhood": (
        masks.neighborhood(5, 3),
        ["xxx..", "xxx..", ".xxx.", "..xxx", "..xxx"],
    ),
    "neighbourhood stride": (
        masks.neighborhood(6, 3, 2),
        ["xxx...", "xxx...", "..xxx.", "..xxx.", "...xxx", "...xxx"],
    ),
    "neighbourhood 2-D": (
        masks.neighborhood((2, 3), (1, 2)),
        ["xx....", "xx....", ".xx...", "...xx.", "...xx.", "....xx"],
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_literal(name):
    mask, expected = LITERAL[name]
    assert picture(mask) == expected


def test_padding_is_per_batch():
    mask = masks.padding([3, 0, 2], 2, 3)
    assert (mask.batch, mask.heads) == (3, None)
    assert [picture(plane[0]) for plane in _entries(mask)] == [
        ["xxx", "xxx"],
        ["...", "..."],
        ["xx.", "xx."],
    ]


def _entries(mask):
    return [[mask.planes[p] for p in row] for row in mask.plane_index]


def blocks(mask, size):
    return mask.tiles(size, size).kinds.nnz


SIZES = [(256, 16), (192, 16), (128, 32)]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_interval_counts(n, size):
    m = n // size
    causal = masks.causal(n)
    assert causal.count_nonzero() == n * (n + 1) // 2
    assert blocks(causal, size) == m * (m + 1) // 2
    assert causal.tiles(size).counts() == {"interval": m, "full": m * (m - 1) // 2, "bits": 0}
    for left, right in [(40, 0), (33, 17), (64, 64), (5, 5)]:
        mask = masks.window(n, left=left, right=right)
        cut = left * (left + 1) // 2 + right * (right + 1) // 2
        assert mask.count_nonzero() == n * (1 + left + right) - cut
        a, b = -(-left // size), -(-right // size)
        assert blocks(mask, size) == m * (1 + a + b) - a * (a + 1) // 2 - b * (b + 1) // 2
    p = n // 3
    assert masks.prefix(n, p).count_nonzero() == n * (n + 1) // 2 + p * (p - 1) // 2
    lengths = [n // 2, n // 4, n - n // 2 - n // 4]
    assert masks.documents(lengths).count_nonzero() == sum(x * x for x in lengths)
    triangles = sum(x * (x + 1) // 2 for x in lengths)
    assert masks.documents(lengths, causal=True).count_nonzero() == triangles
    assert masks.block_diagonal(n, size).count_nonzero() == n * size


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_strided_and_fixed_counts(n, size):
    m = n // size
    stride, local = 4, 3
    offsets = {*range(local), *range(0, m, stride)}
    mask = masks.strided(n, size, stride, local - 1, causal=True)
    assert blocks(mask, size) == sum(m - d for d in offsets)
    reach = stride * size
    token = masks.strided(n, 1, reach, reach, causal=True)
    touched = {*range(stride + 1), *range(0, m, stride)}
    assert blocks(token, size) == sum(m - d for d in touched)
    groups = m // stride
    causal = masks.fixed(n, size, stride, 1, causal=True)
    assert blocks(causal, size) == (
        groups * stride * (stride + 1) // 2 + stride * groups * (groups - 1) // 2
    )
    assert blocks(masks.fixed(n, size, stride, 1), size) == m * stride + (m - stride) * groups


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_dilated_counts(n, size):
    width, dilation = 5, 4
    mask = masks.dilated(n, width, dilation)
    assert mask.count_nonzero() == n * (2 * width + 1) - dilation * width * (width + 1)
    m, h = n // size, -(-width * dilation // size)
    assert blocks(mask, size) == m * (2 * h + 1) - h * (h + 1)


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_global_counts(n, size):
    m, g, h = n // size, 2, 1
    mask = masks.global_local(n, size, g, h)
    assert blocks(mask, size) == 2 * g * m - g * g + (m - g) * (2 * h + 1) - h * (h + 1)
    bird = masks.bigbird(n, size, n_random=0)
    assert blocks(bird, size) == 2 * m + (m - 2) * 2 + (m - 2) * 3 - 2
    s, w = 8, 24
    t = s + w
    assert masks.sinks(n, s, w).count_nonzero() == t * (t + 1) // 2 + (n - t) * t


def test_bigbird_random_blocks_per_row():
    n, size, r = 1024, 16, 3
    rows = np.diff(masks.bigbird(n, size, n_random=r).to_scipy(size).indptr)
    assert rows[[0, -1]].tolist() == [64, 64]
    assert rows[[1, -2]].tolist() == [4 + r, 4 + r]
    assert (rows[2:-2] == 5 + r).all()
    assert masks.bigbird(n, size) == masks.bigbird(n, size)
    assert masks.bigbird(n, size) != masks.bigbird(n, size, seed=1)


def test_causal_bigbird_draws_earlier_blocks_only():
    n, size, r = 1024, 16, 2
    mask = masks.bigbird(n, size, n_random=r, causal=True)
    rows = np.diff(mask.to_scipy(size, touched=True).indptr)
    assert rows[:4].tolist() == [1, 2, 3, 4]
    assert (rows[4:-1] == 3 + r).all()
    assert not np.triu(mask.dense(), 1).any()


@pytest.mark.parametrize("n", [64, 192, 256])
def test_token_pattern_counts(n):
    rng = np.random.default_rng(n)
    verticals, slashes = rng.choice(n, 9, replace=False), rng.choice(n, 7, replace=False)
    both = sum(int(v + s < n) for v in verticals for s in slashes)
    mask = masks.vertical_slash(n, verticals, slashes)
    assert mask.count_nonzero() == (n - verticals).sum() + (n - slashes).sum() - both
    height = 16
    assert masks.axial(height, n // height).count_nonzero() == n * (height + n // height - 1)
    parents = [int(rng.integers(-1, i)) for i in range(n)]
    depth = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    assert masks.tree(parents, 11).count_nonzero() == sum(depth) + n + 11 * n
    s = 8
    monarch = masks.block_diagonal(64, s) | masks.toeplitz(64, np.arange(0, 64, s))
    assert monarch.count_nonzero() == 64 * (2 * s - 1)
    assert (monarch.dense() == masks.axial(s, s).dense()).all()


@pytest.mark.parametrize("kernel", [1, 2, 7, 8])
@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("dilation", [1, 4])
def test_neighbourhood_keeps_exactly_kernel_keys(kernel, stride, dilation):
    if stride > kernel:
        stride = kernel
    rows = masks.neighborhood(63, kernel, stride, dilation).dense().sum(1)
    assert (rows == kernel).all()
    volume = masks.neighborhood((4, 6, 8), (2, 3, min(kernel, 8)), dilation=(2, 2, 1))
    assert volume.count_nonzero() == 4 * 6 * 8 * 2 * 3 * min(kernel, 8)


def test_a_neighbourhood_of_many_tokens_by_columns():
    """NumPy 2.4.6 unravels the places of a column of more than 8192 wrongly."""
    mask, n = masks.neighborhood((100, 100), 5), np.arange(10_000)
    keys = np.arange(9_500, 9_504)
    found = mask(n[:, None], keys[None])
    assert np.array_equal(found, np.stack([mask(n, np.full_like(n, key)) for key in keys], axis=1))
    assert found.any()


@pytest.mark.parametrize("m", [8, 16, 64, 128])
def test_butterfly_counts(m):
    low = m.bit_length() - 1
    row, col = np.indices((m, m))
    for stages in range(low + 1):
        mask = masks.butterfly(m, 1, stages=stages)
        assert mask.count_nonzero() == m * (stages + 1)
        xor = np.isin(row ^ col, [0, *(1 << s for s in range(stages))])
        assert (mask.dense() == xor).all()
        causal = masks.butterfly(m, 1, stages=stages, causal=True)
        assert causal.count_nonzero() == m + m * stages // 2
        bits = [bin(r % 2**stages).count("1") + 1 for r in range(m)]
        assert causal.dense().sum(1).tolist() == bits
        stats = mask.stats(m)
        assert stats.components == m // 2**stages
        assert stats.layers == (low if stages == low else None)


@pytest.mark.parametrize(("radix", "m", "stages"), [(4, 64, 3), (4, 64, 2), (3, 81, 4)])
def test_radix_butterfly_counts(radix, m, stages):
    mask = masks.butterfly(m * 4, 4, stages=stages, radix=radix)
    assert blocks(mask, 4) == m * (1 + stages * (radix - 1))


def test_truncated_butterfly_is_the_corner_of_the_next_power():
    for m in range(1, 40):
        full = masks.butterfly(64, 1).dense()
        assert (masks.butterfly(m, 1).dense() == full[:m, :m]).all()


@pytest.mark.parametrize(("m", "cells", "stages"), [(64, 16, 2), (256, 16, 2), (128, 16, 4)])
def test_stretched_butterfly_density_does_not_depend_on_n(m, cells, stages):
    stretched = masks.butterfly(m, m // cells, stages=stages)
    assert stretched.count_nonzero() == m * m * (stages + 1) // cells


def test_log_sparse_is_not_the_butterfly():
    log = masks.toeplitz(64, [0, 1, 2, 4, 8, 16, 32], causal=True)
    assert log.count_nonzero() == 64 * 7 - 63
    assert (log.dense() != masks.butterfly(64, 1, causal=True).dense()).any()


@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 0.51, 0.99, 1.0])
def test_random_keeps_an_exact_number_of_blocks(density):
    m = 40
    mask = masks.random(m * 8, 8, density, seed=3)
    assert blocks(mask, 8) == max(round(density * m * m), m)
    assert mask.dense().diagonal().all()
    causal = masks.random(m * 8, 8, density, seed=3, causal=True)
    total = m * (m + 1) // 2
    assert blocks(causal, 8) == max(round(density * total), m)
    assert not np.triu(causal.dense(), 1).any()
    assert mask == masks.random(m * 8, 8, density, seed=3)


def test_random_is_uniform_off_the_diagonal():
    # 4 blocks: 12 places, 6 drawn; each place is hit in half of the draws, 5 sigma apart.
    draws = 2000
    hits = sum(masks.random(4, 1, 10 / 16, seed=s).dense().astype(int) for s in range(draws))
    off = hits[~np.eye(4, dtype=bool)]
    assert abs(off - draws / 2).max() < 5 * np.sqrt(draws / 4)


# patterns.md D.3: N = 4096, block density / share of live blocks that are full / fill.
FILL = [
    (masks.causal(4096), 128, "0.516 / 0.94 / 0.97"),
    (masks.window(4096, left=511, right=0), 128, "0.146 / 0.60 / 0.80"),
    (masks.sinks(4096, 64, 512), 128, "0.173 / 0.51 / 0.76"),
    (masks.dilated(4096, 64, 8), 64, "0.248 / 0.00 / 0.12"),
    (masks.strided(4096, 1, 64, 64, causal=True), 64, "0.508 / 0.00 / 0.05"),
    (masks.axial(64, 64), 64, "1.000 / 0.02 / 0.03"),
]


@pytest.mark.parametrize(("mask", "size", "expected"), FILL)
def test_three_numbers_that_users_confuse(mask, size, expected):
    stats = mask.stats(size)
    got = f"{stats.tile_density:.3f} / {stats.full / stats.tiles:.2f} / {stats.fill:.2f}"
    assert got == expected


@pytest.mark.parametrize("make", [masks.random, masks.bigbird])
def test_seeds_are_those_of_numpy(make):
    given = (1024, 16, 0.1) if make is masks.random else (1024, 16)
    rng = np.random.default_rng(5)
    first, second = make(*given, seed=rng), make(*given, seed=rng)
    assert first == make(*given, seed=5) != second
    large = 2**70
    assert make(*given, seed=large) == make(*given, seed=np.random.default_rng(large))
    assert make(*given, seed=None) != make(*given, seed=None)
    with pytest.raises(TypeError, match="seed='a': must be an integer"):
        make(*given, seed="a")


@pytest.mark.parametrize(("nq", "nk"), [(6, 6), (3, 6), (8, 6)])
def test_causal_padding(nq, nk):
    """Padded behind where there are as many queries as keys; else the last tokens of each entry."""
    lengths = np.array([0, 1, 4, 6])
    got = masks.padding(lengths, nq, nk, causal=True).dense()[:, 0]
    first = np.zeros(4, int) if nq == nk else lengths - nq
    own = first[:, None, None] + np.arange(nq)[:, None]
    j = np.arange(nk)
    np.testing.assert_array_equal(got, (j <= own) & (j < lengths[:, None, None]))
