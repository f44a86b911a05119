"""Where a number comes from: commit, device, driver, versions and time, for every row."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("nbflash", "numpy", "scipy", "numba", "numba-cuda", "cupy", "torch", "transformers")


def commit():
    """Short hash of the checked-out commit, with ``-dirty`` when the sources differ from it.

    ``"unknown"`` outside a git checkout.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(package):
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy") if package == "cupy" else (package,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if package == "nbflash":
        import nbflash

        return nbflash.__version__
    return ""


def _cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _gpu():
    import cupy

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    major, minor = divmod(runtime.driverGetVersion(), 1000)
    return name, f"{_driver()} (CUDA {major}.{minor // 10})".strip()


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.split()[0]


def provenance(device):
    """Columns that every row of a CSV carries.

    Parameters
    ----------
    device : {"cpu", "cuda"}

    Returns
    -------
    dict of str to str
    """
    name, driver = _gpu() if device == "cuda" else (_cpu_name(), "")
    versions = {package.replace("-", "_"): _version(package) for package in PACKAGES}
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "driver": driver,
        "python": platform.python_version(),
        **versions,
    }
