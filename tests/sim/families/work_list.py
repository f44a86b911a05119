"""The order in which blocks take the rows of a schedule."""

import numpy as np
from mutant_family import Family
from mutants import Mutant

from nbflash.cuda.tile.ring import item_of

LIST = "nbflash.schedule.work_list"


def check_work_list(ordered, heads_at_a_time=5, blocks=3):
    """Raise unless a work list is whole, in equal groups of heads, and dealt out fairly."""
    lengths = np.random.default_rng(0).integers(1, 99, 35)
    work = np.array([(i % 8, i * 3 % 7) for i in range(40)], np.int32)
    length = np.append(-np.sort(-lengths), np.zeros(5, np.int64))
    got = ordered(work, length, heads_at_a_time, blocks)
    assert sorted(map(tuple, got)) == sorted(map(tuple, work))
    np.testing.assert_array_equal(got[35:], work[35:])
    tiles = {tuple(item): n for item, n in zip(work, length, strict=True)}
    n, group = [tiles[tuple(x)] for x in got], got[:, 1] // 4  # four heads, and three
    load, last, least = np.zeros(blocks, int), 0, np.inf
    for round_ in range(-(-35 // blocks)):
        at = [item_of(round_, blocks, block) for block in range(blocks)]
        dealt = {block: n[i] for block, i in enumerate(at) if i < 35}
        groups = [int(group[i]) for i in at if i < 35]
        assert min(groups) >= last
        if max(groups) == last:
            assert max(dealt.values()) <= least
        last = max(groups)
        least = min(x for x, g in zip(dealt.values(), groups, strict=True) if g == last)
        shares = [dealt[block] for block in np.argsort(load, kind="stable") if block in dealt]
        assert shares == sorted(shares, reverse=True)
        for block, more in dealt.items():
            load[block] += more


def check_heads_together(ordered):
    """Raise unless heads that read the same keys are of one group: four and three of them here."""
    work = np.array([(0, head) for head in reversed(range(21))], np.int32)
    got = ordered(work, np.ones(21, np.int64), 5, 3, 3)
    assert sorted(got[:12, 1]) == list(range(12))


def case_of(check):
    return lambda modules: check(modules[LIST].ordered)


MUTANTS = (
    Mutant("shortest first", "np.argsort(-length[items]", "np.argsort(length[items]"),
    Mutant("one head at a time", "head[:live] * groups // heads", "head[:live]"),
    Mutant(
        "a small group left",
        "head[:live] * groups // heads",
        "head[:live] // heads_at_a_time",
    ),
    Mutant("by row tile", "head = work[:, 1]", "head = work[:, 0]"),
    Mutant("not by heads", "head[:live] * groups // heads", "head[:live] * 0"),
    Mutant("heads that read the same keys apart", " // together", ""),
    Mutant("nothing dealt so far", "load[owner] += length[items]", "pass"),
    Mutant("items counted for their length", "load[owner] += length[items]", "load[owner] += 1"),
    Mutant("to the block that has most", "np.argsort(load[owner]", "np.argsort(-load[owner]"),
    Mutant(
        "every block in the last round",
        "owner = places if round_ % 2 == 0 else blocks - 1 - places",
        "owner = places",
    ),
    Mutant("never back", "(owner if round_ % 2 == 0 else blocks - 1 - owner)", "owner"),
    Mutant(
        "back without there",
        "(owner if round_ % 2 == 0 else blocks - 1 - owner)",
        "blocks - 1 - owner",
    ),
    Mutant("items without tiles too", "live = np.count_nonzero(length)", "live = len(work)"),
    Mutant(
        "another order of length",
        'items = items[np.argsort(-length[items], kind="stable")]',
        "pass",
    ),
)
FAMILY = Family(
    "work_list",
    (LIST,),
    {"order": case_of(check_work_list), "heads": case_of(check_heads_together)},
    [(LIST, mutant) for mutant in MUTANTS],
)
