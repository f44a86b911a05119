"""Programs of tests/frameworks that two processes run together."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "frameworks"
SECONDS = 240


def outputs(program, meeting, *options):
    """What each of the processes of ``program`` prints, and its errors.

    They find each other by the file ``meeting``.
    """
    path = os.pathsep.join([str(FOLDER.parents[1]), *filter(None, sys.path)])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, FOLDER / program]
    both = [
        subprocess.Popen(
            [*command, str(rank), meeting, *options], env=os.environ | {"PYTHONPATH": path}, **pipes
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=SECONDS) for process in both]
    finally:
        for process in both:
            process.kill()
