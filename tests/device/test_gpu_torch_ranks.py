"""Two processes of torch.distributed, each with a GPU: training, and one sequence dealt to both."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cupy
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
if cupy.cuda.runtime.getDeviceCount() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SECONDS = 240


def kernels(**parameters):
    """Compiled when they are needed, by each process."""
    return []


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(way, tmp_path):
    program = ROOT / "tests" / "frameworks" / f"{way}.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen(
            [sys.executable, program, str(rank), tmp_path / "meeting", "--device", "cuda"],
            env=environment,
            **pipes,
        )
        for rank in range(2)
    ]
    try:
        for process in both:
            printed, errors = process.communicate(timeout=SECONDS)
            assert printed.endswith("equal\n"), errors
    finally:
        for process in both:
            process.kill()
