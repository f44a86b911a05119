"""The array library that an experiment runs on: NumPy on the CPU or CuPy on a CUDA device."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from experiments.harness.errors import BadInput
from experiments.harness.timing import CudaEvents, WallClock


@dataclass(frozen=True)
class Backend:
    """Where arrays live and how a call on them is timed."""

    device: str
    xp: ModuleType
    clock: WallClock | CudaEvents

    def array(self, x):
        """A copy of the NumPy array ``x`` on the device."""
        return self.xp.array(x)

    def numpy(self, x):
        """``x`` in host memory."""
        return x if isinstance(x, np.ndarray) else x.get()


def open_backend(device):
    """The backend for ``device``: ``"cpu"``, ``"cuda"`` or ``"auto"`` (CUDA where there is one)."""
    reason = "" if device == "cpu" else _no_cuda()
    if device == "cuda" and reason:
        raise BadInput(f"no CUDA device: {reason}")
    if device == "cpu" or reason:
        return Backend("cpu", np, WallClock())
    import cupy

    return Backend("cuda", cupy, CudaEvents())


def _no_cuda():
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'nbflash[cuda13]' or 'nbflash[cuda12]')"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "none is visible"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)


def parse_dtype(name):
    """NumPy dtype of one of ``nbflash.inputs.problem.DTYPES``, or of a quantised cache."""
    if name not in ("bfloat16", "float8_e4m3fn"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise BadInput(f"--dtype {name} needs ml_dtypes (pip install ml_dtypes)") from None
    return np.dtype(getattr(ml_dtypes, name))
