"""Every planted fault of host code is caught by its test; see `host_faults`."""

import pytest
from host_faults import FAULTS
from planting import Planter

FAILED = 1  # pytest's exit code; any other is no verdict


@pytest.fixture(scope="module")
def planters():
    """By whether the simulator is on, started when it is asked for."""
    started = {}

    def planter(simulated):
        if simulated not in started:
            started[simulated] = Planter(simulated)
        return started[simulated]

    yield planter
    for each in started.values():
        each.close()


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_fault_is_caught(fault, planters):
    module, mutant, test = fault
    code, output = planters(test.startswith("tests/sim")).outcome(module, mutant, test)
    assert code == FAILED, f"{test} ends with {code}:\n{output}"
