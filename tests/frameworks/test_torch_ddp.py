"""Two processes on the CPU train a model together: each has a copy of it, or a half."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(way, tmp_path):
    command = [sys.executable, HERE / f"{way}.py"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=environment, **pipes)
        for rank in range(2)
    ]
    for process in both:
        printed, errors = process.communicate()
        assert printed == "equal\n", errors
