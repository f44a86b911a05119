"""Arguments that are left out, ends of ranges, and which of several wrong entries is named."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from scipy import sparse

import masks
from masks import patterns
from masks.block import BlockSparse
from masks.interval import Interval
from masks.leaves import Columns, Diagonals
from nbflash.schedule.tile_schedule import TileSchedule

N = 48
# Of each generator a call, and what it takes for granted.
DEFAULTS = {
    "axial": ((4, 6), {"causal": False}),
    "bigbird": ((256, 8), {"n_random": 3, "width": 1, "seed": 0, "causal": False}),
    "butterfly": ((N, 4), {"stages": 4, "radix": 2, "causal": False}),
    "causal": ((N,), {"nk": N}),
    "chunked": ((N, 5), {"causal": True, "nk": N}),
    "dense": ((N,), {"nk": N}),
    "dilated": ((N, 2, 3), {"causal": False}),
    "documents": (([20, 28],), {"lengths_k": [20, 28], "causal": False}),
    "documents_from_cu_seqlens": (([0, 20, N],), {"cu_seqlens_k": [0, 20, N], "causal": False}),
    "fixed": ((N, 4, 4), {"summary": 1, "causal": False}),
    "from_function": ((np.greater, N), {"nk": N}),
    "from_scipy": ((sparse.eye_array(6).tocsr(),), {"block": 1, "shape": (6, 6)}),
    "global_local": ((N, 4), {"n_global": 1, "width": 1, "causal": False}),
    "local": ((N, 4), {"width": 1, "causal": False}),
    "neighborhood": (((6, 8), 3), {"stride": (1, 1), "dilation": (1, 1)}),
    "padding": (([20, 28], N), {"nk": N, "causal": False}),
    "prefix": ((N, 7), {"nk": N}),
    "random": ((N, 4, 0.3), {"seed": 0, "causal": False}),
    "sinks": ((N, 2, 5), {"nk": N}),
    "strided": ((N, 4, 5), {"width": 1, "causal": False}),
    "toeplitz": ((N, [0, 5]), {"block": 1, "causal": False}),
    "tree": (([-1, 0, 0],), {"prefix": 0, "nk": 3}),
    "window": ((N,), {"nk": N, "left": N, "right": N}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_of_a_call(name):
    make, (given, implied) = getattr(masks, name), DEFAULTS[name]
    assert make(*given) == make(*given, **implied)


def test_the_first_head_of_the_first_entry_is_asked_unless_another_is_named():
    head, entry = ([masks.causal(4), masks.dense(4), masks.dense(4)][:n] for n in (3, 2))
    for mask in (masks.per_head(head), masks.per_batch(entry)):
        assert not mask(0, 3)
        assert mask(3, 0)
        assert mask(0, 3, head=1, batch=1)


def test_what_a_mask_says_of_itself():
    plain, planes = masks.causal(4, 6), masks.padding([3, 4], 4, 6)
    assert (plain.is_plain, planes.is_plain) == (True, False)
    assert (plain.batch, plain.heads, planes.batch, planes.heads) == (None, None, 2, None)
    assert plain.shape == planes.shape == (4, 6)
    assert plain.planes == (plain,)
    assert (plain.plane_index.tolist(), planes.plane_index.tolist()) == ([[0]], [[0], [1]])
    assert plain.nnz == plain.count_nonzero() == 3 + 4 + 5 + 6


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_a_function_is_not_asked_about_nothing(shape):
    """It may look for the largest key, say."""
    mask = masks.from_function(lambda q, kv: kv == kv.max(), *shape)
    assert mask.dense().shape == shape
    assert mask.count_nonzero() == mask.tiles(4).kinds.nnz == 0
    assert mask(np.zeros((0, 1), int), np.zeros((1, 0), int)).shape == (0, 0)


def test_what_is_left_out_of_a_method():
    mask = masks.causal(300)
    assert mask.stats() == mask.stats((128, 128), head_dim=64, itemsize=2)
    assert mask.tiles(96) is mask.tiles(96, 96)
    assert mask.live_tiles(96) == mask.live_tiles(96, 96)
    assert (mask.to_scipy() != mask.to_scipy(1)).nnz == 0
    strided = masks.toeplitz(1024, np.arange(0, 1024, 32), causal=True)
    assert masks.reorder(strided)[1] == masks.reorder(strided, 64)[1]


def test_the_largest_mask():
    n = 2**31 - 1
    mask = masks.window(1, n, left=n, right=n)
    assert mask == masks.dense(1, n)
    assert (mask.shape, mask.count_nonzero()) == ((1, n), n)


def test_blocks_of_a_grid_of_more_than_two_to_the_31():
    n, last = 2**31 - 1, 2**18 - 1
    one, other = (
        BlockSparse(n, n, (8192, 8192), *places)
        for places in (([3, 200_000, last], [5, 7, last]), ([4, 200_000, last], [5, 7, last]))
    )
    both = one & other
    assert (both.rows.tolist(), both.cols.tolist()) == ([200_000, last], [7, last])


def test_what_is_computed_of_a_mask_does_not_change():
    mask = masks.causal(40)
    tiles, schedule = mask.tiles(16), TileSchedule.from_mask(mask, 16, 16)
    for made, name in ((tiles, "lo"), (schedule, "kind"), (mask.stats(16), "tokens")):
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, None)
        assert made in {made}
    assert schedule != TileSchedule.from_mask(mask, 16, 16)  # it is itself, not its arrays
    assert mask.stats(16) == masks.causal(40).stats(16)


def test_rows_and_tiles_that_are_more_than_is_computed_at_a_time():
    """A row of more than 2**18 keys, several of fewer, and tiles of more cells."""
    n = 2**18 + 1
    assert masks.dense(2, n).dense().all()
    assert masks.causal(2, n).dense().sum(1).tolist() == [n - 1, n]
    n = 520
    cells = np.add.outer(np.arange(n), np.arange(n)) % 7 < 3
    for mask in (masks.from_dense(cells), masks.from_function(lambda q, kv: (q + kv) % 7 < 3, n)):
        assert (mask.dense() == cells).all()
        assert (mask.tiles(n).dense() == cells).all()
        assert mask.count_nonzero() == mask.tiles(n).count_nonzero() == cells.sum()
        assert (mask.to_scipy().toarray() == cells).all()


def test_tiles_of_planes_are_counted_together():
    causal, band = masks.causal(64), masks.window(64, left=3, right=3)
    planes = masks.per_head([causal, masks.dense(64), causal])
    assert planes.live_tiles(16) == planes.live_tiles(16, 16) == (10 + 16, 6 + 16)
    assert planes.live_tiles(16, 32) == (6 + 8, 2 + 8)
    both = masks.per_head([masks.per_batch([causal, band]), causal, band])
    assert (both.batch, both.heads, len(both.planes)) == (2, 3, 2)
    assert both.plane_index.tolist() == [[0, 0, 1], [1, 0, 1]]
    assert both.count_nonzero() == 3 * causal.count_nonzero() + 3 * band.count_nonzero()


# Of several wrong entries the first is named.
FIRST = {
    "lengths": (lambda: masks.documents([3, -1, -2]), r"lengths\[1\]=-1: must lie in"),
    "cu_seqlens": (
        lambda: masks.documents_from_cu_seqlens([0, 5, 3, 4, 2]),
        r"cu_seqlens\[2\]=3: must not be less",
    ),
    "parents": (lambda: masks.tree([-1, 2, 0, 3, 4]), r"parents\[1\]=2: must come before node 1"),
    "verticals": (lambda: masks.vertical_slash(9, [2, 5, 2, 5], []), "verticals holds 2 more"),
    "query": (lambda: masks.dense(4)([3, 4, 5], 0), r"q_idx holds 4: must lie in \[0, 4\)"),
    "key": (lambda: masks.dense(4)([[0], [0]], [[1, 7], [8, 9]]), "kv_idx holds 7: must lie"),
    "kept": (lambda: masks.restrict(masks.dense(9), [1, 4, 3, 2]), r"q_idx\[2\]=3: must be gr"),
    "blocks": (
        lambda: masks.prefix(12, 4).to_scipy(4),
        r"block=4: block \(1, 1\) is attended only in part",
    ),
    "bsr": (
        lambda: masks.from_scipy(
            sparse.bsr_array((np.array([[[1, 1]], [[0, 1]], [[1, 0]]]), [0, 1, 2], [0, 3]))
        ),
        "matrix block 1 holds zeros and non-zeros",
    ),
    "duplicates": (
        lambda: masks.from_scipy(_csr([0, 2, 1, 1, 2, 2], [0, 2, 4, 6])),
        r"matrix.indices\[3\]=1: is duplicated",
    ),
    "indptr": (
        lambda: masks.from_scipy(_csr([0, 1, 2, 1], [0, 3, 2, 1])),
        r"matrix.indptr\[2\]=2: must not decrease",
    ),
    "columns": (
        lambda: masks.from_scipy(_oblong("csc", [0, 2, 3], [0, 1, 2, 3])),
        r"matrix.indices\[1\]=2: must lie in \[0, 1\]",
    ),
    "columns, pointers": (
        lambda: masks.from_scipy(_oblong("csc", [0, 1], [0, 1, 2])),
        "matrix.indptr: must start with 0 and have 4 entries",
    ),
    "places": (
        lambda: masks.from_scipy(_oblong("coo", [0, 1, 1, 1, 1], [2, 0, 0, 1, 1])),
        "holds 3 more than once",
    ),
    "place": (
        lambda: masks.from_scipy(_oblong("coo", [0, 1], [3, 4])),
        r"matrix.col\[0\]=3: must lie in \[0, 2\]",
    ),
    "place above": (
        lambda: masks.from_scipy(_oblong("coo", [0, -1], [1, 1])),
        r"matrix.row\[1\]=-1: must lie in \[0, 1\]",
    ),
    "queries": (
        lambda: masks.coverage(Q, Q, masks.dense(3), queries=[1, -1]),
        r"queries reach from -1 to 1: must be in \[0, 3\)",
    ),
    "head_dim": (
        lambda: masks.coverage(Q[..., :0], Q[..., :0], masks.dense(3)),
        "head_dim=0: must be at least 1",
    ),
    "no heads": (
        lambda: masks.coverage(Q, Q[:, :, :0], masks.dense(3)),
        "k has 0 heads: the 2 heads of q must be a multiple",
    ),
    "within heads": (
        lambda: masks.coverage(Q, Q, masks.dense(3), within=masks.per_head(THREE)),
        "within.heads=3: must be 2 or broadcast",
    ),
    "image": (
        lambda: masks.axial(2**16, 2**16),
        rf"height \* width={2**32}: must be at most {2**31 - 1}",
    ),
    "volume": (
        lambda: masks.neighborhood((2**11, 2**11, 2**10), 1),
        rf"prod\(shape\)={2**32}: must be at most",
    ),
    "keys of documents": (
        lambda: masks.documents([0, 0], [2**30, 2**30]),
        rf"sum\(lengths_k\)={2**31}: must be at most",
    ),
    "tokens of blocks": (
        lambda: masks.from_scipy(sparse.csr_array((2, 3), dtype=bool), (1, 2**30)),
        rf"shape\[1\]={3 * 2**30}: must be at most",
    ),
    "no image": (lambda: masks.neighborhood((), 1), r"shape=\(\): must have 1 to 3 dimensions"),
    "strides": (
        lambda: masks.neighborhood((8, 8), 3, (1, 1, 1)),
        r"stride=\(1, 1, 1\): must have 2 entries like shape",
    ),
    "axes": (lambda: masks.from_dense(np.ones(3, bool)), "array has 1 dimensions: must have 2 or"),
    "more axes": (lambda: masks.from_dense(np.ones((1,) * 5, bool)), "array has 5 dimensions"),
    "planes": (
        lambda: masks.per_head([*THREE, masks.dense(4), masks.dense(5)]),
        r"per_head\[3\].shape=\(4, 4\): must be \(3, 3\)",
    ),
    "indices": (
        lambda: masks.from_scipy(_csr([0, 3, 4, 2], [0, 1, 2, 4])),
        r"matrix.indices\[1\]=3: must lie in \[0, 2\]",
    ),
}


Q, THREE = np.zeros((1, 3, 2, 4)), [masks.dense(3), masks.causal(3), ~masks.dense(3)]


def _oblong(form, first, second):
    """Two rows, three columns; what says where entries are is set unchecked."""
    matrix = {"csc": sparse.csc_array, "coo": sparse.coo_array}[form]((2, 3), dtype=bool)
    if form == "coo":
        matrix.coords = np.array(first), np.array(second)
    else:
        matrix.indices, matrix.indptr = np.array(first), np.array(second)
    matrix.data = np.ones(len(first), bool)
    return matrix


def _csr(indices, indptr):
    matrix = sparse.csr_array((3, 3), dtype=bool)
    matrix.indptr, matrix.indices = np.array(indptr), np.array(indices)
    matrix.data = np.ones(len(indices), bool)
    return matrix


@pytest.mark.parametrize(("call", "message"), FIRST.values(), ids=FIRST)
def test_the_first_wrong_entry_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def picture(mask):
    return ["".join(".x"[int(cell)] for cell in row) for row in mask.dense()]


# More queries than keys, one key, one token: by eye.
LITERAL = {
    "chunked tall": (masks.chunked(4, 2, nk=2), ["..", "..", "x.", "xx"]),
    "chunked both ways": (masks.chunked(4, 2, causal=False, nk=3), ["...", "xx.", "xx.", "..x"]),
    "prefix tall": (masks.prefix(3, 1, nk=2), ["x.", "x.", "xx"]),
    "prefix wide": (masks.prefix(2, 1, nk=4), ["xxx.", "xxxx"]),
    "sinks tall": (masks.sinks(4, 1, 1, nk=2), ["..", "..", "x.", "xx"]),
    "sinks more than keys": (masks.sinks(2, 9, 1), ["x.", "xx"]),
    "one column": (masks.vertical_slash(1, [0], [0]), ["x"]),
    "strided of width 0": (masks.strided(4, 2, 2, 0), ["xx..", "xx..", "..xx", "..xx"]),
    "toeplitz of blocks": (masks.toeplitz(4, [1, 9], 2), ["..xx", "..xx", "xx..", "xx.."]),
    "fixed, the last group short": (
        masks.fixed(5, 1, 3, 2),
        ["xxx.x", "xxx.x", "xxx.x", ".xxxx", ".xxxx"],
    ),
    "global, all": (masks.global_local(3, 1, 9, 0), ["xxx"] * 3),
    "bigbird of one block": (masks.bigbird(2, 2), ["xx", "xx"]),
    "bigbird of no token": (masks.bigbird(0, 2), []),
    "random of one block": (masks.random(2, 2, 0.0), ["xx", "xx"]),
    "butterfly of one block": (masks.butterfly(1, 4), ["x"]),
}


@pytest.mark.parametrize(("mask", "expected"), LITERAL.values(), ids=LITERAL)
def test_literal(mask, expected):
    assert picture(mask) == expected
    assert mask.count_nonzero() == "".join(expected).count("x")


# A seed has the same mask tomorrow, and in another version.
DRAWN = {
    "few": (
        masks.random(8, 1, 0.3, seed=4),
        "xx..x..x .x..x... ..x..x.. .x.x...x ....x... .....x.x x.....x. x...x..x",
    ),
    "many": (
        masks.random(8, 1, 0.8, seed=4),
        "x.xx.xx. xxx..x.x xxxxx.xx x.xxxxx. xxxxxxxx xxxxxxx. .xxxxxxx .xxx.xxx",
    ),
    "causal": (
        masks.random(8, 1, 0.6, seed=4, causal=True),
        "x....... .x...... .xx..... .x.x.... .x..x... x.x.xx.. .xxx.xx. .x.x.xxx",
    ),
    "bigbird": (
        masks.bigbird(8, 1, n_random=2, seed=4),
        "xxxxxxxx xxx..xxx xxxxxx.x x.xxxxxx x.xxxxxx xxx.xxxx x.xx.xxx xxxxxxxx",
    ),
    "bigbird, causal": (
        masks.bigbird(8, 1, n_random=1, seed=4, causal=True),
        "x....... xx...... xxx..... xxxx.... x.xxx... x..xxx.. x...xxx. xxxxxxxx",
    ),
}


@pytest.mark.parametrize(("mask", "expected"), DRAWN.values(), ids=DRAWN)
def test_a_seed_has_the_same_mask_for_ever(mask, expected):
    assert picture(mask) == expected.split()


def test_places_below_the_diagonal_are_exact_where_roots_are_not():
    """Numbers up to 2**52: the root of 8 key + 1 is rounded, up or down."""
    row = np.array([1, 2, 3, 1000, 2**20, 2**26, 94906265], np.int64)
    first = row * (row - 1) // 2
    for key, expected in ((first, (row, 0)), (first + row - 1, (row, row - 1))):
        for got, wanted in zip(patterns._triangle(key), expected, strict=True):
            assert (got == wanted).all()


P = np.arange(9)
CLOSED = {
    "causal": (masks.causal(20, 30).T, Interval),
    "dense": (masks.dense(20, 30).T, Interval),
    "window": (masks.window(20, left=3, right=2).T, Interval),
    "documents": (masks.documents([5, 10, 5]).T, Interval),
    "nothing": ((~masks.dense(20, 30)).T, Interval),
    "some queries": ((masks.window(20, 10, left=2, right=0)).T, Interval),
    "touching": (masks.window(9, left=2, right=0) | Interval(9, P + 1, P + 3), Interval),
    "touching, the other way": (Interval(9, P + 1, P + 3) | masks.window(9, right=0), Interval),
    "complement": (~masks.causal(9), Interval),
    "diagonals": (masks.dilated(20, 2, 3).T, Diagonals),
    "two strides": (masks.strided(20, 1, 3) | masks.strided(20, 1, 5), Diagonals),
    "columns": (~Columns(8, np.arange(8) > 3), Columns),
}


@pytest.mark.parametrize(("mask", "kind"), CLOSED.values(), ids=CLOSED)
def test_closed_forms_stay(mask, kind):
    assert type(mask) is kind


@pytest.mark.parametrize(
    ("n", "tile", "node", "components", "layers"),
    [
        (1024, 64, 1, 1, 1023),
        (1025, 64, 64, 1, 16),
        (65536, 64, 64, 1, 1023),
        (65537, 64, 128, 1, 512),
        (65537, (64, 96), 192, 1, 341),
    ],
)
def test_nodes_of_a_long_band(n, tile, node, components, layers):
    """Tokens up to 1024, then as many blocks of whole tiles at the most."""
    stats = masks.window(n, left=1, right=1).stats(tile)
    assert (stats.node, stats.reach_exact) == (node, node == 1)
    assert (stats.components, stats.layers) == (components, layers)
    unit = "tokens" if node == 1 else f"blocks of {node} tokens"
    bound = "" if node == 1 else ">= "
    text = f"components      {bound}1 ({unit})\nlayers to reach {bound}{layers}"
    assert str(stats).endswith(text)


def test_a_window_beyond_all_keys():
    """The first of 10 queries stands 7 before the first of 3 keys."""
    assert masks.window(10, 3, right=10) == masks.window(10, 3, right=10**9) == masks.dense(10, 3)
    assert masks.window(3, 10, left=10) == masks.window(3, 10, left=10**9) == masks.dense(3, 10)
