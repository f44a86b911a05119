"""What this machine has for CUDA kernels: packages, driver, devices, the simulator, a cache.

No package is imported before somebody asks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path

from nbflash.cuda.simulated import simulator


def cache_dir() -> Path:
    """Directory of the compiled kernels: ``$NBFLASH_CACHE_DIR``, or the user's cache directory."""
    if chosen := os.environ.get("NBFLASH_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "nbflash"


def cubin_dir() -> Path:
    """Where compiled CUDA kernels are kept; only the user may read or write there."""
    return cache_dir() / "cubins"


def why_not_kernels() -> list[str]:
    """Reasons why no CUDA kernel runs here, on a device or in the simulator; empty if one does."""
    return why_not_simulator() if simulator() else why_not_cuda()


def why_not_simulator() -> list[str]:
    """Reasons why the simulator does not run."""
    if not installed("numba_cuda"):
        return ["numba-cuda is not installed: pip install numba-cuda"]
    if not installed("greenlet"):
        return ["greenlet, of the simulator, is not installed: pip install 'nbflash[test]'"]
    from nbflash.cuda import simulator as sim

    if sim.installed():
        return []
    return [
        "the simulator's engine is not installed: call nbflash.cuda.simulator.install() before "
        "nbflash's kernels are imported"
    ]


@lru_cache(maxsize=1)
def why_not_cuda() -> list[str]:
    """Reasons why no CUDA device can be used."""
    missing = {"numba_cuda": "numba-cuda", "cupy": "CuPy", "cuda.core": "cuda-core"}
    absent = [name for module, name in missing.items() if not installed(module)]
    if absent:
        return [
            f"{', '.join(absent)} not installed: pip install 'nbflash[cuda12]' or 'nbflash[cuda13]'"
        ]
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return [f"no usable NVIDIA driver or GPU: {error}"]
    return [] if count else ["no CUDA device is visible"]


def why_not_ptxas() -> list[str]:
    """Reasons why kernels that are assembled as whole programs cannot be."""
    from nbflash.cuda import ptxas

    if ptxas.find_ptxas() is None:
        return ["ptxas is not installed: pip install nvidia-cuda-nvcc"]
    return []


def capability(device_id: int) -> tuple[int, int]:
    """Compute capability of a CUDA device: ``(9, 0)``."""
    import cupy

    return divmod(int(cupy.cuda.Device(device_id).compute_capability), 10)


def arch_of(compute_capability) -> str:
    """``(9, 0)`` → ``"sm_90a"``: architecture-specific features from Hopper on."""
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@lru_cache
def installed(module: str) -> bool:
    """Whether a module can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
