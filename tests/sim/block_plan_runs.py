"""Plans of block maps by the kernels, and what they are to be."""

from types import SimpleNamespace

import numpy as np

import masks
from masks import FULL
from nbflash import BlockMap
from nbflash.backends.block_plan import host
from nbflash.cuda.device import cuda_device
from nbflash.inputs.block_layout import check_block_map
from nbflash.schedule.block_tiles import BlockTiles, item_lengths, work_order

WITHIN = {
    "all": lambda nq, nk: None,
    "causal": masks.causal,
    "documents": lambda nq, nk: masks.documents([nq // 3, nq - nq // 3], [nk // 2, nk - nk // 2]),
    "padding": lambda nq, nk: masks.padding([nk // 2, nk], nq, nk),
    "per-head": lambda nq, nk: masks.per_head([masks.causal(nq, nk), masks.dense(nq, nk)] * 2),
}


def random_map(shape, block, extent=(1, 1), k=3, within="all", seed=0):
    """Unsorted, with duplicates, entries out of range, some of them far, and rows of any length."""
    rng = np.random.default_rng(seed)
    rows, columns = (-(-n // size) for n, size in zip(shape, block, strict=True))
    indices = rng.integers(-1, columns + 1, (*extent, rows, k)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.1] += 1 << 20
    counts = rng.integers(0, k + 1, (*extent, rows)).astype(np.int32)
    return BlockMap(indices, counts, shape=shape, block=block, within=WITHIN[within](*shape))


def planned(
    block_map,
    tile,
    *,
    batch,
    heads,
    transposed=False,
    group=1,
    groups=1,
    module=host,
    columns=False,
    of_unit=1,
):
    """The tables that a walk makes."""
    nq, nk = block_map.shape
    problem = SimpleNamespace(batch=batch, heads=heads, nq=nq, nk=nk, device="cpu", device_id=0)
    layout = check_block_map(block_map, problem)
    schedule = module.BlockSchedule(cuda_device(0), layout, BlockTiles(layout, *tile), transposed)
    walk = module.Walk(schedule, batch, heads, group, groups, of_unit=of_unit, columns=columns)
    words, _ = walk((block_map.indices, block_map.counts))
    return schedule.block_tiles, [np.array(x) for x in words]


def check_plan(
    block_map,
    tile,
    *,
    batch=2,
    heads=4,
    transposed=False,
    group=1,
    groups=1,
    module=host,
    columns=False,
    of_unit=1,
):
    """Host against device, bit for bit."""
    tiles, (work, plane_of, row_ptr, col_idx, kind, *last) = planned(
        block_map,
        tile,
        batch=batch,
        heads=heads,
        transposed=transposed,
        group=group,
        groups=groups,
        module=module,
        columns=columns,
        of_unit=of_unit,
    )
    keep = block_map.dense().reshape(-1, *block_map.grid_shape)
    expected = tiles.lists(keep, transposed)
    n = expected[1].size
    for name, got, want in zip(
        ("row_ptr", "col_idx", "kind"), (row_ptr, col_idx, kind), expected, strict=True
    ):
        np.testing.assert_array_equal(got[: want.size], want, name)
    assert (kind[n:] < 0).all(), "kinds behind the last tile"
    np.testing.assert_array_equal(plane_of, tiles.plane_of(batch, heads))
    n_row = tiles.n_col if transposed else tiles.n_row
    lengths = item_lengths(np.diff(expected[0]), plane_of, n_row, group)
    order = work_order(lengths, n_row, batch * heads // group // of_unit, groups)
    head, row = np.divmod(order, n_row)
    words = [row, head]
    if columns:
        starts = expected[0][:-1]
        hidden = np.add.reduceat((expected[2] != FULL).astype(int), starts)
        hidden = item_lengths(hidden, plane_of, n_row, group)[order] > 0
        words = [row, *np.divmod(head, heads // group), hidden]
    np.testing.assert_array_equal(work.reshape(-1, len(words)), np.stack(words, 1), "work")
    np.testing.assert_array_equal(last[-1], tiles.bits.ravel(), "bits")
