"""Products of 16-bit arrays with float32 results, by cuBLAS. CuPy's matmul rounds them to 16 bits.

A CUDA graph cannot record them: CuPy refuses calls of cuBLAS meanwhile.
"""

import numpy as np

_COMPUTE_32F, _DEFAULT_TENSOR_OP = 68, 99  # of cublasComputeType_t and cublasGemmAlgo_t
_CUDA_TYPE = {"float16": 2, "bfloat16": 14, "float32": 0}  # of cudaDataType_t


def products(q, k):
    """``q kᵀ`` of every query head with its K/V head, summed in float32.

    Parameters
    ----------
    q : cupy.ndarray
        float16 or bfloat16 (batch, m, heads, d).
    k : cupy.ndarray
        Of the same dtype (batch, heads_kv, n, d), contiguous.

    Returns
    -------
    cupy.ndarray
        float32 (batch, heads, m, n).
    """
    import cupy
    from cupy.cuda import cublas

    batch, m, heads, d = q.shape
    heads_kv, n = k.shape[1:3]
    group = heads // heads_kv
    _, of_token, of_head, step = (size // q.itemsize for size in q.strides)
    assert k.flags.c_contiguous
    # Rows are of elements that follow each other, and do not overlap.
    if step != 1 or of_token < d or of_head < 0:
        q = cupy.ascontiguousarray(q)
        of_token, of_head = heads * d, d
    out = cupy.empty((batch, heads, m, n), np.float32)
    handle, one, zero = cupy.cuda.device.get_cublas_handle(), np.float32([1]), np.float32([0])
    given = _CUDA_TYPE[q.dtype.name]
    # cuBLAS has columns for rows: (out of a head)ᵀ = k qᵀ. Heads of a group are calls of their own.
    for b, g in np.ndindex(batch, group):
        cublas.gemmStridedBatchedEx(
            handle,
            *(cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, m, d, one.ctypes.data),
            *(k[b].data.ptr, given, d, n * d),
            *(q[b, :, g:].data.ptr, given, of_token, group * of_head),
            zero.ctypes.data,
            *(out[b, g:].data.ptr, _CUDA_TYPE["float32"], n, group * m * n),
            *(heads_kv, _COMPUTE_32F, _DEFAULT_TENSOR_OP),
        )
    return out
