"""Check, time, check again."""

import pytest
from command_runs import FakeClock

from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import Verdict
from experiments.harness.runner import Runner, Task


class Numbers:
    """A task that returns 1, 2, ...; results from a given one on are wrong."""

    def __init__(self, wrong_from=99):
        self.calls, self._wrong_from = 0, wrong_from

    def make(self):
        return Task(self._call, self._check)

    def _call(self):
        self.calls += 1
        return self.calls

    def _check(self, result):
        if result >= self._wrong_from:
            raise OutOfBudget(f"out: error {result}")
        return [Verdict("out", float(result), 99.0)]


def runner_of(**how):
    return Runner(FakeClock(), {"rounds": 3, "seconds": 60.0, "seed": 0}, **how)


def test_a_task_is_checked_before_and_after_it_is_timed():
    numbers = Numbers()
    timed = runner_of().measure({"a": numbers.make})
    # Once to check, once to warm up, and three rounds.
    assert numbers.calls == 5
    assert [verdict.error for verdict in timed["a"].verdicts] == [1, 5]
    assert timed["a"].error == 5
    assert timed["a"].timing.samples == (1.0, 1.0, 1.0)
    unchecked = runner_of().measure({"a": lambda: Task(int)})["a"]
    assert (unchecked.verdicts, unchecked.error) == ([], None)


def test_a_wrong_result_ends_it_before_anything_is_timed():
    right, wrong = Numbers(), Numbers(wrong_from=1)
    with pytest.raises(OutOfBudget, match=r"^b, c: no timing is reported, out: error 1$"):
        runner_of().measure({"a": right.make, ("b", "c"): wrong.make})
    assert (right.calls, wrong.calls) == (1, 1)
    with pytest.raises(OutOfBudget, match=r"^a, as timed: no timing is reported, out: error 5$"):
        runner_of().measure({"a": Numbers(wrong_from=5).make})


def test_what_is_left_out_does_not_stop_the_rest():
    said = []

    def leave_out(key, error, stage):
        said.append((key, str(error), stage))
        return not isinstance(error, ZeroDivisionError)

    makers = {name: Numbers(at).make for name, at in {"a": 1, "b": 99, "c": 5}.items()}
    assert list(runner_of(leave_out=leave_out).measure(makers)) == ["b"]
    assert said == [("a", "out: error 1", ""), ("c", "out: error 5", " as timed")]
    with pytest.raises(ZeroDivisionError):
        runner_of(leave_out=leave_out).measure({"d": lambda: Task(lambda: 1 / 0)})
