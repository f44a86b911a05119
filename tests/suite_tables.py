"""The committed tables of the suites: written by ``--derive``, read by :mod:`suites`.

``tests/<tier>/suite.json`` has, for every signature, the test that stands for it, and for every
test function with signatures how many tests it has and which of them run, with their seconds of
processor time. ``tests/sim/kill_map.json`` has the case that kills each planted fault.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

# A test of the committed table counts as taking this share of its time, so that a table changes
# only where something is gained.
KEPT = 0.5
OVERHEAD = 0.02  # seconds: what any test costs


def read_table(folder):
    """The table of a tier; an empty one where there is none."""
    file = folder / "suite.json"
    return json.loads(file.read_text()) if file.exists() else {"functions": {}, "signatures": {}}


def write_json(file, data):
    file.write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def choose(launched, committed=()):
    """The cheapest tests, roughly, that have every signature: greedy set cover.

    Parameters
    ----------
    launched : dict of str to (float, set of str)
        Test to seconds and signatures.
    committed : collection of str
        Tests that are preferred.

    Returns
    -------
    dict of str to str
        Signature to test.
    """
    cost = {t: (OVERHEAD + s) * (KEPT if t in committed else 1) for t, (s, _) in launched.items()}
    chosen, open_ = {}, {test: set(found) for test, (_, found) in launched.items()}
    holders = defaultdict(set)
    for test, found in open_.items():
        for signature in found:
            holders[signature].add(test)
    while holders:
        best = min((t for t in open_ if open_[t]), key=lambda t: (cost[t] / len(open_[t]), t))
        for signature in list(open_[best]):
            chosen[signature] = best
            for test in holders.pop(signature):
                open_[test].discard(signature)
    return chosen


def table_from(results, committed, functions_too):
    """The table of a tier.

    Parameters
    ----------
    results : dict of str to dict of str to (float, list of str)
        Test function, parameters: seconds and signatures.
    committed : dict
        The table so far; its functions that are not among the results stay.
    functions_too : bool
        Whether one test of every function is kept whatever its signatures.
    """
    with_signatures = {
        function: tests
        for function, tests in results.items()
        if any(found for _, found in tests.values())
    }
    other = {f: entry for f, entry in committed["functions"].items() if f not in results}
    signatures = {
        signature: test
        for signature, test in committed["signatures"].items()
        if test.partition("[")[0] in other
    }
    launched = {}
    for function, tests in with_signatures.items():
        for parameters, (seconds, found) in tests.items():
            own = {f"function {function}"} if functions_too else set()
            launched[f"{function}[{parameters}]"] = seconds, (set(found) | own) - set(signatures)
    chosen = choose(launched, set(committed["signatures"].values()))
    run = set(chosen.values())
    functions = dict(other)
    for function, tests in with_signatures.items():
        kept = {p: round(s, 2) for p, (s, _) in tests.items() if f"{function}[{p}]" in run}
        functions[function] = {"tests": len(tests), "run": kept}
    signatures |= {s: test for s, test in chosen.items() if not s.startswith("function ")}
    return {"functions": functions, "signatures": signatures}


class Results:
    """Plugin of the process that sums up: what was launched, and which case killed which fault."""

    def __init__(self, config, tests):
        self.derive, self.tests = config.option.derive, Path(tests)
        self.quick = config.option.suite == "quick"
        # Of some tests of a function: the table of signatures stays as it is.
        self.in_part = bool(config.option.keyword) or any("[" in name for name in config.args)
        self.launched = defaultdict(lambda: defaultdict(dict))  # tier, function, parameters
        self.killed, self.caught, self.planted = defaultdict(dict), 0, 0
        self.faults = {}  # how many a family has
        self.unknown = defaultdict(float)  # seconds of tests that are in no table, by file

    def pytest_runtest_logreport(self, report):
        if report.when != "call":
            return
        found = dict(report.user_properties)
        if "in no table" in found:
            self.unknown[report.nodeid.partition("::")[0]] += found["in no table"]
        if "mutant" in found:
            self.planted += 1
            self.caught += report.passed
        if "killed" in found:
            family, self.faults[family], mutant, case = found["killed"]
            self.killed[family][mutant] = case
        elif report.passed and "mutant" not in found:
            path, _, test = report.nodeid.partition("::")
            function, _, parameters = test.partition("[")
            tier = Path(path).parts[1]  # tests/tier/room/file.py
            tests = self.launched[tier][f"{Path(path).name}::{function}"]
            tests[parameters.removesuffix("]")] = tuple(found["launched"])

    def pytest_sessionfinish(self, session):
        if not self.derive:
            return
        for tier, functions_too in (("sim", True), ("compile", False)):
            if self.launched[tier] and not self.in_part:
                folder = self.tests / tier
                table = table_from(self.launched[tier], read_table(folder), functions_too)
                write_json(folder / "suite.json", table)
        if self.killed:
            file = self.tests / "sim" / "kill_map.json"
            kill_map = json.loads(file.read_text()) if file.exists() else {}
            for family, killed in self.killed.items():
                known = {} if len(killed) == self.faults[family] else kill_map.get(family, {})
                kill_map[family] = known | killed
            write_json(file, kill_map)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        for file, seconds in () if self.in_part else sorted(self.unknown.items()):
            terminalreporter.write_line(
                f"{seconds:.0f} s of tests that suite.json does not know, and so all run: "
                f"pytest {file} --derive"
            )
        if self.planted:
            part = " (a quarter of all)" if self.quick else ""
            line = f"{self.caught} of {self.planted} planted faults caught{part}"
            terminalreporter.write_line(line)
