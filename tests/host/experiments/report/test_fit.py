"""The line through runtime against density, and the bound that it is held to."""

import numpy as np
import pytest

from experiments.report.fit import fit_line, fixed_cost


def test_fit_recovers_a_planted_line():
    s = np.array([0.01, 0.05, 0.1, 0.3, 0.6, 1.0])
    fit = fit_line(s, 0.7 + 9.0 * s, dense=8.0)
    assert fit.fixed == pytest.approx(0.7)
    assert fit.relative_slope == pytest.approx(9 / 8)
    assert fit.r_squared == pytest.approx(1)
    noisy = fit_line(s, 0.7 + 9.0 * s + np.array([1, -1, 1, -1, 1, -1]), dense=8.0)
    assert 0.8 < noisy.r_squared < 0.95


def test_fixed_cost_is_what_the_bound_lacks():
    s = np.array([0.01, 0.03, 0.5, 1.0])
    t = 1.25 * s * 8 + np.array([5.0, 0.25, 0.5, -1.0])
    assert fixed_cost(s, t, dense=8.0) == pytest.approx(0.5)
    assert fixed_cost(s, s * 8, dense=8.0) == 0
