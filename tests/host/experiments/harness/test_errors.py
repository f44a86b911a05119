"""Errors as one line of a report."""

import numpy as np
import pytest

import nbflash
from experiments.harness.errors import one_line


def test_reasons_in_one_line():
    inputs = np.ones((3, 1, 4, 1, 8), np.float32)
    reasons = nbflash.why_not("sm90", *inputs)
    assert len(reasons) > 1
    with pytest.raises(ValueError, match="cannot run") as error:
        nbflash.attention(*inputs, impl="sm90")
    line = one_line(error.value)
    assert "\n" not in line
    assert line.endswith(", cpu): " + "; ".join(reasons))
    assert one_line(KeyError()) == "KeyError"
