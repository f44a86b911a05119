"""SciPy's BLAS: the addresses of its matrix products, and its thread count.

The kernels run one tile per thread, so a BLAS that starts threads of its own only gets in the way:
with OpenBLAS left at its default two cores were at half speed.
"""

import ctypes
import threading
from contextlib import contextmanager

import numpy as np
import scipy.linalg.cython_blas as cython_blas
from llvmlite.binding import get_host_cpu_features
from numba.extending import get_cython_function_address

_GEMM = {np.dtype(np.float32): "sgemm", np.dtype(np.float64): "dgemm"}
_THREAD_FUNCTIONS = (
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("bli_thread_set_num_threads", "bli_thread_get_num_threads"),
)
_lock = threading.RLock()
_library = ctypes.CDLL(cython_blas.__file__)


def gemm_address(dtype):
    """Address of the Fortran-interface ``sgemm`` or ``dgemm`` that SciPy is linked with."""
    return get_cython_function_address("scipy.linalg.cython_blas", _GEMM[np.dtype(dtype)])


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


@contextmanager
def one_thread():
    """Hold SciPy's BLAS to one thread; one caller at a time, so that restoring is exact."""
    with _lock:
        if thread_functions is None:
            yield
            return
        set_threads, get_threads = thread_functions
        before = get_threads()
        set_threads(1)
        try:
            yield
        finally:
            set_threads(before)
