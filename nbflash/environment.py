"""What this machine offers: versions, devices, implementations and the kernel cache."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from typing import TextIO

import nbflash
from nbflash.cuda import availability
from nbflash.planning import dispatch

# Names on the package index. Wheels of CuPy carry the CUDA major version in their name.
_PACKAGES = ("numpy", "scipy", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "ml_dtypes")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def show_config(file: TextIO | None = None) -> None:
    """Print versions, devices, what runs here and why the rest does not, and the kernel cache.

    Also ``python -m nbflash``. Needs neither a GPU nor CuPy nor Numba.

    Parameters
    ----------
    file : text file, optional
        Default standard output.
    """
    print("\n".join(describe()), file=file or sys.stdout)


def describe() -> list[str]:
    """The lines of `show_config`."""
    lines = [f"nbflash {nbflash.__version__}", "", "versions"]
    lines += [f"  {name:<14} {version}" for name, version in versions().items()]
    lines += ["", "devices", f"  cpu            {os.cpu_count()} cores, {platform.machine()}"]
    lines += [f"  cuda:{i:<9} {device}" for i, device in enumerate(cuda_devices())]
    lines += ["", "implementations"]
    for impl in dispatch.IMPLEMENTATIONS:
        reasons = dispatch.why_not_here(impl)
        answer = f"no: {'; '.join(reasons)}" if reasons else "yes"
        lines.append(f"  {impl:<14} {answer}")
    if not dispatch.why_not_here("cpu"):
        from nbflash.backends.cpu import blas

        lines += ["", "BLAS of the cpu implementation"]
        lines += [f"  {line}" for line in blas.describe()]
    size, files = cache_size()
    lines += [
        "",
        "kernel cache",
        f"  {availability.cache_dir()}: {files} files, {size / 1e6:.1f} MB",
    ]
    return lines


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that matter, and of the NVIDIA driver's CUDA."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = _version(name) or "not installed"
    cupy = [f"{name} {version}" for name in _CUPY if (version := _version(name))]
    found["cupy"] = ", ".join(cupy) or "not installed"
    found["driver"] = _driver_version()
    if availability.simulator():
        found["simulator"] = "on (NUMBA_ENABLE_CUDASIM)"
    return found


def cuda_devices() -> list[str]:
    """Name and compute capability of every CUDA device the driver shows; empty without one."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    devices = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        major, minor = (_attribute(driver, device, which) for which in (_MAJOR, _MINOR))
        devices.append(f"{name.value.decode()}, compute capability {major}.{minor}")
    return devices


def cache_size() -> tuple[int, int]:
    """Bytes and number of files in the kernel cache; (0, 0) when there is none yet."""
    files = [path for path in availability.cache_dir().rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str:
    driver, version = _driver(), ctypes.c_int()
    if driver is None:
        return "no NVIDIA driver"
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _driver():
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _attribute(driver, device, which: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value
