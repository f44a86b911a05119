"""Tiers are directories; each tier is a process of its own (see the Makefile)."""

import importlib.util
import os

import pytest
from suites import pytest_addoption, pytest_configure, pytest_report_header, tier_of

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header"]

if importlib.util.find_spec("hypothesis"):  # tests/device does without
    from hypothesis import settings

    # The first example of a property often pays for a compilation: no deadline.
    derandomize = "CI" in os.environ
    settings.register_profile("nbflash", deadline=None, print_blob=True, derandomize=derandomize)
    settings.load_profile("nbflash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item.path))
    tiers = {tier_of(item.path) for item in items}
    if "sim" in tiers and len(tiers) > 1:
        raise pytest.UsageError(
            f"{sorted(tiers)} in one process: NUMBA_ENABLE_CUDASIM=1 counts at the first import of "
            "Numba only, so run tests/sim alone"
        )
