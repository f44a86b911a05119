"""Work lists of persistent kernels: heads follow each other, and every block gets its share."""

from dataclasses import replace

import numpy as np
import pytest

import masks
from nbflash.backends.sm90.backward.host import tables
from nbflash.cuda.tile.ring import item_of
from nbflash.planning.kernels import cuda_problem
from nbflash.schedule import work_list
from nbflash.schedule.tile_schedule import TileSchedule


def dealt(items, lengths, blocks):
    """What each block gets: deal by deal, the longest item to who has least to do."""
    hands = [[] for _ in range(blocks)]
    for start in range(0, len(items), blocks):
        deal = sorted(items[start : start + blocks], key=lambda i: -lengths[i])
        back = start // blocks % 2
        seats = range(blocks)[::-1] if back else range(blocks)
        seats = sorted(list(seats)[: len(deal)], key=lambda b: sum(lengths[i] for i in hands[b]))
        for block, item in zip(seats, deal, strict=True):
            hands[block].append(item)
    return hands


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize(("together", "at_a_time"), [(1, 1), (1, 2), (2, 1), (1, 9)])
def test_items_are_dealt_out_by_groups_of_heads(blocks, together, at_a_time):
    rng = np.random.default_rng(blocks)
    heads, rows = 4, 5
    lengths = -np.sort(-rng.integers(0, 9, heads * rows))
    work = rng.permutation([(r, h) for h in range(heads) for r in range(rows)]).astype(np.int32)
    ordered = work_list.ordered(work, lengths, at_a_time, blocks, together)

    live = np.count_nonzero(lengths)
    assert live < len(work)
    groups = -(-heads // together // at_a_time)
    group = work[:live, 1] // together * groups // (heads // together)
    items = sorted(range(live), key=lambda i: group[i])
    for block, hand in enumerate(dealt(items, lengths, blocks)):
        places = [item_of.py_func(round_, blocks, block) for round_ in range(-(-live // blocks))]
        got = [tuple(ordered[place]) for place in places if place < live]
        assert got == [tuple(work[i]) for i in hand]
    assert (ordered[live:] == work[live:]).all()


def test_heads_share_nothing_unless_they_do():
    work = TileSchedule.from_mask(masks.causal(64), 16, 16).work(1, 4)
    lengths = work[:, 0] + 1
    alone = work_list.ordered(work, lengths, 1, 3)
    assert (alone == work_list.ordered(work, lengths, 1, 3, together=1)).all()
    assert (alone != work_list.ordered(work, lengths, 1, 3, together=2)).any()


def test_no_work():
    nothing = np.zeros((0, 2), np.int32)
    assert work_list.ordered(nothing, np.zeros(0, int), 1, 3).shape == (0, 2)


@pytest.mark.parametrize(("at_a_time", "less"), [(2, 1), (4, 0)])
def test_rows_of_heads_that_share_keys_stay_together(monkeypatch, at_a_time, less):
    """Four heads in pairs, twice; keys and values of two pairs, or all, are in L2."""
    n, blocks = 80, 3
    problem = replace(cuda_problem("float16", 64, n, n), batch=2, heads=4, heads_kv=2)
    planes = [masks.causal(n), masks.window(n, left=9), masks.dense(n), ~masks.dense(n)]
    schedule = TileSchedule.from_mask(masks.per_head(planes), 16, 16)
    monkeypatch.setattr(work_list, "L2_BYTES", at_a_time * (2 * n * 64 * 2) - less)
    walked, live = work_list.row_tables(schedule, problem, blocks)

    pairs = schedule.work(2, 4)
    tiles = {(r, h): (r + 1, 5 - max(r - 1, 0), 5, 0)[h % 4] for r, h in pairs.tolist()}
    lengths = np.array([tiles[r, h] for r, h in pairs.tolist()])
    assert live == np.count_nonzero(lengths) == 2 * 3 * 5
    work = work_list.ordered(pairs, lengths, at_a_time, blocks, 2)
    assert walked[0].tolist() == work.ravel().tolist()
    assert walked[1].tolist() == schedule.plane_of(2, 4).tolist()
    for array, name in zip(
        walked[2:], ("row_ptr", "col_idx", "kind", "lo", "hi", "bits"), strict=True
    ):
        assert array.tolist() == getattr(schedule, name).ravel().tolist()


def test_heads_whose_keys_and_values_are_in_24_MiB_are_worked_on_together():
    """Half of the L2 of an H100."""
    problem = cuda_problem("float16", 128, 1, 4096)
    assert work_list.kv_bytes(problem) == 2 << 20
    assert [work_list.heads_at_a_time(n << 20) for n in (2, 5, 24, 25)] == [12, 5, 1, 1]


@pytest.mark.parametrize(
    ("first", "second", "masked"),
    [
        (masks.dense(64), masks.causal(64), 1),
        (masks.causal(64), masks.dense(64), 1),
        (~masks.dense(64), masks.dense(64), 0),
    ],
    ids=["second-masked", "first-masked", "first-empty"],
)
def test_all_heads_of_a_group_say_what_a_column_has(first, second, masked):
    """Key tile, batch element, head of K and V, and whether it is masked."""
    schedule = TileSchedule.from_mask(masks.per_head([first, second]), 64, 64).T
    walked, live = tables(schedule, 1, 2, 2, 16, 1)
    assert walked[0].tolist() == [0, 0, 0, masked]
    assert live == 1


def test_items_with_tiles_are_those_of_the_planes_that_heads_have():
    """Planes that are used unequally often, of which one has rows without tiles."""
    whole, empty = masks.dense(64, 32), masks.causal(64, 32)
    mask = masks.per_batch([whole, empty, empty])
    problem = replace(cuda_problem("float16", 64, 64, 32), batch=3, heads=2, heads_kv=2)
    schedule = TileSchedule.from_mask(mask, 16, 16)
    (work, *_), live = work_list.row_tables(schedule, problem, 4)
    row, head = work.reshape(-1, 2).T
    attends = (head // 2 == 0) | (row >= 2)
    assert live == np.count_nonzero(attends) == 2 * (4 + 2 + 2)
    assert attends[:live].all()
