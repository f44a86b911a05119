"""Bytes of device memory that a command moves, by NVIDIA's Nsight Compute."""

import csv
import shutil
import subprocess

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def why_not():
    """Why ncu cannot run here; empty when it can be tried."""
    return "" if shutil.which("ncu") else "ncu is not installed"


def dram_bytes(command):
    """What the kernels between ``profiler.start`` and ``profiler.stop`` of a command move.

    Parameters
    ----------
    command : list of str

    Returns
    -------
    int

    Raises
    ------
    RuntimeError
        With ncu's last line, where it may not read the counters above all.
    """
    options = ["--csv", "--print-units", "base", "--profile-from-start", "off"]
    options += ["--target-processes", "all", "--metrics", ",".join(METRICS)]
    done = subprocess.run(["ncu", *options, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(next((x for x in lines if "ERR" in x), lines[-1] if lines else "ncu"))
    return parse(done.stdout)


def parse(text):
    """The sum of the metrics over all kernels of ncu's CSV output."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu reported no kernel")
    rows = csv.DictReader(lines[start:])
    found = [x["Metric Value"] for x in rows if x["Metric Name"] in METRICS]
    return round(sum(float(x.replace(",", "")) for x in found))
