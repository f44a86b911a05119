"""SciPy's BLAS: the addresses of its matrix products, and its thread count.

The kernels run one tile per thread, so a BLAS that starts threads of its own only gets in the way:
with OpenBLAS left at its default two cores were at half speed.
"""

import ctypes
import os
import threading
from contextlib import nullcontext

import numpy as np
import scipy.linalg.cython_blas as cython_blas
from llvmlite.binding import get_host_cpu_features
from numba.extending import get_cython_function_address

_PREFIX = {np.dtype(np.float32): "s", np.dtype(np.float64): "d"}
_THREAD_FUNCTIONS = (
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("bli_thread_set_num_threads", "bli_thread_get_num_threads"),
)
_library = ctypes.CDLL(cython_blas.__file__)


def address(function, dtype):
    """Address of SciPy's Fortran ``function`` ("gemm" or "gemv") for a dtype."""
    name = _PREFIX[np.dtype(dtype)] + function
    return get_cython_function_address("scipy.linalg.cython_blas", name)


def _thread_functions():
    """``(set, get)`` of the BLAS library behind SciPy, or None where it offers none.

    A look-up in a shared library also searches the libraries it is linked with.
    """
    for names in _THREAD_FUNCTIONS:
        if all(hasattr(_library, name) for name in names):
            return tuple(getattr(_library, name) for name in names)
    return None


thread_functions = _thread_functions()


def describe():
    """The BLAS behind SciPy, and what would make it faster: list of str.

    OpenBLAS 0.3.30 does not know every CPU that has AVX-512 and then runs its AVX2 kernels there;
    ``OPENBLAS_CORETYPE`` tells it better, in the environment of the process.
    """
    get_config = getattr(_library, "scipy_openblas_get_config", None)
    if get_config is None:
        return ["not SciPy's own OpenBLAS"]
    get_config.restype = ctypes.c_char_p
    name = get_config().decode()
    advice = "set OPENBLAS_CORETYPE=SkylakeX before starting Python to use this CPU's AVX-512"
    slow = any(core in name.split() for core in ("Haswell", "Zen"))
    return [name, advice] if slow and _has_avx512() else [name]


def _has_avx512():
    features = get_host_cpu_features()
    return all(features.get(f"avx512{part}") for part in ("f", "cd", "bw", "dq", "vl"))


class _OneThread:
    """The callers that need BLAS held to one thread: the first sets it, the last restores it."""

    def __init__(self):
        self._lock, self._callers, self._before = threading.Lock(), 0, 1
        if hasattr(os, "register_at_fork"):
            held, free = self._lock.acquire, self._lock.release
            os.register_at_fork(before=held, after_in_parent=free, after_in_child=self._alone)

    def __enter__(self):
        set_threads, get_threads = thread_functions
        with self._lock:
            if not self._callers:
                self._before = get_threads()
                set_threads(1)
            self._callers += 1

    def __exit__(self, *failure):
        with self._lock:
            self._callers -= 1
            if not self._callers:
                thread_functions[0](self._before)

    def _alone(self):
        """In a forked child: the calls of the parent's other threads do not continue here."""
        if self._callers:
            self._callers = 0
            thread_functions[0](self._before)
        self._lock.release()


_one_thread = nullcontext() if thread_functions is None else _OneThread()


def one_thread():
    """Hold SciPy's BLAS to one thread while any caller is inside; callers run side by side."""
    return _one_thread
