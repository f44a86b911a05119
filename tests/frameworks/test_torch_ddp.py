"""Two processes on the CPU train one layer together."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_gradients_are_those_of_one_process(tmp_path):
    command = [sys.executable, HERE / "ddp.py"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=environment, **pipes)
        for rank in range(2)
    ]
    for process in both:
        printed, errors = process.communicate()
        assert printed == "equal\n", errors
