"""The machinery of planted faults: what is generated, the kill map, and when it is stale."""

import importlib
import sys
import types

import pytest
from generated_mutants import faults_of
from mutant_family import Family
from mutants import Mutant, mutated_modules

SOURCE = """
def make(cfg):
    def load(base, stage, phase):
        mbarrier_wait(base + FULL + 8 * stage, phase)
        stage, phase = advance(stage, phase)
        copy(base)
        mbarrier_arrive(base + 8)

    def store():
        cuda.syncthreads()
        if True:
            cuda.syncthreads()
        store_rows()
    return load, store
"""
GENERATED = {
    "load: mbarrier_wait deleted": "        pass\n",
    "load: mbarrier_wait phase flipped": "8 * stage, (phase) ^ 1)",
    "load: mbarrier_wait stage shifted": "FULL + 8 * ((stage) ^ 1), phase)",
    "load: advance skipped": "stage, phase = (stage, phase)\n",
    "load: mbarrier_arrive deleted": "        copy(base)\n        pass\n",
    "store: syncthreads deleted": "        pass\n        if True:",
    "store: syncthreads 2 deleted": "        if True:\n            pass\n",
}


def test_what_is_generated():
    faults = {fault.name: fault.apply(SOURCE) for fault in faults_of(SOURCE)}
    assert list(faults) == list(GENERATED)
    for name, text in GENERATED.items():
        assert text in faults[name]
        compile(faults[name], name, "exec")


def test_columns_count_bytes():
    source = "def store():  # Q Kᵀ\n    x = 'ᵀ'; wait_all()\n"
    (fault,) = faults_of(source)
    assert fault.apply(source) == "def store():  # Q Kᵀ\n    x = 'ᵀ'; pass\n"


def test_every_signature_has_a_test(request):
    suite = request.config.pluginmanager.get_plugin("nbflash-suite")
    assert suite.missing("sim") == []


def test_what_imports_a_faulty_module_binds_it():
    """From its package too; and what was imported before stays as it is."""
    fault = Mutant("steeper", "STEEPEST = 32.0", "STEEPEST = 64.0")
    params, executor = "nbflash.cuda.score_params", "nbflash.backends.simt.executor"
    built = mutated_modules(params, fault, (executor,))
    assert built[executor].score_params is built[params]
    assert built[params].STEEPEST == 64
    assert importlib.import_module(params).STEEPEST == 32
    assert importlib.import_module(executor).score_params.STEEPEST == 32


def test_what_imports_nothing_faulty_stays_as_it_is():
    """Directly or not; so that what it launches is the same kernel for every fault."""
    fault = Mutant("steeper", "STEEPEST = 32.0", "STEEPEST = 64.0")
    params, executor = "nbflash.cuda.score_params", "nbflash.backends.simt.executor"
    other, behind = "nbflash.definitions.philox", "nbflash.backends.simt.decode_host"
    built = mutated_modules(params, fault, (other, executor, behind))
    assert built[other] is importlib.import_module(other)
    for name in (executor, behind):
        assert built[name] is not importlib.import_module(name)


@pytest.fixture
def family(monkeypatch):
    """A module of one function, with two faults and three cases: x + 1 of 0, 1 and 2."""
    source = "def up(x):\n    return x + 1\n"
    module = types.ModuleType("nbflash_toy")
    exec(source, module.__dict__)
    loader = types.SimpleNamespace(get_source=lambda name: source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "mutants.importlib.util.find_spec",
        lambda name: types.SimpleNamespace(loader=loader, origin="toy.py"),
    )

    def case_of(x):
        def run_case(modules):
            assert modules["nbflash_toy"].up(x) == x + 1

        return run_case

    faults = Mutant("twice", "x + 1", "2 * x"), Mutant("one", "x + 1", "1 + 0 * x")
    return Family(
        "toy",
        ("nbflash_toy",),
        {str(x): case_of(x) for x in (1, 0, 2)},
        [("nbflash_toy", fault) for fault in faults],
    )


def with_map(monkeypatch, **killers):
    entries = {f"nbflash_toy: {name}": case for name, case in killers.items()}
    monkeypatch.setattr("mutant_family.kill_map", lambda: {"toy": entries})


def test_the_case_of_the_map_kills(family, monkeypatch):
    with_map(monkeypatch, twice="2", one="1")
    assert family.assert_killed("nbflash_toy: twice") == "2"
    for case in family.cases:
        family.passes(case)


@pytest.mark.parametrize("known", [{"twice": "1"}, {"twice": "gone"}, {}])
def test_a_stale_map_names_the_line_to_change(family, monkeypatch, known):
    with_map(monkeypatch, **known)
    with pytest.raises(AssertionError, match='write "nbflash_toy: twice": "0"'):
        family.assert_killed("nbflash_toy: twice")


def test_a_fault_that_nothing_kills(family, monkeypatch):
    with_map(monkeypatch, one="1")
    del family.cases["1"], family.cases["2"]
    for find in (family.assert_killed, family.cheapest_killer):
        with pytest.raises(AssertionError, match="nothing kills 'nbflash_toy: one'"):
            find("nbflash_toy: one")


def test_the_cheapest_case_is_found(family, monkeypatch):
    with_map(monkeypatch, one="2")
    family._costs.update({"0": 1.0, "1": 5.0, "2": 1.5})
    assert family.cheapest_killer("nbflash_toy: one") == "2"  # 1 is dearer, 0 does not kill
    family._costs["1"] = 0.1
    assert family.cheapest_killer("nbflash_toy: one") == "1"
