"""Three suites of tests: ``--suite=quick`` (make test), ``ci`` (make test-ci), ``all``.

A test is known by its signatures: what it launches or compiles, which its tier tells with
:func:`observe`. A tier may have a table, ``suite.json``, with one test for every signature. Suites
that go by the table leave out the other tests of its functions. A test that no table knows is
always run, and so are tests without signatures.

    suite    tests/sim                                tests/compile     tests/host    planted faults
    quick    by the table, at most a second a test    by the table      all           a quarter
    ci       by the table                             all               all           all
    all      all                                      all               all           all

The cases that kill planted faults are tests too, and in every suite. ``--derive`` writes the tables
anew, and the map from planted faults to the cases that kill them.
"""

import datetime
import time
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from suite_tables import Results, read_table

TESTS = Path(__file__).parent
SUITES = "quick", "ci", "all"
BY_TABLE = {"sim": ("quick", "ci"), "compile": ("quick",)}
TIMED = ("sim",)
QUARTERS = 4
SECONDS = 1.0  # of processor time: what a test of a timed tier takes at most in the quick suite

_observed, _watched = set(), [False]


def watched():
    """Whether what the running test launches counts: not with a fault planted, or of any size."""
    return _watched[0]


def observe(signature):
    """Say that the running test launches or compiles something."""
    _observed.add(signature)


def tier_of(path):
    """``sim`` for a file in tests/sim."""
    return path.relative_to(TESTS).parts[0]


def name_of(item):
    """``file.py::test_function``, and the parameters in the brackets behind it."""
    function, _, parameters = item.nodeid.partition("[")
    path, _, function = function.partition("::")
    return f"{Path(path).name}::{function}", parameters.removesuffix("]")


def pytest_addoption(parser):
    group = parser.getgroup("nbflash")
    group.addoption("--suite", choices=SUITES, default="all", help="see tests/suites.py")
    group.addoption(
        "--derive", action="store_true", help="write the tables of tests and planted faults anew"
    )
    group.addoption(
        "--quarter",
        type=int,
        choices=range(QUARTERS),
        default=datetime.date.today().toordinal() % QUARTERS,
        help="of the planted faults, in the quick suite; another one every day",
    )


def pytest_configure(config):
    if config.option.derive and config.option.suite != "all":
        raise pytest.UsageError("--derive looks at all tests: it needs --suite=all")
    config.pluginmanager.register(Suite(config), "nbflash-suite")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config, TESTS), "nbflash-results")


def pytest_report_header(config):
    suite, quarter = config.option.suite, config.option.quarter
    faults = f", planted faults: quarter {quarter} of 0 to 3" if suite == "quick" else ""
    return f"suite: {suite}{faults}"


class Suite:
    """Chooses the tests of a process, and watches what they launch."""

    def __init__(self, config):
        self.suite, self.quarter = config.option.suite, config.option.quarter
        self.derive = config.option.derive
        self.tables = {tier: read_table(TESTS / tier) for tier in BY_TABLE}
        self.collected, self.in_no_table = {}, set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        functions = defaultdict(list)
        for item in items:
            functions[tier_of(item.path), name_of(item)[0]].append(item)
        self.collected = functions
        kept = {x for place, tests in functions.items() for x in self._chosen(*place, tests)}
        left_out = [item for item in items if item not in kept]
        items[:] = [item for item in items if item in kept]
        if left_out:
            config.hook.pytest_deselected(items=left_out)

    def _chosen(self, tier, function, tests):
        """Which tests of a function this suite runs."""
        if tests[0].get_closest_marker("survivor"):
            return tests if self.suite == "all" else []
        if tests[0].get_closest_marker("mutant"):
            quick = self.suite == "quick"
            return [x for x in tests if not quick or _quarter_of(x) == self.quarter]
        if self.suite not in BY_TABLE.get(tier, ()) or tests[0].get_closest_marker("case"):
            return tests
        if self.suite == "ci" and tests[0].get_closest_marker("design"):
            return tests
        entry = self.tables[tier]["functions"].get(function)
        if entry is None or entry["tests"] != len(tests):
            self.in_no_table.update(tests)
            return tests
        run = entry["run"]
        if self.suite == "quick" and tier in TIMED:
            run = [name for name, seconds in run.items() if seconds <= SECONDS]
        return [item for item in tests if name_of(item)[1] in run]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        _observed.clear()
        _watched[0] = not any(map(item.get_closest_marker, ("mutant", "survivor", "drawn")))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if item.get_closest_marker("mutant"):
            item.user_properties.append(("mutant", True))
        start = time.process_time()
        try:
            result = yield
        finally:
            always = item.get_closest_marker("case")
            seconds = 0.0 if always else time.process_time() - start
            item.user_properties.append(("launched", (seconds, sorted(_observed))))
            if _observed and item in self.in_no_table:
                item.user_properties.append(("in no table", seconds))
        self._check_signatures(item)
        return result

    def _check_signatures(self, item):
        """Raise if a test no longer launches what the table says."""
        table = self.tables.get(tier_of(item.path))
        if table and not self.derive:
            test = "{}[{}]".format(*name_of(item))
            gone = [s for s, name in table["signatures"].items() if name == test]
            gone = [s for s in gone if s not in _observed]
            assert not gone, f"suite.json is stale, make test-all derives it: {gone} no longer runs"

    def missing(self, tier):
        """Tests of the table that do not exist, of the files that were collected."""
        known = {
            "{}[{}]".format(*name_of(item))
            for (of, _), tests in self.collected.items()
            for item in tests
            if of == tier
        }
        files = {function.partition("::")[0] for of, function in self.collected if of == tier}
        named = set(self.tables[tier]["signatures"].values())
        return sorted(name for name in named - known if name.partition("::")[0] in files)


def _quarter_of(item):
    return zlib.crc32(item.name.encode()) % QUARTERS
