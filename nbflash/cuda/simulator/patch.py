"""Putting the engine into ``numba.cuda``.

Device names become attributes of the module ``numba.cuda`` itself: they ask the engine
which thread is running, so that kernels, device functions and helpers in any module, under
any import style, see the right one.
"""

import contextlib
import dataclasses
import sys
import types

import numpy as np

from nbflash.cuda.simulator.errors import SimError

_NOTHING = object()
_OF_NUMPY = frozenset({bool, int, float, *np.sctypeDict.values()})


def install(**changes):
    """Replace the thread engine of Numba's CUDA simulator. May be called again.

    Parameters
    ----------
    **changes
        Fields of :class:`.engine.Options`: ``seed``, ``race``,
        ``strict_barrier``, ``poison``.

    Raises
    ------
    SimError
        If the simulator is off, or this numba-cuda is not laid out as expected.
    """
    from numba import cuda
    from numba.cuda.core import config

    if not config.ENABLE_CUDASIM:
        raise SimError(
            "Numba's CUDA simulator is off: set NUMBA_ENABLE_CUDASIM=1 before numba is imported"
        )
    check_layout(cuda)
    from nbflash.cuda.simulator import device, launch, warp

    for name, value in device.DEVICE_NAMES.items():
        setattr(cuda, name, value)
    cuda.jit = launch.jit
    cuda.external_stream = lambda pointer=0: cuda.stream()
    cuda.__class__ = _with_laneid(warp.laneid)
    _forward_stock_kernels(cuda, launch)
    _convert_by_numpy(cuda.types.Number)
    launch.set_settings(dataclasses.replace(launch.settings(), **changes))


def installed():
    """Whether :func:`install` is in force, found out without importing Numba."""
    cuda, launch = (
        sys.modules.get(name) for name in ("numba.cuda", "nbflash.cuda.simulator.launch")
    )
    return cuda is not None and launch is not None and cuda.jit is launch.jit


@contextlib.contextmanager
def options(**changes):
    """Run the launches inside a ``with`` block under other options."""
    from nbflash.cuda.simulator import launch

    before = launch.settings()
    launch.set_settings(dataclasses.replace(before, **changes))
    try:
        yield
    finally:
        launch.set_settings(before)


def check_layout(cuda):
    """Raise SimError unless ``numba.cuda`` has the parts that :func:`install` replaces."""
    missing = [name for name in ("jit", "stream", "FakeCUDAKernel") if not hasattr(cuda, name)]
    support = sys.modules.get("numba.cuda.np.numpy_support")
    if not hasattr(support, "as_dtype"):
        missing.append("np.numpy_support.as_dtype")
    kernel = getattr(cuda, "FakeCUDAKernel", None)
    if kernel is not None and not {"__call__", "__getitem__"} <= set(vars(kernel)):
        missing.append("FakeCUDAKernel.__call__")
    if missing:
        from importlib.metadata import version

        raise SimError(
            f"numba-cuda {version('numba-cuda')} has no {', '.join(missing)} where the simulator "
            "engine expects it: nbflash.cuda.simulator was written for numba-cuda 0.30"
        )


def _with_laneid(read):
    """A module class with ``laneid``, the one device name that is read like a variable."""

    class CudaModule(types.ModuleType):
        laneid = property(lambda self: read())

    return CudaModule


def _forward_stock_kernels(cuda, launch):
    """Kernels that were decorated before :func:`install` run on this engine too."""

    def call(self, *args):
        if self.grid_dim is None:
            return launch.Kernel(self.fn)(*args)
        return launch.launch(self.fn, self.grid_dim, self.block_dim, self.dynshared_size, *args)

    cuda.FakeCUDAKernel.__call__ = call


def _convert_by_numpy(number):
    """``int32(x)`` and its like, in a tenth of the time that Numba takes to find ``np.int32``."""
    if "__call__" in vars(number):
        return
    inherited = number.__call__
    # NumPy's type, one of it in memory, and Numba's type, so that its id stays its own.
    by_id = {}

    def call(self, x=_NOTHING, *others):
        if others or type(x) not in _OF_NUMPY:
            return inherited(self, *(() if x is _NOTHING else (x, *others)))
        try:
            made, cell, _ = by_id[id(self)]
        except KeyError:
            cell = np.zeros(1, self.name)
            made, cell, _ = by_id[id(self)] = type(cell[0]), cell, self
        if type(x) is made:
            return x
        try:
            cell[0] = x
        except (OverflowError, ValueError):  # of NumPy's own numbers the low bits are taken
            return made(x)
        return cell[0]

    number.__call__ = call
