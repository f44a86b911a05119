"""What `mutation` goes by: tests that judge, and mutants that are equivalent."""

from pathlib import Path

import pytest
from judges import JUDGES, LEFT_OUT
from mutation import Change, equivalent, meaning, path_of

TESTS = Path(__file__).parents[2]


def test_judges_exist():
    names = {name for judges in JUDGES.values() for name in judges}.union(LEFT_OUT)
    for name in sorted(names):
        file, _, function = name.partition("::")
        assert f"def {function}" in (TESTS / file).read_text(), name
    for module, judges in JUDGES.items():
        tiers = [name.partition("/")[0] for name in judges]
        assert tiers == sorted(tiers), f"of {module} those of tests/host come first"


def test_equivalent_mutants_are_of_lines_that_are_there():
    for module, line, mutant in equivalent():
        source = " ".join(x.strip() for x in path_of(module).read_text().splitlines())
        assert line in source, module
        assert line != mutant, module


@pytest.mark.parametrize(
    ("source", "mutated", "same"),
    [
        ("x = a | b", "x = a + b", False),
        ("def f(x: int | None) -> int | None: pass", "def f(x: int + None) -> int: pass", True),
        ("x: int | None = 1", "x: int - None = 1", True),
        ("zip(a, b, strict=True)", "zip(a, b, strict=False)", True),
        ("f(a, b=True)", "f(a, b=False)", False),
    ],
)
def test_what_is_no_mutant(source, mutated, same):
    assert (meaning(source) == meaning(mutated)) is same
    assert meaning(f"{source} +") is None


def test_a_change_is_known_by_its_lines():
    change = Change("masks.base", 2, "if a:\n    b = 1\nc\n", "if a:\n    b = 2\nc\n")
    assert change.texts == ("b = 1", "b = 2")
    assert str(change) == "masks.base, line 2\n    - b = 1\n    + b = 2"
