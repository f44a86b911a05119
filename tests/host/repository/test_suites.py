"""The tables of the suites: every signature keeps a test, the cheapest ones that do."""

from types import SimpleNamespace

from suite_tables import Results, choose, table_from

EMPTY = {"functions": {}, "signatures": {}}


def test_choose_covers_every_signature_cheaply():
    launched = {
        "dear": (9.0, {"a", "b", "c"}),
        "ab": (1.0, {"a", "b"}),
        "c": (0.5, {"c"}),
        "nothing": (0.0, set()),
    }
    assert choose(launched) == {"a": "ab", "b": "ab", "c": "c"}


def test_choose_prefers_what_is_committed():
    launched = {"first": (1.0, {"a"}), "second": (0.9, {"a"}), "third": (0.3, {"b"})}
    assert choose(launched, {"first"}) == {"a": "first", "b": "third"}


RESULTS = {
    "f.py::test_one": {"x": (0.123, ["a"]), "y": (0.5, ["a", "b"])},
    "f.py::test_two": {"": (2.0, ["a"])},
    "f.py::test_engine": {"": (0.1, [])},
}


def test_the_table_keeps_a_test_of_every_function():
    table = table_from(RESULTS, EMPTY, functions_too=True)
    assert table == {
        "functions": {
            "f.py::test_one": {"tests": 2, "run": {"y": 0.5, "x": 0.12}},
            "f.py::test_two": {"tests": 1, "run": {"": 2.0}},
        },
        "signatures": {"a": "f.py::test_one[x]", "b": "f.py::test_one[y]"},
    }
    assert table_from(RESULTS, EMPTY, functions_too=False)["functions"]["f.py::test_two"] == {
        "tests": 1,
        "run": {},
    }


def test_the_table_of_other_functions_stays():
    before = table_from({"g.py::test": {"z": (1.0, ["b", "c"])}}, EMPTY, True)
    table = table_from(RESULTS, before, True)
    assert table["signatures"]["b"] == table["signatures"]["c"] == "g.py::test[z]"
    assert table["functions"]["f.py::test_one"]["run"] == {"x": 0.12}
    assert table["functions"]["g.py::test"] == before["functions"]["g.py::test"]


def test_tests_of_rooms_belong_to_their_tier():
    option = SimpleNamespace(derive=True, suite="ci", keyword="")
    results = Results(SimpleNamespace(option=option, args=[]), "tests")
    name, launched = "tests/sim/room/test_x.py::test_y[1]", (0.1, ["kernel"])
    results.pytest_runtest_logreport(
        SimpleNamespace(
            when="call", passed=True, nodeid=name, user_properties=[("launched", launched)]
        )
    )
    assert results.launched == {"sim": {"test_x.py::test_y": {"1": launched}}}
