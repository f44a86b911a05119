"""Dealings of chunks to ranks, by their definitions."""

from types import SimpleNamespace

import numba
import numpy as np
import pytest

from nbflash import scores
from nbflash.distributed import dealing, stages
from nbflash.distributed.placed_score import _at_places, placed
from nbflash.inputs.positions import Positions

LOADS = {
    "random": lambda n, rng: rng.integers(0, 60, n),
    "few": lambda n, rng: rng.integers(0, 3, n),
    "rising": lambda n, rng: np.arange(n) * 7,
    "falling": lambda n, rng: np.arange(n)[::-1] ** 2,
    "less than one": lambda n, rng: rng.random(n) / 16,
    "equal": lambda n, rng: np.full(n, 5),
}


def _least_distance(load, a, b, target):
    """Heavy chunks for light ones as long as the first set has not too little; then the best one.

    All by trying: whether the first set has too much or too little, that set is made even.
    """
    sign = 1 if load[a].sum() > target else -1
    a, b = sorted(a, key=lambda i: -sign * load[i]), sorted(b, key=lambda i: sign * load[i])
    left, done = sign * (load[a].sum() - target), 0
    while done < min(len(a), len(b)):
        gain = sign * (load[a[done]] - load[b[done]])
        if not 0 < gain <= left:
            break
        left, done = left - gain, done + 1
    others = [abs(left - sign * (load[i] - load[j])) for i in a[done:] for j in b[done:]]
    return min([abs(left), *others])


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("seed", range(6))
def test_two_sets_are_evened(kind, seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 14))
    load, cut = LOADS[kind](n, rng), int(rng.integers(1, n))
    a, b = np.arange(cut), np.arange(cut, n)
    for share in (0.2, cut / n, 0.8):
        target = load.sum() * share
        first, second = dealing._evened(load, a, b, target)
        assert sorted([*first, *second]) == [*range(n)]
        assert first.size == cut
        found = abs(load[first].sum() - target)
        assert found == pytest.approx(_least_distance(load, a, b, target), rel=1e-12, abs=1e-9)
        assert found <= abs(load[a].sum() - target)


def test_of_equal_chunks_those_at_the_border_change():
    load = np.array([9, 9, 9, 9, 1, 1, 1, 1])
    first, second = dealing._evened(load, np.arange(4), np.arange(4, 8), 20)
    assert sorted(first) == [0, 1, 4, 5]
    assert sorted(second) == [2, 3, 6, 7]
    first, second = dealing._evened(load[::-1], np.arange(4), np.arange(4, 8), 20)
    assert sorted(first) == [0, 1, 4, 5]


def _by_first_chunk(owners):
    names = {}
    return [names.setdefault(owner, len(names)) for owner in owners]


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize(("n", "ranks"), [(8, 4), (10, 4), (7, 3), (5, 1), (3, 4), (16, 5)])
def test_the_heaviest_chunk_goes_to_who_has_least(kind, n, ranks):
    """As many to each, or one more to some; ranks are named by their first chunk."""
    load = LOADS[kind](n, np.random.default_rng(n)).astype(float)
    total, count, owner = [0.0] * ranks, [0] * ranks, [0] * n
    for chunk in sorted(range(n), key=lambda i: (-load[i], i)):
        more = sum(x > n // ranks for x in count) < n % ranks
        open_to = [
            r for r in range(ranks) if count[r] < n // ranks or (more and count[r] == n // ranks)
        ]
        rank = min(open_to, key=lambda r: (total[r], count[r], r))
        owner[chunk], total[rank], count[rank] = rank, total[rank] + load[chunk], count[rank] + 1
    assert dealing._greedily(load, ranks).tolist() == _by_first_chunk(owner)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize(("n", "ranks"), [(8, 4), (12, 3), (10, 5), (16, 8), (9, 1)])
def test_halves_have_their_share_of_chunks(kind, n, ranks):
    owner = dealing._in_halves(LOADS[kind](n, np.random.default_rng(n)), ranks)
    assert np.bincount(owner, minlength=ranks).tolist() == [n // ranks] * ranks
    assert owner.tolist() == _by_first_chunk(owner)
    if kind == "equal":
        assert owner.tolist() == dealing.even(n, ranks).tolist()


def test_runs_are_as_long_as_each_other():
    assert dealing.even(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert (dealing.even(0, 3).tolist(), dealing.even(2, 2).dtype) == ([], np.int32)


@pytest.mark.parametrize(
    ("balances", "traffic", "key_cost", "expected"),
    [
        ([1.0, 1.5], [9, 1], 0.0, 0),  # one that is balanced
        ([1.02, 1.02], [9, 1], 0.0, 1),  # the fewest keys of the fullest rank
        ([1.03, 1.5, 1.02, 1.01], [1, 1, 3, 2], 0.0, 3),  # of twice as many chunks
        ([1.3, 1.2, 1.1, 1.4, 1.5, 1.6], [1] * 6, 0.0, 2),  # none is: the most even one
        ([1.0, 1.0], [9, 1], 10.0, 1),  # keys cost
        ([1.0, 1.9, 1.0, 1.0], [9, 1, 9, 9], 0.25, 1),
        ([1.0, 9.0, 1.0, 1.0], [9, 1, 9, 9], 0.25, 0),
    ],
)
def test_the_best_of_all_dealings(balances, traffic, key_cost, expected):
    """Two ranks and eight rows: chunks by two, four and eight, each dealt twice."""
    made = []

    def make(owners):
        i = len(made)
        keys = np.array([[0.0, traffic[min(i, len(traffic) - 1)]], [0.0, 0.0]])
        balance = balances[min(i, len(balances) - 1)]
        work = np.array([1.0, balance])
        made.append(SimpleNamespace(work=work, balance=balance, traffic=keys, number=i))
        assert owners.size == 8
        return made[-1]

    work = np.arange(8.0)
    assert dealing.deal(work, 2, make, key_cost).number == expected
    first = next((i for i in range(0, 6, 2) if balances[min(i, len(balances) - 1)] <= 1.02), 4)
    assert len(made) == (6 if key_cost else first + 2)


@pytest.mark.parametrize("key_cost", [0.0, 1.0])
def test_keys_count_where_they_arrive(key_cost):
    """Eight at one rank from two others; or ten, five at each of two, from one."""
    to_one, from_one = np.zeros((2, 3, 3))
    to_one[1:, 0], from_one[0, 1:] = 4, 5
    kinds = [SimpleNamespace(work=np.ones(3), balance=1.0, traffic=x) for x in (to_one, from_one)]
    made = iter(kinds)
    assert dealing.deal(np.ones(3), 3, lambda owners: next(made), key_cost) is kinds[1]


def test_chunks_for_costs_are_eight_for_a_rank():
    made = []
    cost = SimpleNamespace(work=np.ones(2), balance=1.0, traffic=np.zeros((2, 2)))
    dealing.deal(np.ones(64), 2, lambda owners: made.append(owners) or cost, 1.0)
    assert len(made) == 2 * 4  # 2, 4, 8 and 16 chunks
    assert [np.count_nonzero(np.diff(x)) + 1 for x in made[::2]] == [2] * 4


def test_a_function_without_places_stays_what_it_is():
    """Kernels have a form of their own for softcap; others are given places."""
    at = Positions(np.arange(4) + 8, np.arange(4))
    for make, own in ((scores.softcap(3.0), True), (scores.alibi([0.5]), False)):
        (stage,), (there,) = make.stages(16, 16), placed(make, at, (16, 16)).stages(4, 4)
        assert (stage[0] is there[0]) == own
        assert len(there[2]) == len(stage[2]) + (0 if own else 2)


@pytest.mark.parametrize(("ranks", "most"), [(1, 1), (2, 1), (3, 2), (4, 3), (64, stages.STAGES)])
def test_counts_of_stages_that_are_compared(ranks, most, monkeypatch):
    """As many as other ranks, at most; of heads those that divide them. The first of the best."""
    asked, sharding = [], SimpleNamespace(ranks=ranks)
    monkeypatch.setattr(stages, "_loads", lambda given, group: (given, group))
    monkeypatch.setattr(stages, "_time", lambda *given: asked.append(given) or -(given[-1] // 2))
    chosen = stages.part_count.__wrapped__(sharding, 12, 5, "ranks")
    assert asked == [(sharding, 5, "ranks", count) for count in range(1, most + 1)]
    assert chosen == most // 2 * 2 or most == chosen == 1
    asked.clear()
    stages.part_count.__wrapped__(sharding, 6, 5, "heads")
    assert [given[-1] for given in asked] == [n for n in (1, 2, 3, 6) if n <= stages.STAGES]


def test_what_the_average_rank_has_to_do():
    """In tiles of 256, four of 128, for each of two heads of the mask; two of Q to one of K."""
    traffic = np.zeros((3, 3))
    traffic[0, 1:] = 5
    sharding = SimpleNamespace(ranks=3, tile=256, meeting=12, traffic=traffic)
    sharding.mask = SimpleNamespace(plane_index=np.zeros((1, 2)), shape=(60, 30))
    sharding.work_on = np.arange(9.0).reshape(3, 3)
    sharding.work = sharding.work_on.sum(axis=1)
    arrival, copy = 5 * stages._ARRIVAL / 2, (5 + 10) * stages._COPY / 2
    expected = 8, 16, arrival, 4 * stages._MERGE, copy
    assert stages._loads(sharding, 2) == pytest.approx(expected)


def test_the_time_of_stages_that_wait_for_keys():
    """Both passes wait for the last; of the first ones gradients are on their way back by then."""
    arrival, launch = 2e6, stages._LAUNCH
    back = arrival / 2 + launch + stages._RETURN * arrival
    expected = arrival + launch + back
    assert stages._time(0, 0, arrival, 0, 0, "ranks", 2) == pytest.approx(expected)


def test_a_placed_score_divides_as_numpy_does():
    def inverse(s, b, h, q_idx, kv_idx):
        return s / kv_idx

    at_places = numba.njit(error_model="numpy")(_at_places(inverse, 0))
    places = np.array([0, 4], np.int32)
    assert [at_places(-1.0, 0, 0, 1, i, places, places) for i in (0, 1)] == [-np.inf, -0.25]
