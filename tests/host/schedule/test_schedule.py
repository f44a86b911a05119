"""TileSchedule: its tiles rebuild the mask, in both directions, for every plane."""

import numpy as np
import pytest

import masks
from masks import BITS, FULL, INTERVAL, _check
from nbflash.schedule import block_tiles
from nbflash.schedule import tile_schedule as schedule_module
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import mask_gallery

RNG = np.random.default_rng(0)
NQ, NK = 37, 53
SCATTERED = masks.from_dense(RNG.random((NQ, NK)) < 0.2)
EMPTY = masks.from_dense(np.zeros((NQ, NK), bool))
EMPTY_ROWS = masks.from_dense(RNG.random((NQ, NK)) < (np.arange(NQ)[:, None] % 3 == 1) * 0.5)

GALLERY = {
    **{f"gallery-{name}": mask for name, mask in mask_gallery(NQ, NK).items()},
    "dense": masks.dense(NQ, NK),
    "causal": masks.causal(NQ, NK),
    "causal-more-queries": masks.causal(53, 37),
    "window": masks.window(NQ, NK, left=5, right=2),
    "documents": masks.documents([7, 20, 10]),
    "butterfly": masks.butterfly(64, block=8),
    "butterfly-or-local-and-causal": (
        masks.butterfly(64, block=8) | masks.local(64, block=8) & masks.causal(64)
    ),
    "scattered": SCATTERED,
    "scattered-and-causal": SCATTERED & masks.causal(NQ, NK),
    "empty": EMPTY,
    "empty-rows": EMPTY_ROWS,
    "one-by-one": masks.dense(1, 1),
    "no-keys": masks.dense(3, 0),
    "no-queries": masks.dense(0, 3),
    "per-head": masks.per_head([masks.causal(NQ, NK), SCATTERED, masks.causal(NQ, NK), EMPTY]),
    "per-batch": masks.per_batch([masks.dense(NQ, NK), EMPTY_ROWS]),
    "per-batch-and-head": (
        masks.per_batch([masks.window(NQ, NK, left=9), masks.dense(NQ, NK)])
        & masks.per_head([SCATTERED, masks.causal(NQ, NK)])
    ),
}

# Tiles larger than the mask, of one row, of one column, not a multiple of 32, of both orders.
TILES = [(16, 16), (64, 128), (1, 16), (16, 1), (5, 40), (40, 5)]


def dense_of(schedule):
    """Boolean (planes, nq, nk) rebuilt from the arrays alone, one tile after another."""
    tile_m, tile_n = schedule.tile_m, schedule.tile_n
    dense = np.zeros((schedule.planes, schedule.nq, schedule.nk), bool)
    for row in range(schedule.planes * schedule.n_row):
        plane, r = divmod(row, schedule.n_row)
        for p in range(schedule.row_ptr[row], schedule.row_ptr[row + 1]):
            m, n = (schedule.col_idx[p], r) if schedule.transposed else (r, schedule.col_idx[p])
            q = np.arange(m * tile_m, min((m + 1) * tile_m, schedule.nq))[:, None]
            kv = np.arange(n * tile_n, min((n + 1) * tile_n, schedule.nk))
            assert not dense[plane, q, kv].any(), "a tile is listed twice"
            dense[plane, q, kv] = cells(schedule, schedule.kind[p], plane, q, kv)
    return dense


def cells(schedule, kind, plane, q, kv):
    if kind == FULL:
        assert kv[-1] % schedule.tile_n == schedule.tile_n - 1, "FULL with a ragged tail of keys"
        return True
    if kind == INTERVAL:
        at = plane * schedule.nq + q
        return (schedule.lo[at] <= kv) & (kv < schedule.hi[at])
    c = kv % schedule.tile_n
    words = schedule.bits[kind - BITS, q % schedule.tile_m, c // 32]
    return (words >> (c % 32).astype(np.uint32) & 1).astype(bool)


def planes_of(mask):
    return np.stack([plane.dense() for plane in mask.planes])


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_tiles_rebuild_the_mask_in_both_directions(mask, tile):
    schedule = TileSchedule.from_mask(mask, *tile)
    np.testing.assert_array_equal(dense_of(schedule), planes_of(mask))
    np.testing.assert_array_equal(dense_of(schedule.T), planes_of(mask))


@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_transposing_twice_gives_the_same_arrays(mask):
    schedule = TileSchedule.from_mask(mask, 16, 8)
    twice = schedule.T.T
    for name in ("row_ptr", "col_idx", "kind", "row_order", "plane_index"):
        np.testing.assert_array_equal(getattr(twice, name), getattr(schedule, name))
    assert twice.bits is schedule.bits
    assert not twice.transposed
    assert schedule.T is schedule.T


@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_columns_increase_within_a_row(mask):
    forward = TileSchedule.from_mask(mask, 8, 16)
    for schedule in (forward, forward.T):
        rows = np.repeat(np.arange(schedule.row_ptr.size - 1), np.diff(schedule.row_ptr))
        position = rows.astype(np.int64) * max(schedule.n_col, 1) + schedule.col_idx
        assert (np.diff(position) > 0).all()
        assert (schedule.col_idx < schedule.n_col).all()


@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_outwards_goes_from_the_diagonal_to_both_ends(mask):
    """The same tiles; by the keys in the middle of tiles, counted from the row's own."""
    schedule = TileSchedule.from_mask(mask, 8, 5)
    outwards = schedule.outwards
    np.testing.assert_array_equal(dense_of(outwards), dense_of(schedule))
    for r, columns in enumerate(np.split(outwards.col_idx, schedule.row_ptr[1:-1])):
        middle = (r % max(schedule.n_row, 1) + 0.5) * 8 + schedule.nk - schedule.nq
        assert (np.diff(abs(middle - (columns + 0.5) * 5)) >= 0).all()


@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_arrays_have_the_types_kernels_expect(mask):
    forward = TileSchedule.from_mask(mask, 16, 40)
    for schedule in (forward, forward.T):
        for name in ("row_ptr", "col_idx", "kind", "lo", "hi", "plane_index", "row_order"):
            array = getattr(schedule, name)
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
        assert schedule.bits.dtype == np.uint32
        assert schedule.bits.shape[1:] == (16, 2)
        assert schedule.bits.flags.c_contiguous
        assert len(schedule.bits) >= 1
        assert schedule.row_ptr.shape == (schedule.planes * schedule.n_row + 1,)
        assert schedule.lo.shape == schedule.hi.shape == (schedule.planes * mask.shape[0],)


def test_worked_example_of_a_causal_mask():
    """Five queries and keys in tiles of two: the last tile row and column are ragged."""
    schedule = TileSchedule.from_mask(masks.causal(5), 2, 2)
    assert schedule.row_ptr.tolist() == [0, 1, 3, 6]
    assert schedule.col_idx.tolist() == [0, 0, 1, 0, 1, 2]
    assert schedule.kind.tolist() == [INTERVAL, FULL, INTERVAL, FULL, FULL, INTERVAL]
    assert schedule.lo.tolist() == [0, 0, 0, 0, 0]
    assert schedule.hi.tolist() == [1, 2, 3, 4, 5]
    assert schedule.row_order.tolist() == [2, 1, 0]
    assert schedule.tiles == {"interval": 3, "full": 3, "bits": 0}
    assert {type(n) for n in schedule.tiles.values()} == {int}
    assert schedule.density == 6 / 9
    assert schedule.bits.tolist() == [[[0], [0]]]
    transpose = schedule.T
    assert transpose.row_ptr.tolist() == [0, 3, 5, 6]
    assert transpose.col_idx.tolist() == [0, 1, 2, 1, 2, 2]
    assert transpose.kind.tolist() == [INTERVAL, FULL, FULL, INTERVAL, FULL, INTERVAL]
    assert transpose.row_order.tolist() == [0, 1, 2]


def test_bit_tiles_are_shared_between_planes():
    p, r = (RNG.random((2, 16, 16)) < 0.5).astype(bool)
    planes = [np.hstack(pair) for pair in ((p, p), (p, r), (r, r))]
    schedule = TileSchedule.from_mask(masks.per_head([*map(masks.from_dense, planes)]), 16, 16)
    assert schedule.planes == 3
    assert schedule.tiles == {"interval": 0, "full": 0, "bits": 6}
    assert len(schedule.bits) == 2
    np.testing.assert_array_equal(dense_of(schedule), planes)


def test_row_order_lists_the_longest_rows_of_all_planes_first():
    mask = masks.per_head([masks.causal(64), masks.dense(64), masks.causal(64)])
    schedule = TileSchedule.from_mask(mask, 16, 16)
    lengths = np.diff(schedule.row_ptr)
    assert lengths.tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    assert schedule.row_order.tolist() == [3, 4, 5, 6, 7, 2, 1, 0]


def test_plane_of_broadcasts_the_index():
    causal, dense = masks.causal(8), masks.dense(8)
    assert TileSchedule.from_mask(dense, 8, 8).plane_of(2, 3).tolist() == [0] * 6
    by_head = TileSchedule.from_mask(masks.per_head([causal, dense, causal]), 8, 8)
    index = by_head.plane_of(2, 3)
    assert by_head.planes == 2
    assert index.dtype == np.int32
    assert (index.reshape(2, 3) == by_head.plane_index).all()
    assert index[0] == index[2] != index[1]
    by_batch = TileSchedule.from_mask(masks.per_batch([causal, dense]), 8, 8)
    assert len(set(by_batch.plane_of(2, 3).reshape(2, 3)[0])) == 1
    assert by_batch.plane_of(2, 3)[0] != by_batch.plane_of(2, 3)[3]


def test_work_lists_every_row_of_every_head_longest_first():
    schedule = TileSchedule.from_mask(masks.causal(48), 16, 16)
    work = schedule.work(1, 2)
    assert work.dtype == np.int32
    assert work.tolist() == [[2, 0], [2, 1], [1, 0], [1, 1], [0, 0], [0, 1]]
    assert schedule.T.work(1, 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]


@pytest.mark.parametrize("mask", GALLERY.values(), ids=GALLERY)
def test_work_is_complete_and_sorted_by_length(mask):
    batch, heads = 2, 4 if mask.heads in (None, 4) else mask.heads
    forward = TileSchedule.from_mask(mask, 16, 16)
    for schedule, group in ((forward, 1), (forward.T, 1), (forward.T, 2), (forward.T, heads)):
        work = schedule.work(batch, heads, group)
        pairs = {(int(row), int(head)) for row, head in work}
        assert len(pairs) == len(work) == schedule.n_row * batch * heads // group
        lengths = np.diff(schedule.row_ptr).reshape(schedule.planes, schedule.n_row)
        plane = schedule.plane_of(batch, heads).reshape(-1, group)
        totals = [int(sum(lengths[p, row] for p in plane[head])) for row, head in work]
        assert totals == sorted(totals, reverse=True)


def test_work_of_a_group_adds_the_lengths_of_its_heads():
    """Heads 0, 1 share kv head 0 and see 2 + 0 tiles of column 0; heads 2, 3 see 2 + 2."""
    dense, empty = masks.dense(32), masks.from_dense(np.zeros((32, 32), bool))
    mask = masks.per_head([dense, empty, dense, dense])
    transpose = TileSchedule.from_mask(mask, 16, 16).T
    assert transpose.work(1, 4, group=2).tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]


def test_tables_are_the_work_list_and_what_it_refers_to():
    schedule = TileSchedule.from_mask(masks.causal(48), 16, 16)
    for given, group in ((schedule, 1), (schedule.T, 1), (schedule.T, 2)):
        named = given.row_ptr, given.col_idx, given.kind, given.lo, given.hi, given.bits
        expected = given.work(1, 2, group), given.plane_of(1, 2), *named
        for x, y in zip(given.tables(1, 2, group), expected, strict=True):
            np.testing.assert_array_equal(x, y)
    assert (schedule.T.tables(1, 2)[0] == schedule.T.tables(1, 2, 1)[0]).all()
    assert (schedule.T.work(1, 2) == schedule.T.work(1, 2, 1)).all()


@pytest.mark.parametrize("group", [0, -1, 3])
def test_work_refuses_a_group_that_does_not_divide_the_heads(group):
    transpose = TileSchedule.from_mask(masks.dense(32), 16, 16).T
    with pytest.raises(ValueError, match=f"group must divide heads=4, got group={group}"):
        transpose.work(1, 4, group)


def test_work_refuses_a_group_for_query_rows():
    with pytest.raises(ValueError, match=r"group must be 1 .* got group=2; use \.T"):
        TileSchedule.from_mask(masks.dense(32), 16, 16).work(1, 4, 2)


@pytest.mark.parametrize(
    ("limit", "what"), [(15, "16 live tiles"), (63, "128 row bounds")], ids=["tiles", "bounds"]
)
def test_too_many_tiles_for_32_bits_is_an_error(monkeypatch, limit, what):
    """The limit is lowered: 2**31 tiles do not fit in memory."""
    dense = masks.dense(64)
    mask = dense if limit == 15 else masks.per_head([dense, masks.causal(64)])
    monkeypatch.setattr(schedule_module, "_INT32_MAX", limit)
    with pytest.raises(ValueError, match=f"the mask has {what} with tile_m=16, tile_n=16"):
        TileSchedule.from_mask(mask, 16, 16)


def test_the_limit_is_that_of_32_bits():
    limits = schedule_module._INT32_MAX, block_tiles._INT32_MAX, _check.INT32_MAX
    assert set(limits) == {np.iinfo(np.int32).max}


def test_a_schedule_is_made_of_a_mask():
    with pytest.raises(TypeError, match=r"mask must be a masks\.Mask, got ndarray"):
        TileSchedule.from_mask(np.eye(16, dtype=bool), 16, 16)


@pytest.mark.parametrize(
    ("mask", "full"),
    [
        (masks.dense(100, 128), True),
        (masks.dense(128, 100), False),
        (masks.dense(1, 1), False),
        (masks.causal(128), False),
        (masks.butterfly(256, block=64), True),
        (masks.butterfly(256, block=32), False),
        (masks.dense(0, 3), True),
    ],
    ids=repr,
)
def test_full_tiles(mask, full):
    """Queries may end within a tile, keys may not."""
    schedule = TileSchedule.from_mask(mask, 64, 64)
    assert schedule.full_tiles is schedule.T.full_tiles is full


@pytest.mark.parametrize(
    ("mask", "full"),
    [
        (masks.dense(100, 128), True),
        (masks.dense(128, 100), True),
        (masks.dense(130, 1), True),
        (masks.causal(128), False),
        (masks.causal(100), False),
        (masks.padding([90], 100), False),
        (masks.window(100, left=80), False),
        (masks.documents([64, 36]), True),
        (masks.documents([65, 35]), False),
        (masks.butterfly(256, block=64), True),
        (masks.butterfly(250, block=64), True),
        (masks.butterfly(256, block=32), False),
        (masks.dense(100) - masks.from_function(lambda q, kv: q == kv, 100), False),
        (masks.per_head([masks.dense(100), masks.butterfly(100, block=64)]), True),
        (masks.per_head([masks.dense(100), masks.window(100, left=80)]), False),
        (masks.dense(0, 3), True),
        (masks.dense(3, 0), True),
    ],
    ids=repr,
)
def test_full_tiles_but_for_the_edge(mask, full):
    """Keys that a tile has past the last one are no mask."""
    schedule = TileSchedule.from_mask(mask, 64, 64)
    assert schedule.full_but_edge is schedule.T.full_but_edge is full


def test_density_and_repr():
    schedule = TileSchedule.from_mask(masks.butterfly(64, block=8), 8, 8)
    assert schedule.density == (64 / 8) * 4 / 64
    assert repr(schedule) == (
        "TileSchedule(64x64, tiles 8x8 by rows, 1 plane(s), 32 full, density 0.5)"
    )
    assert "by columns" in repr(schedule.T)
    empty = TileSchedule.from_mask(masks.dense(0, 3), 8, 8)
    assert empty.density == 0.0
    assert "no tiles" in repr(empty)


def test_an_edge_that_begins_within_the_last_tile_is_more_than_an_edge():
    """Key 9 of 10, the second one of the tile."""
    inside, whole = (
        TileSchedule.from_mask(masks.documents([0, 4], keys), 4, 4) for keys in ([9, 1], [8, 2])
    )
    for schedule in (inside, inside.T):
        assert not schedule.full_but_edge
    for schedule in (whole, whole.T):
        assert schedule.full_but_edge
