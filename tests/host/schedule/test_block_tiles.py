"""The lists of tiles of a block map, the specification of those that are made on the device."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks import BITS, FULL, INTERVAL
from nbflash import BlockMap
from nbflash.inputs.block_layout import BlockLayout, check_block_map
from nbflash.schedule.block_tiles import BlockTiles, item_lengths, work_order

SEED = st.integers(0, 2**32 - 1)
WITHIN = {
    "all": lambda nq, nk: None,
    "causal": masks.causal,
    "window": lambda nq, nk: masks.window(nq, nk, left=9, right=5),
    "documents": lambda nq, nk: masks.documents([nq // 3, nq - nq // 3], [nk // 2, nk - nk // 2]),
    "padding": lambda nq, nk: masks.padding([nk // 2, nk], nq, nk),
    "per head": lambda nq, nk: masks.per_head(
        [masks.causal(nq, nk), masks.dense(nq, nk), masks.causal(nq, nk), masks.dense(nq, nk)]
    ),
}


def layout_of(block_map, batch=2, heads=4, **options):
    problem = SimpleNamespace(
        batch=batch,
        heads=heads,
        nq=block_map.shape[0],
        nk=block_map.shape[1],
        device="cpu",
        device_id=0,
    )
    return check_block_map(block_map, problem, **options)


@st.composite
def cases(draw):
    """A map and tiles that fit its blocks, for a batch of 2 and 4 heads."""
    rng = np.random.default_rng(draw(SEED))
    shape = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    block = draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8]))
    tile = [draw(st.sampled_from([b // 2, b, 2 * b])) for b in block]
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    extent = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    k = draw(st.integers(0, 2 * columns))
    indices = rng.integers(-1, columns + 1, (*extent, rows, k))
    counts = rng.integers(0, k + 1, (*extent, rows))
    within = WITHIN[draw(st.sampled_from(list(WITHIN)))](*shape)
    return BlockMap(indices, counts, shape=shape, block=block, within=within), tile


def cells_of(tiles, lists, transposed):
    """(planes, nq, nk) of lists of tiles."""
    (nq, nk), (row_ptr, col_idx, kind) = tiles.layout.shape, lists
    planes, n_row = tiles.map_plane.size, tiles.n_col if transposed else tiles.n_row
    out = np.zeros((planes, tiles.n_row * tiles.tile_m, tiles.n_col * tiles.tile_n), bool)
    lo, hi = (x.reshape(planes, nq) for x in (tiles.lo, tiles.hi))
    raw = np.ascontiguousarray(tiles.bits).view(np.uint8)
    bits = np.unpackbits(raw, axis=-1, bitorder="little").astype(bool)
    for r in range(planes * n_row):
        for t in range(row_ptr[r], row_ptr[r + 1]):
            p, (m, n) = r // n_row, (r % n_row, col_idx[t])
            m, n = (n, m) if transposed else (m, n)
            q0, k0 = m * tiles.tile_m, n * tiles.tile_n
            part = out[p, q0 : q0 + tiles.tile_m, k0 : k0 + tiles.tile_n]
            if kind[t] >= BITS:
                part |= bits[kind[t] - BITS, :, : tiles.tile_n]
            elif kind[t] == FULL:
                assert k0 + tiles.tile_n <= nk
                part[:] = True
            else:
                assert kind[t] == INTERVAL
                q = np.minimum(np.arange(q0, q0 + tiles.tile_m), nq - 1)
                kv = np.arange(k0, k0 + tiles.tile_n)
                part |= (lo[p][q][:, None] <= kv) & (kv < hi[p][q][:, None])
    assert not out[:, :nq, nk:].any()
    return out[:, :nq, :nk]


@settings(max_examples=150)
@given(cases())
def test_lists_are_the_mask(case):
    """By rows and by columns; every row has a tile, in order, and there is room for all."""
    block_map, tile = case
    tiles = BlockTiles(layout_of(block_map), *tile)
    keep = block_map.dense().reshape(-1, *block_map.grid_shape)
    mask = block_map.to_mask(4)
    expected = np.broadcast_to(mask.dense(), (2, 4, *mask.shape)).reshape(8, *mask.shape)
    for transposed in (False, True):
        row_ptr, col_idx, kind = lists = tiles.lists(keep, transposed)
        cells = cells_of(tiles, lists, transposed)
        assert np.array_equal(cells[tiles.plane_of(2, 4)], expected)
        assert (np.diff(row_ptr) > 0).all()
        assert kind.size <= tiles.capacity(transposed)
        for begin, end in itertools.pairwise(row_ptr):
            assert (np.diff(col_idx[begin:end]) > 0).all()


def test_a_tile_of_one_block_has_no_bits():
    made = BlockMap(np.array([[[[0], [1]]]]), shape=16, block=8)
    tiles = BlockTiles(layout_of(made), 4, 8)
    _, _, kind = tiles.lists(made.dense()[0])
    assert (kind == FULL).all()
    own, other = [FULL, -1], [-1, FULL]
    assert tiles.kinds(made.dense()[0]).tolist() == [[own, own, other, other]]
    assert not tiles.bits.any()
    assert tiles.bits.shape == (1, 4, 1)

    assert set(tiles.edge_id.tolist()) <= {1}


# Extent of the map, its intervals; planes of the lists, those of the map and of the intervals.
PLANES = {
    "one": ((1, 1), "all", [[0]], [0], [0]),
    "batch": ((2, 1), "all", [[0], [1]], [0, 1], [0, 0]),
    "heads": ((1, 2), "all", [[0, 0, 1, 1]], [0, 1], [0, 0]),
    "padding": ((1, 1), "padding", [[0], [1]], [0, 0], [0, 1]),
    "within heads": ((1, 1), "per head", [[0, 1, 2, 3]], [0, 0, 0, 0], [0, 1, 0, 1]),
    "both": ((2, 2), "padding", [[0, 0, 1, 1], [2, 2, 3, 3]], [0, 1, 2, 3], [0, 0, 1, 1]),
}


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("name", PLANES)
def test_arrays_have_the_planes_and_the_types_that_kernels_expect(name, tile):
    """What is the same for all heads, or all batch elements, is listed once."""
    extent, within, plane_index, map_plane, within_plane = PLANES[name]
    indices = np.zeros((*extent, 4, 1), int)
    made = BlockMap(indices, shape=32, block=8, within=WITHIN[within](32, 32))
    tiles = BlockTiles(layout_of(made), tile, tile)
    assert tiles.plane_index.tolist() == plane_index
    assert tiles.map_plane.tolist() == map_plane
    assert tiles.within_plane.tolist() == within_plane
    assert tiles.plane_of(2, 4).tolist() == np.broadcast_to(plane_index, (2, 4)).ravel().tolist()
    names = "plane_index", "map_plane", "within_plane", "lo", "hi"
    for name in (*names, "full_lo", "full_hi", "edge_ptr", "edge_col", "edge_id"):
        array = getattr(tiles, name)
        assert (array.dtype, array.flags.c_contiguous) == (np.int32, True), name
    assert tiles.bits.dtype == np.uint32


def test_edges_of_tiles_that_are_wider_than_a_word():
    """Two words of a row, of tiles of two blocks."""
    made = BlockMap(np.arange(4).reshape(1, 1, 4, 1) // 2, shape=128, block=(32, 64))
    tiles = BlockTiles(layout_of(made, causal=True), 64, 64)
    assert tiles.bits.shape[1:] == (64, 2)
    lists = tiles.lists(made.dense()[0])
    expected = masks.causal(128) & masks.documents([64, 64])
    np.testing.assert_array_equal(cells_of(tiles, lists, False)[0], expected.dense())


def test_causal_and_window_of_a_call_are_intervals_too():
    made = BlockMap(np.zeros((1, 1, 2, 1), int), shape=16, block=8)
    layout = layout_of(made, causal=True, window=(3, None))
    assert layout.within == masks.causal(16) & masks.window(16, left=3)
    assert layout == layout_of(made & masks.window(16, left=3), causal=True)


def test_live_tiles_are_a_bound():
    made = BlockMap(np.tile([[[[0, 1]]]], (1, 2, 4, 1)), shape=32, block=8)
    layout = layout_of(made)
    assert layout.live_tiles(8, 8) == (2 * 4 * 2, 2 * 4 * 2)
    assert layout.live_tiles(4, 4) == (2 * 8 * 4, 2 * 8 * 4)
    assert layout.live_tiles(16, 8) == (2 * 2 * 4, 0)
    assert layout.live_tiles(16, 16) == (2 * 2 * 2, 0)


def test_work_is_by_groups_of_heads_longest_first():
    lengths = np.array([[1, 5], [4, 4], [9, 2]])
    plane_of = np.array([0, 0, 1, 2])
    own = item_lengths(lengths.ravel(), plane_of, 2, 1)
    assert own.tolist() == [1, 5, 1, 5, 4, 4, 9, 2]
    assert item_lengths(lengths.ravel(), plane_of, 2, 2).tolist() == [2, 10, 13, 6]
    assert work_order(own, 2, 4, 1).tolist() == [6, 1, 3, 4, 5, 7, 0, 2]
    assert work_order(own, 2, 4, 2).tolist() == [1, 3, 0, 2, 6, 4, 5, 7]
    assert work_order(own, 2, 2, 2).tolist() == [1, 3, 0, 2, 6, 4, 5, 7]


def layout(**changes):
    given = {"shape": 16, "block": 8} | changes
    rows = -(-given["shape"] // given["block"])
    return BlockMap(np.zeros((1, 1, rows, 1), int), **given)


WRONG = {
    "tiles beside blocks": (
        lambda: BlockTiles(layout_of(layout()), 6, 8),
        "mask has blocks of .8, 8., which are not planned on the device in tiles of 6 x 8",
    ),
    "too many blocks of a tile": (
        lambda: BlockTiles(layout_of(layout(block=2)), 8, 8),
        "take blocks of 64 or 128, or pass mask.to_mask",
    ),
    "shape": (
        lambda: check_block_map(layout(), SimpleNamespace(nq=8, nk=16)),
        r"mask must have shape \(seqlen_q, seqlen_k\) = \(8, 16\), got \(16, 16\)",
    ),
    "batch": (
        lambda: layout_of(BlockMap(np.zeros((3, 1, 2, 1), int), shape=16, block=8)),
        "mask has batch=3, but q has batch=2",
    ),
    "heads": (
        lambda: layout_of(BlockMap(np.zeros((1, 3, 2, 1), int), shape=16, block=8)),
        "mask has heads=3, which do not divide q's 4",
    ),
    "device": (
        lambda: check_block_map(
            layout(),
            SimpleNamespace(nq=16, nk=16, batch=1, heads=1, device="cuda", device_id=0),
        ),
        r"mask has its arrays on device \('cpu', 0\), but q is on \('cuda', 0\)",
    ),
}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1 << 20, 1 << 20), "may have 4295229440 tiles of 64 x 64"),
        ((1 << 26, 127 * 64), "may have 2147483648 tiles of 64 x 64"),
        ((127 * 64, 1 << 26), "may have 2147483648 tiles of 64 x 64"),
    ],
    ids=["square", "rows", "columns"],
)
def test_too_many_tiles_are_refused(shape, message):
    """Of rows or of columns: each has a tile of its own, too."""
    layout = BlockLayout(shape, (64, 64), (1, 16), 1 << 20, masks.dense(1), 16)
    with pytest.raises(ValueError, match=f"{message}, more than 32-bit indices hold: bound its"):
        BlockTiles(layout, 64, 64)


def test_lists_have_room_for_what_the_map_may_name():
    """Two planes of 4 x 4 blocks of 8, of which a row names three; a tile more for each row."""
    layout = layout_of(BlockMap(np.zeros((1, 2, 4, 3), int), shape=32, block=8))
    fine, coarse = BlockTiles(layout, 4, 8), BlockTiles(layout, 16, 8)
    assert (fine.capacity(False), fine.capacity(True)) == (2 * (24 + 8), 2 * (24 + 4))
    assert (coarse.capacity(False), coarse.capacity(True)) == (2 * (8 + 2), 2 * (8 + 4))


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
