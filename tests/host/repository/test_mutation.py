"""What `mutation` goes by: tests that judge, and mutants that are equivalent."""

from pathlib import Path

import pytest
from judges import JUDGES, LEFT_OUT
from mutation import Change, equivalent, meaning, path_of
from omissions import omissions

TESTS = Path(__file__).parents[2]


def test_judges_exist():
    names = {name for judges in JUDGES.values() for name in judges}.union(LEFT_OUT)
    for name in sorted(names):
        file, _, function = name.partition("::")
        assert f"def {function}" in (TESTS / file).read_text(), name
    for module, judges in JUDGES.items():
        tiers = [name.partition("/")[0] for name in judges]
        assert tiers == sorted(tiers), f"of {module} those of tests/host come first"


def test_keys_of_frozen_classes_judge_their_modules():
    judge = "host/keys/test_keys_frozen.py"
    for module, judges in JUDGES.items():
        if "@dataclass(frozen" in path_of(module).read_text():
            assert judge in judges or judges[0].startswith("frameworks/"), module


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


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = min(a, b)", ["x = (a)", "x = (b)"]),
        ("x = a or b", ["x = (a)", "x = (b)"]),
        ("x = a and b and c", ["x = (b and c)", "x = (a and c)", "x = (a and b)"]),
        ("x = {'a': 1, 'b': 2}", ["x = ({'b': 2})", "x = ({'a': 1})"]),
        ("x = f(a, k=1, strict=True)", ["x = (f(a, strict=True))"]),
        ("x = a if b else c", ["x = (a)", "x = (c)"]),
        ("x = 'é', y.copy()", ["x = 'é', (y)"]),
        ("x = int(y), int(*y)", ["x = (y), int(*y)"]),
        ("if a:\n    return\nb", ["pass\nb"]),
        ("x[0] = 1; x += 1; x = 1", ["pass; x += 1; x = 1", "x[0] = 1; pass; x = 1"]),
        ("f(a); g", ["pass; g"]),
        ("raise Error(f'{str(a)}')", []),
        ("def f(x: int | None = g(a)) -> str(a): 1", []),
    ],
)
def test_what_is_left_out(source, mutants):
    assert [change(source) for _, change in omissions(source)] == mutants
