"""Block maps planned by kernels: the lists of the specification, bit for bit, without races."""

import pytest
from block_plan_runs import check_plan, random_map

from nbflash.cuda import simulator as sim

# shape, block, tile, extent of the map, k, within
CASES = {
    "tiles of blocks": ((70, 90), (8, 8), (16, 16), (2, 2), 5, "causal"),
    "blocks of tiles": ((70, 90), (16, 8), (8, 4), (1, 4), 3, "documents"),
    "a block a tile": ((64, 64), (8, 8), (8, 8), (1, 1), 4, "all"),
    "long rows": ((40, 560), (8, 8), (8, 16), (1, 2), 90, "padding"),
    "many rows": ((120, 40), (4, 8), (8, 8), (2, 1), 2, "per-head"),
    "slots of two": ((40, 36), (4, 4), (8, 4), (1, 1), 5, "causal"),
    "three blocks a tile": ((40, 36), (4, 4), (12, 4), (1, 1), 5, "causal"),
    "nothing": ((20, 20), (4, 4), (4, 4), (1, 1), 0, "all"),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plan_is_that_of_the_host(case, transposed):
    shape, block, tile, *rest = case
    group = 2 if transposed else 1
    given = random_map(shape, block, *rest)
    with sim.options(race=True, seed=1):
        check_plan(given, tile, transposed=transposed, group=group, groups=2, columns=transposed)


def test_groups_of_heads_that_share_keys():
    given = random_map((70, 70), (8, 8), (1, 2), 5, "causal")
    check_plan(given, (8, 8), groups=3, of_unit=2)


def test_more_items_than_are_ranked_at_a_time():
    given = random_map((1040, 8), (4, 4), (1, 1), 2, "all", seed=4)
    check_plan(given, (4, 4), batch=1, heads=1)


def test_groups_of_which_one_has_a_stretch_more():
    """Of three heads two are in one group, with more items than are ranked at a time."""
    given = random_map((520, 8), (4, 4), (1, 1), 2, "all", seed=5)
    check_plan(given, (4, 4), batch=1, heads=3, groups=2)
