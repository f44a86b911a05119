"""Processes that compile: when they end."""

import atexit
import os
import subprocess
from types import SimpleNamespace

import pytest

from nbflash.cuda import workers


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_fork_ends_no_workers(is_fork, monkeypatch):
    """They are those of the process that started them."""
    killed, at_exit = [], []
    process = SimpleNamespace(kill=lambda: killed.append(process))
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: process)
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    assert workers._start() is process
    if is_fork:
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
    ((end, *given),) = at_exit
    end(*given)
    assert killed == ([] if is_fork else [process])
