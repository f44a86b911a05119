"""The simulator tier: Numba's CUDA simulator with nbflash's engine, in a process of its own."""

import os
import sys

import pytest


def _numba_without_simulator():
    numba = sys.modules.get("numba")
    return numba is not None and not numba.config.ENABLE_CUDASIM


if _numba_without_simulator():
    raise pytest.UsageError(
        "tests/sim needs NUMBA_ENABLE_CUDASIM=1 at the first import of Numba, and something has "
        "imported it already: run `pytest tests/sim` by itself"
    )
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

from nbflash.cuda import simulator as sim  # noqa: E402

# Correct kernels take 250 turns at most: a planted fault that never ends is found in seconds.
sim.install(turns=1000)

import launched  # noqa: E402
import remembered  # noqa: E402

launched.install()
remembered.install()
