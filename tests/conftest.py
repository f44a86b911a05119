"""Tiers are directories; each tier is a process of its own (see the Makefile)."""

import gc
import importlib.util
import os
import sys
import textwrap

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


def pytest_collection_finish() -> None:
    """What thousands of tests are made of stays: no later collection looks at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import a source as the module ``user_scores``, as a process would that begins."""

    def load(source):
        path = tmp_path / "user_scores.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("user_scores", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "user_scores", module)
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))
        return module

    return load
