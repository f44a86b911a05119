"""Which implementation can run what: `why_not` is the only statement of constraints.

The dispatcher, its error messages, `show_config` and the tests all ask here. Nothing is imported
but the standard library; whether a package, a driver or a device is there is found out on demand.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path

from nbflash.inputs.arrays import CPU, CUDA

IMPLEMENTATIONS = ("sm90", "sm80", "simt", "cpu", "reference")

# What "auto" tries, in this order. "reference" is the specification and is never chosen.
_AUTO = {CUDA: ("sm90", "sm80", "simt"), CPU: ("cpu",)}
_SCORES = ("sm90", "simt", "cpu", "reference")
_DROPOUT = ("sm90", "simt", "cpu", "reference")
# By sm90: 15 bits are compared as float16, in which larger thresholds would be NaN.
_MOST_DROPOUT = 0x7C00 / 2**15
_SCORE_BACKWARD = {"sm90": "simt"}
_HOST_ARRAYS = "the CUDA simulator (NUMBA_ENABLE_CUDASIM=1) runs on NumPy arrays, got CUDA arrays"
_NOT_BUILT = {
    "sm80": "the tensor-core kernels (mma.sync) are not built yet",
}


def why_not(impl: str, problem, mask=None, score=None, dropout=0.0) -> list[str]:
    """Reasons why ``impl`` cannot run ``problem`` on this machine; empty when it can.

    Parameters
    ----------
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask, optional
        No implementation of today restricts the mask.
    score : scores.Score, optional
    dropout : float

    Raises
    ------
    ValueError, TypeError
        If ``impl`` is not one of these names.
    """
    check_impl(impl)
    if impl == "auto":
        names = _AUTO[problem.device]
        reasons = {name: why_not(name, problem, mask, score, dropout) for name in names}
        if not all(reasons.values()):
            return []
        return [f"{name}: {reason}" for name, why in reasons.items() for reason in why]
    reasons = why_not_here(impl, problem.device_id) + _why_not_arrays(impl, problem)
    if score is not None and impl not in _SCORES:
        reasons.append(f"score functions run on {', '.join(_SCORES)}, not on {impl} yet")
    if dropout and impl not in _DROPOUT:
        reasons.append(f"dropout runs on {', '.join(_DROPOUT)}, not on {impl} yet")
    if impl == "sm90" and dropout > _MOST_DROPOUT:
        reasons.append(f"sm90 takes a dropout of at most {_MOST_DROPOUT}, got {dropout}")
    return reasons + (_why_not_tensor_maps(problem) if impl == "sm90" else [])


def choose(impl: str, problem, mask=None, score=None, dropout=0.0) -> str:
    """The implementation that runs ``problem``: ``impl`` itself, or for "auto" the first that can.

    Raises
    ------
    ValueError
        If none can, with every reason. An explicit ``impl`` never falls back.
    """
    reasons = why_not(impl, problem, mask, score, dropout)
    if reasons:
        raise ValueError(f"{impl=} cannot run ({problem}):\n  " + "\n  ".join(reasons))
    if impl != "auto":
        return impl
    names = _AUTO[problem.device]
    return next(name for name in names if not why_not(name, problem, mask, score, dropout))


def score_backward_impl(impl: str) -> str:
    """The implementation of the gradients of a score's arrays, for a plan of ``impl``.

    Hopper has no kernel of its own for them: what there is to write may be as large as the scores.
    """
    return _SCORE_BACKWARD.get(impl, impl)


def why_not_decode(device: str) -> list[str]:
    """Reasons why `decode` cannot run on arrays in ``device`` memory; empty when it can."""
    if device != CUDA:
        return why_not_here("cpu")
    return [_HOST_ARRAYS] if simulator() else _why_not_cuda()


def check_decode_device(problem) -> None:
    """Raise ValueError with the reasons unless `decode` can run ``problem``, a DecodeProblem."""
    if reasons := why_not_decode(problem.device):
        raise ValueError(f"decode cannot run ({problem}):\n  " + "\n  ".join(reasons))


def check_impl(impl) -> None:
    """Raise unless ``impl`` names an implementation or is "auto"."""
    if not isinstance(impl, str):
        raise TypeError(f"impl must be a string, got {impl!r}")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def why_not_here(impl: str, device_id: int = 0) -> list[str]:
    """Reasons why ``impl`` cannot run anything on this machine, on a CUDA device of it."""
    if impl in _NOT_BUILT:
        return [_NOT_BUILT[impl]]
    if impl == "cpu" and not _installed("numba"):
        return ["numba is not installed: pip install numba"]
    if impl == "simt":
        return _why_not_simulator() if simulator() else _why_not_cuda()
    if impl == "sm90":
        return _why_not_hopper(device_id)
    return []


def simulator() -> bool:
    """Whether Numba runs CUDA kernels in its simulator (NUMBA_ENABLE_CUDASIM=1)."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


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


def _why_not_arrays(impl: str, problem) -> list[str]:
    on_host = problem.device == CPU
    if impl in ("cpu", "reference") and not on_host:
        return [f"{impl} runs on NumPy arrays, got CUDA arrays: use cupy.asnumpy, or impl='auto'"]
    if impl in ("sm90", "simt") and on_host and not simulator():
        return [f"{impl} runs on CUDA arrays, got NumPy arrays: use cupy.asarray, or impl='auto'"]
    if impl in ("sm90", "simt") and not on_host and simulator():
        return [_HOST_ARRAYS]
    return []


def _why_not_simulator() -> list[str]:
    if not _installed("numba_cuda"):
        return ["numba-cuda is not installed: pip install numba-cuda"]
    if not _installed("greenlet"):
        return ["greenlet, of the simulator, is not installed: pip install 'nbflash[test]'"]
    from nbflash.cuda import simulator as sim

    if sim.installed():
        return []
    return [
        "the simulator's engine is not installed: call nbflash.cuda.simulator.install() before "
        "nbflash's kernels are imported"
    ]


@lru_cache(maxsize=1)
def _why_not_cuda() -> list[str]:
    missing = {"numba_cuda": "numba-cuda", "cupy": "CuPy", "cuda.core": "cuda-core"}
    absent = [name for module, name in missing.items() if not _installed(module)]
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


def _why_not_hopper(device_id: int) -> list[str]:
    if simulator():
        return _why_not_simulator()
    if reasons := _why_not_cuda():
        return reasons
    import cupy

    capability = cupy.cuda.Device(device_id).compute_capability
    if capability != "90":
        return [f"needs compute capability 9.0 (Hopper), this device has {capability}"]
    from nbflash.cuda import ptxas

    if ptxas.find_ptxas() is None:
        return ["ptxas is not installed: pip install nvidia-cuda-nvcc"]
    return []


def _why_not_tensor_maps(problem) -> list[str]:
    """What wgmma and the copy engine ask of dtype, head_dim and memory layout."""
    reasons = []
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16, got {problem.dtype}")
    if problem.head_dim % 8 or problem.head_dim > 256:
        reasons.append(f"needs a head_dim of 8, 16, ... 256, got {problem.head_dim}")
    if problem.alignment < 16 and problem.device == CUDA:
        reasons.append(
            f"needs addresses and strides of q, k and v that are multiples of 16 bytes, got "
            f"{problem.alignment}"
        )
    if any(stride < 0 for three in problem.strides for stride in three):
        reasons.append("needs strides that are not negative: copy the array first")
    return reasons


@lru_cache
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
