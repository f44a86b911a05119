"""Whether there is a simulator in place of a device."""

import os


def simulator() -> bool:
    """Whether Numba runs CUDA kernels in its simulator (NUMBA_ENABLE_CUDASIM=1)."""
    try:
        return int(os.environ.get("NUMBA_ENABLE_CUDASIM") or 0) != 0
    except ValueError:  # which Numba takes for 0
        return False
