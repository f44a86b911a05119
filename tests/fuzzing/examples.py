"""How many examples a property takes: few and always the same ones, or in ``make fuzz`` many.

``make fuzz`` sets FUZZ_SEED, from which the random examples follow, and FUZZ_TIMES, how many times
as many there are (`tests/fuzz.py`).
"""

import os

import hypothesis
from hypothesis import Phase, settings

SEED, TIMES = os.environ.get("FUZZ_SEED"), int(os.environ.get("FUZZ_TIMES", "1"))


def how_many(count, **more):
    """Settings of a property, or of a state machine, with ``count`` examples in CI.

    A failing one is not made smaller there: that may take longer than a test may.
    """
    if SEED is None:
        more |= {"derandomize": True, "database": None, "phases": [Phase.explicit, Phase.generate]}
        return settings(max_examples=count, **more)
    return settings(max_examples=count * TIMES, derandomize=False, **more)


def examples(count, **more):
    """A decorator, above ``given``: see `how_many`."""

    def decorate(test):
        test = how_many(count, **more)(test)
        return test if SEED is None else hypothesis.seed(int(SEED))(test)

    return decorate


def machine(rules, count, **more):
    """The test case of a state machine: see `how_many`."""
    if SEED is not None:
        hypothesis.seed(int(SEED))(rules)
    case = rules.TestCase
    case.settings = how_many(count, **more)
    return case


class Brief:
    """What Hypothesis prints as it says itself, without the arrays of a dataclass."""

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))
