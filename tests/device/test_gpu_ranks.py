"""Attention over the GPUs of one host: a process of MPI and a GPU for each of two ranks."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import cupy
import pytest

RANKS = 2
CHECKS = "one_gpu", "a_thousand_calls", "two_streams", "graph", "watched_recording"
SECONDS = 240


def _missing():
    """Why two ranks cannot run here, or an empty string."""
    if cupy.cuda.runtime.getDeviceCount() < RANKS:
        return "needs two GPUs"
    if find_spec("mpi4py") is None or shutil.which("mpiexec") is None:
        return "needs mpi4py and mpiexec: pip install 'nbflash[mpi]'"
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())


@pytest.mark.parametrize("check", CHECKS)
def test_over_two_gpus(check):
    program = Path(__file__).with_name("ranks_nccl.py")
    call = ["mpiexec", "-n", str(RANKS), "--oversubscribe", sys.executable, str(program), check]
    # What Open MPI asks of who runs as root, as in a container.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        call, env=os.environ | allowed | path, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == RANKS, done.stdout + done.stderr
