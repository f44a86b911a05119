"""What `sparsity` says of its numbers."""

import pytest

from experiments.report import sparsity_report


@pytest.mark.parametrize(("slow", "warned"), [(1.7, False), (1.8, True)])
def test_a_noisy_machine_is_named(capsys, slow, warned):
    rows = [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 1.0}] * 2
    rows += [{"pass": "forward", "p10_ms": 1.0, "p90_ms": 5.0}]
    rows += [{"pass": "backward", "p10_ms": 2.0, "p90_ms": 2 * x} for x in (1.0, slow, slow)]
    sparsity_report._warn_of_noise(rows)
    out = capsys.readouterr().out
    assert ("backward" in out, "busy" in out, "forward" in out) == (warned, warned, False)
