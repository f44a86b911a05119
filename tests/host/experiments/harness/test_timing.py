"""The timing protocol."""

import gc

import pytest

from experiments.harness.timing import MIN_ROUNDS, Timing, WallClock, interleave, uncollected


class CountingClock:
    """Ten milliseconds for every call that was measured before."""

    def __init__(self):
        self.order = []

    def measure(self, task):
        self.order.append(task())
        return 10.0 * len(self.order), self.order[-1]


def test_interleave_runs_every_task_once_a_round():
    clock, kept, ticks = CountingClock(), [], []
    tasks = {name: lambda name=name: name for name in "abcd"}
    timings = interleave(
        tasks,
        clock,
        rounds=8,
        seconds=60,
        keep=lambda name, result: kept.append((name, result, len(clock.order))),
        progress=lambda: ticks.append(1),
    )
    rounds = [tuple(clock.order[i : i + 4]) for i in range(0, 32, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len(set(rounds)) > 3
    assert sum(sum(t.samples) for t in timings.values()) == 10 * 32 * 33 / 2
    assert [(name, at) for name, _, at in kept] == list(zip(rounds[-1], range(29, 33), strict=True))
    assert len(ticks) == 4 * 9


def test_interleave_stops_when_the_time_is_up_but_not_before_three_rounds():
    kept = []
    timings = interleave(
        {"a": int}, WallClock(), rounds=50, seconds=0, keep=lambda name, _: kept.append(name)
    )
    assert len(timings["a"].samples) == MIN_ROUNDS
    assert kept == ["a"]
    with pytest.raises(ValueError, match="rounds=0"):
        interleave({"a": int}, WallClock(), rounds=0, seconds=1)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_time_is_taken(enabled):
    """And afterwards as before, whatever happened."""
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), uncollected():
            1 / gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    seen = []
    interleave({"a": lambda: seen.append(gc.isenabled())}, WallClock(), rounds=2, seconds=1)
    assert seen == [True, False, False]  # warm-up first


def test_timing_percentiles():
    timing = Timing(tuple(float(i) for i in range(11)))
    assert (timing.p10, timing.median, timing.p90) == (1, 5, 9)


def test_wall_clock_measures_milliseconds():
    duration, result = WallClock().measure(lambda: sum(range(200_000)))
    assert 0.1 < duration < 1000
    assert result == 19_999_900_000
