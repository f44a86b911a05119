"""SciPy's BLAS: the addresses of its matrix products, and its thread count.

The kernels run one tile per thread, so a BLAS that starts threads of its own only gets in the way:
with OpenBLAS left at its default two cores were at half speed.
"""

import ctypes
import threading
from contextlib import contextmanager

import numpy as np
import scipy.linalg.cython_blas as cython_blas
from numba.extending import get_cython_function_address

_GEMM = {np.dtype(np.float32): "sgemm", np.dtype(np.float64): "dgemm"}
_PREFIXES = ("scipy_openblas_", "openblas_", "MKL_", "bli_thread_")
_lock = threading.RLock()


def gemm_address(dtype):
    """Address of the Fortran-interface ``sgemm`` or ``dgemm`` that SciPy is linked with."""
    return get_cython_function_address("scipy.linalg.cython_blas", _GEMM[np.dtype(dtype)])


def _thread_functions():
    """``(set, get)`` of the BLAS library behind SciPy, or None where it offers none.

    A look-up in a shared library also searches the libraries it is linked with.
    """
    library = ctypes.CDLL(cython_blas.__file__)
    for prefix in _PREFIXES:
        names = [f"{prefix}set_num_threads", f"{prefix}get_num_threads"]
        if prefix == "MKL_":
            names = ["MKL_Set_Num_Threads", "MKL_Get_Max_Threads"]
        if all(hasattr(library, name) for name in names):
            return tuple(getattr(library, name) for name in names)
    return None


thread_functions = _thread_functions()


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
