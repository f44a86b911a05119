"""Nothing here waits for another thread to settle."""

import pytest


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)
