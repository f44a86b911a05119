"""Whether there is a simulator in place of a device."""

import os


def simulator() -> bool:
    """Whether Numba runs CUDA kernels in its simulator (NUMBA_ENABLE_CUDASIM=1)."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
