"""A fast, strict engine for Numba's CUDA simulator.

With ``NUMBA_ENABLE_CUDASIM=1`` in the environment, :func:`install` replaces the part of
``numba.cuda`` that device code uses. The same kernel source then runs on a machine without
a GPU, with poisoned memory, checked indices, seeded schedules, warp collectives, race
detection, and reports of deadlocks and of kernels that never end. Needs the package ``greenlet``.
"""

from nbflash.cuda.simulator.errors import (
    BarrierDivergence,
    Deadlock,
    Endless,
    OutOfBounds,
    Race,
    SimError,
)
from nbflash.cuda.simulator.patch import install, installed, options

__all__ = [
    "BarrierDivergence",
    "Deadlock",
    "Endless",
    "OutOfBounds",
    "Race",
    "SimError",
    "install",
    "installed",
    "options",
]
