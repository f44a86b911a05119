"""Mutation testing of host code: ``make mutation``, ``make mutation-frameworks``.

The operators of cosmic-ray, and `omissions`, change one place of a module, and the tests that
`judges` names for it are run. Places are drawn by a seed, and one mutant for each. A mutant that
the tests pass has survived. It counts against the score unless equivalent_mutants*.toml has it,
with the reason why no test can tell it from the original. Annotations are no places, and neither is
``strict=`` of zip.

    score = killed / (killed + survived)
"""

import argparse
import ast
import difflib
import itertools
import os
import random
import sys
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from judges import JUDGES, LEFT_OUT
from mutants import Mutant
from omissions import omissions
from planting import ROOT, Planter

TESTS = Path(__file__).parent
LEAST = 0.95  # the score that is asked for
TIERS = ("tests/host", "tests/frameworks"), ("tests/sim",)  # without and with the simulator
SECONDS = 100  # for the tests of one mutant, which take at most half of it without one


@dataclass(frozen=True)
class Change:
    """One mutant of a module."""

    module: str
    line: int
    source: str
    mutated: str

    @property
    def texts(self):
        """The lines that differ, as they were and as they are, without their indents."""
        lines = list(difflib.ndiff(self.source.splitlines(), self.mutated.splitlines()))
        return tuple(
            " ".join(x[2:].strip() for x in lines if x.startswith(sign)) for sign in ("- ", "+ ")
        )

    def __str__(self):
        was, now = self.texts
        return f"{self.module}, line {self.line}\n    - {was}\n    + {now}"


def replacements(source):
    """Pairs (position, function from the source to a mutant) of cosmic-ray's operators."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    for operator in map(get_operator, operator_names()):
        if operator.arguments():
            continue
        positions = (start for x in nodes for start, _ in operator().mutation_positions(x))
        for occurrence, start in enumerate(positions):
            yield start, partial(mutate_code, operator=operator(), occurrence=occurrence)


KINDS = {"replacements": replacements, "omissions": omissions}


def places(modules, kinds):
    """By module and position in its source: functions from the source to a mutant."""
    found = defaultdict(list)
    for module in modules:
        source = path_of(module).read_text()
        for kind in kinds:
            for start, change in KINDS[kind](source):
                found[module, start].append(change)
    return found


def draw(modules, size, seed, kinds):
    """As many mutants as asked for, or all that there are, of different places."""
    rng, drawn = random.Random(seed), []
    found = places(modules, kinds)
    for module, start in rng.sample(sorted(found), len(found)):
        if len(drawn) == size:
            break
        source = path_of(module).read_text()
        mutated = rng.choice(found[module, start])(source)
        if meaning(mutated) not in (None, meaning(source)):
            drawn.append(Change(module, start[0], source, mutated))
    return drawn


def path_of(module):
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def meaning(source):
    """The syntax tree without annotations and ``strict=``, a guard; None of what is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None):
                setattr(node, name, None)
        if isinstance(node, ast.Call):
            node.keywords = [x for x in node.keywords if x.arg != "strict"]
    return ast.dump(tree)


def equivalent():
    """{(module, line as it was, as it is): reason}."""
    files = map(Path.read_text, TESTS.glob("equivalent_mutants*.toml"))
    entries = itertools.chain.from_iterable(tomllib.loads(x)["equivalent"] for x in files)
    return {(x["module"], x["line"], x["mutant"]): x["reason"] for x in entries}


def outcomes(tasks, jobs):
    """pytest's exit code of each task, a change or None and its tests."""
    idle = SimpleQueue()
    planters = [[Planter(simulated, SECONDS) for simulated in (False, True)] for _ in range(jobs)]
    for pair in planters:
        idle.put(pair)

    def outcome(task):
        change, tests = task
        fault = change and Mutant("", change.source, change.mutated)
        pair = idle.get()
        try:
            for planter, tiers in zip(pair, TIERS, strict=True):
                if of_tier := [x for x in tests if x.startswith(tiers)]:
                    how = [f"--deselect=tests/{x}" for x in LEFT_OUT]
                    code, _ = planter.outcome(change and change.module, fault, *how, *of_tier)
                    if code != 0:
                        return code
            return 0
        finally:
            idle.put(pair)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(outcome, tasks)
    for planter in itertools.chain(*planters):
        planter.close()


def judges_of(module):
    return [f"tests/{name}" for name in JUDGES[module]]


def failing(changes, jobs):
    """The tests that fail without a mutant."""
    tests = sorted({name for x in changes for name in judges_of(x.module)})
    codes = outcomes([(None, [name]) for name in tests], jobs)
    return [name for name, code in zip(tests, codes, strict=True) if code != 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=150, help="mutants, default 150")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, default 0")
    parser.add_argument("--jobs", type=int, default=2, help="processes, default 2")
    parser.add_argument("--only", nargs="+", default=[""], help="modules whose names begin so")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument(
        "--frameworks", action="store_true", help="modules that tests/frameworks judges"
    )
    options = parser.parse_args()
    os.environ["CI"] = "1"  # properties draw the same examples every time

    modules = [
        module
        for module, tests in JUDGES.items()
        if module.startswith(tuple(options.only))
        and tests[0].startswith("frameworks/") == options.frameworks
    ]
    changes = draw(modules, options.size, options.seed, options.kinds)
    if broken := failing(changes, options.jobs):
        return f"these fail without a mutant: {', '.join(broken)}"
    known, counts, wrong = equivalent(), Counter(), []
    tasks = [(x, judges_of(x.module)) for x in changes]
    for change, code in zip(changes, outcomes(tasks, options.jobs), strict=True):
        listed = (change.module, *change.texts) in known
        verdict = "killed" if code else "equivalent" if listed else "survived"
        counts[verdict] += 1
        if verdict == "survived":
            print(f"survived: {change}", flush=True)
        if code and listed:
            wrong.append(change)
            print(f"killed, and listed as equivalent: {change}", flush=True)
    score = counts["killed"] / (counts["killed"] + counts["survived"])
    print(
        f"mutation score {score:.3f} with seed {options.seed}: {counts['killed']} killed, "
        f"{counts['survived']} survived, {counts['equivalent']} equivalent"
    )
    return int(score < LEAST or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
