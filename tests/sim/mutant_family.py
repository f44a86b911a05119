"""Families of planted faults, the cases that run a kernel, and the map from fault to killing case.

A mutant is caught when a case of its family fails on it: by wrong numbers, by a fault that the
simulator reports, or by a Python error. The kernels as they are pass every case, so a mutant that
is caught is caught by its fault. ``kill_map.json`` says which case kills which mutant; that case
alone is run. Where it passes, all are, and the map is stale: the test fails with the line to
change. ``--derive`` looks for the cheapest killing case of every mutant and writes the map anew.
"""

import functools
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from generated_mutants import generated, tree_of
from mutants import mutated_modules
from remembered import launches

from nbflash.cuda import simulator as sim

KILL_MAP = Path(__file__).with_name("kill_map.json")
FAULTS = (sim.SimError, AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
# A case known to kill is kept unless another takes less than this share of its time.
WORTH_A_CHANGE = 0.6


@functools.cache
def kill_map():
    """``{family: {mutant: case}}`` as committed."""
    return json.loads(KILL_MAP.read_text()) if KILL_MAP.exists() else {}


class Modules(dict):
    """Modules by dotted name; those that were not rebuilt are the ones that are imported."""

    def __missing__(self, name):
        return importlib.import_module(name)


@dataclass(frozen=True, eq=False)
class Family:
    """The planted faults of a few modules.

    Attributes
    ----------
    name : str
    chain : sequence of str
        Modules that are rebuilt around a fault, in the order of their imports.
    cases : dict of str to callable
        ``case(modules)`` raises unless the kernels of ``modules`` are right.
    mutants : sequence of (str, Mutant)
        Module and fault: those that are written down.
    generate : sequence of str
        Modules whose faults of synchronisation are generated, or ``module:function`` for those of
        one function.
    elsewhere : sequence of str
        Functions of these modules that another family runs.
    reach : callable, optional
        ``reach(module)``: names of the cases that run it; all, if it is None.
    errors : tuple of type
        What a case may fail with.
    survivors : dict of str to str
        Ids of the mutants that no case can kill, and why: most change no result.
    """

    name: str
    chain: Sequence[str]
    cases: dict[str, Callable]
    mutants: Sequence[tuple]
    generate: Sequence[str] = ()
    elsewhere: Sequence[str] = ()
    reach: Callable | None = None
    errors: tuple = FAULTS
    survivors: dict[str, str] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def planted(self):
        """``{id: (module, mutant)}``, the written ones first; survivors are among them."""
        found = {}
        for module, mutant in self.mutants:
            self._add(found, module, mutant)
        for module, _, only in (entry.partition(":") for entry in self.generate):
            for mutant in generated(module):
                function = mutant.name.partition(":")[0]
                if function not in self.elsewhere and only in ("", function):
                    self._add(found, module, mutant)
        unknown = set(self.survivors) - set(found)
        if unknown:
            raise ValueError(f"{self.name}: there are no mutants {sorted(unknown)} to survive")
        return found

    @staticmethod
    def _id(module, mutant):
        return f"{'.'.join(module.split('.')[-2:])}: {mutant.name}"

    def _add(self, found, module, mutant):
        key = self._id(module, mutant)
        if key in found:
            raise ValueError(f"{self.name}: two mutants are called {key!r}")
        found[key] = module, mutant

    def twins(self):
        """Pairs of ids of the same fault: one that is generated need not be written down."""
        trees, pairs = {}, []
        for key, (module, mutant) in self.planted.items():
            first = trees.setdefault((module, tree_of(module, mutant)), key)
            pairs += [(first, key)] if first != key else []
        return pairs

    @property
    def harmful(self):
        """Ids of the mutants that some case has to kill."""
        return [key for key in self.planted if key not in self.survivors]

    def rebuilt(self, key):
        """The modules around the mutant ``key``."""
        module, mutant = self.planted[key]
        after = self.chain[self.chain.index(module) + 1 :]
        return Modules(mutated_modules(module, mutant, after))

    def passes(self, case):
        """Raise unless the kernels as they are pass a case."""
        self.cases[case](Modules())

    def kills(self, case, modules):
        """Whether a case fails on the modules."""
        try:
            self.cases[case](modules)
        except self.errors:
            return True
        return False

    def reaching(self, key):
        """Names of the cases that run the module of a mutant."""
        module = self.planted[key][0]
        return list(self.cases if self.reach is None else self.reach(module))

    def cost(self, case):
        """Seconds of processor time of a case on the kernels as they are, measured once."""
        if case not in self._costs:
            self.passes(case)  # what is computed once a process is not of the case
            start = time.process_time()
            self.passes(case)
            self._costs[case] = time.process_time() - start
        return self._costs[case]

    def cheapest_killer(self, key):
        """The cheapest case that kills a mutant; raises AssertionError if none does.

        The committed one is kept unless another takes far less time, so that the map changes only
        where there is something to gain.
        """
        modules = self.rebuilt(key)
        cases = sorted(self.reaching(key), key=self.cost)
        known = kill_map().get(self.name, {}).get(key)
        if known in cases and self.kills(known, modules):
            cases = [case for case in cases if self.cost(case) < WORTH_A_CHANGE * self.cost(known)]
            cases.append(known)
        killer = next((case for case in cases if self.kills(case, modules)), None)
        assert killer, f"{self.name}: nothing kills {key!r}, tried {', '.join(cases)}"
        return killer

    def assert_killed(self, key):
        """The case of the kill map, which kills a mutant; raises AssertionError otherwise."""
        modules, known = self.rebuilt(key), kill_map().get(self.name, {}).get(key)
        with launches():
            if known in self.cases and self.kills(known, modules):
                return known
        others = (case for case in self.reaching(key) if case != known)
        killer = next((case for case in others if self.kills(case, modules)), None)
        assert killer, f"{self.name}: nothing kills {key!r}"
        raise AssertionError(
            f"{KILL_MAP.name} is stale. In {self.name!r} it has {key!r}: {known!r}; "
            f"write {json.dumps(key)}: {json.dumps(killer)}, or derive it: make test-all"
        )

    def assert_survives(self, key):
        """Raise unless every case passes with a mutant that none is said to kill."""
        modules = self.rebuilt(key)
        for case in self.reaching(key):
            self.cases[case](modules)
