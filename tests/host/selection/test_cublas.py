"""Products of 16-bit arrays: what cuBLAS is asked for, which a stand-in computes by addresses."""

import ctypes
import sys
import types

import numpy as np
import pytest

from nbflash.cuda import cublas

DTYPES = {2: np.float16, 0: np.float32}


class Array(np.ndarray):
    """A NumPy array with the pointer that CuPy's have."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


def matrix(address, kind, rows, step, columns):
    """Columns of ``rows`` elements, ``step`` apart, as cuBLAS reads memory."""
    dtype = np.dtype(DTYPES[kind])
    size = dtype.itemsize * ((columns - 1) * step + rows)
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    strides = dtype.itemsize, dtype.itemsize * step
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), strides)


def gemm(handle, op_a, op_b, m, n, k, alpha, a, a_kind, lda, step_a, *rest):
    """``alpha op(A) B + beta C`` of a batch, by the definition in cuBLAS's manual."""
    b, b_kind, ldb, step_b, beta, c, c_kind, ldc, step_c, count, compute, algorithm = rest
    assert (handle, op_a, op_b) == ("handle", "T", "N")
    assert (compute, algorithm) == (68, 99)  # sums in float32, on tensor cores
    assert min(step_a, step_b, step_c) >= 0
    assert min(lda - k, ldb - k, ldc - m) >= 0
    one, zero = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
    assert zero == 0  # C has not been written
    for i in range(count):
        left = matrix(a + 2 * i * step_a, a_kind, k, lda, m)
        right = matrix(b + 2 * i * step_b, b_kind, k, ldb, n)
        product = left.astype(np.float32).T @ right.astype(np.float32)
        matrix(c + 4 * i * step_c, c_kind, m, ldc, n)[...] = one * product


@pytest.fixture
def cupy(monkeypatch):
    """As much of it as is asked for."""
    library = types.SimpleNamespace(CUBLAS_OP_T="T", CUBLAS_OP_N="N", gemmStridedBatchedEx=gemm)
    made = types.ModuleType("cupy")
    made.empty = lambda shape, dtype: np.full(shape, np.nan, dtype).view(Array)
    made.ascontiguousarray = lambda x: np.ascontiguousarray(x).view(Array)
    made.cuda = types.ModuleType("cupy.cuda")
    made.cuda.cublas = library
    made.cuda.device = types.SimpleNamespace(get_cublas_handle=lambda: "handle")
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made.cuda)


QUERIES = {
    "contiguous": lambda q: q[..., :7].copy(),
    "tokens": lambda q: q[:, 1::2, :, 7:],
    "columns": lambda q: q[..., ::2],
    "backwards": lambda q: q[:, ::-1, :, :7],
    "heads backwards": lambda q: q[:, :, ::-1, :7],
    "heads first": lambda q: q[..., :7].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "one token": lambda q: q[:, 3:4, :, :7],
    "one token for all": lambda q: np.broadcast_to(q[:, :1, :, :7], (2, 9, 6, 7)),
    "one of a batch": lambda q: q[1:, :, :, :7],
}


@pytest.mark.parametrize("heads_kv", [1, 2, 6])
@pytest.mark.parametrize("view", QUERIES.values(), ids=QUERIES)
@pytest.mark.usefixtures("cupy")
def test_products(view, heads_kv):
    rng = np.random.default_rng(heads_kv)
    q = view(rng.integers(-8, 9, (2, 9, 6, 14)).astype(np.float16))
    k = rng.integers(-8, 9, (len(q), heads_kv, 5, 7)).astype(np.float16)
    got = cublas.products(q.view(Array), k.view(Array))
    wide = q.astype(np.float32), k.astype(np.float32).repeat(6 // heads_kv, axis=1)
    assert np.array_equal(got, np.einsum("bmhd,bhnd->bhmn", *wide))
