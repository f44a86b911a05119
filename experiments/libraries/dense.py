"""Dense masked softmax attention as a careful user writes it, on NumPy or CuPy: the baseline.

The layout is the library's best, (batch * heads, seqlen, head_dim) contiguous; score matrices are
allocated once and worked on in place; the forward pass keeps P, so that the backward pass does not
recompute it; the N × N division by the row sums is folded into N × head_dim operands. Key/value
heads are repeated beforehand where the query heads share them.
"""

import numpy as np

CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 2**30}
CPU_LIMIT_BYTES = 4 * 2**30


class DenseBaseline:
    """Dense attention, forward and backward, for one problem.

    Parameters
    ----------
    backend : Backend
    q, k, v, dout : arrays (batch, seqlen, heads, head_dim) on the backend's device
        float16 and bfloat16 are computed in float32 where the library has no such product.
    mask : bool array (seqlen_q, seqlen_k)
    """

    def __init__(self, backend, q, k, v, dout, mask):
        self.xp = xp = backend.xp
        self.shape = q.shape
        self.scale = q.shape[-1] ** -0.5
        group = q.shape[2] // k.shape[2]
        work = _work_dtype(backend, q.dtype)
        self.q, self.dout = (_planes(xp, x, work) for x in (q, dout))
        self.k, self.v = (_planes(xp, xp.repeat(x, group, axis=2), work) for x in (k, v))
        planes, nq, nk = *self.q.shape[:2], self.k.shape[1]
        self.bias = xp.where(mask, work.type(0), work.type(-np.inf)).astype(work, copy=False)
        self.chunk = max(1, CHUNK_BYTES[backend.device] // (nq * nk * work.itemsize))
        self.p = xp.empty((planes, nq, nk), work)
        self.ds = xp.empty((min(self.chunk, planes), nq, nk), work)
        self.total = xp.empty((planes, nq, 1), np.promote_types(work, np.float32))
        self.out = xp.empty_like(self.q)
        self.grads = [xp.empty_like(x) for x in (self.q, self.k, self.v)]

    def forward(self):
        """The output, as a tuple of one; P, unnormalised, and its row sums are kept."""
        xp = self.xp
        for start in range(0, len(self.q), self.chunk):
            c = slice(start, start + self.chunk)
            p = self.p[c]
            xp.matmul(self.q[c] * self.q.dtype.type(self.scale), self.k[c].swapaxes(1, 2), out=p)
            p += self.bias
            m = p.max(axis=-1, keepdims=True)
            m[m == -np.inf] = 0
            p -= m
            xp.exp(p, out=p)
            total = p.sum(axis=-1, keepdims=True, dtype=self.total.dtype)
            total[total == 0] = 1
            self.total[c] = total
            xp.matmul(p, self.v[c], out=self.out[c])
            self.out[c] /= total.astype(p.dtype)
        return (self._public(self.out),)

    def backward(self):
        """dQ, dK, dV from the P that `forward` kept; dK and dV per query head."""
        xp = self.xp
        dq, dk, dv = self.grads
        for start in range(0, len(self.q), self.chunk):
            c = slice(start, start + self.chunk)
            p, k = self.p[c], self.k[c]
            ds = self.ds[: len(p)]
            dout = self.dout[c] / self.total[c].astype(p.dtype)
            delta = (dout * self.out[c]).sum(axis=-1, keepdims=True)
            xp.matmul(p.swapaxes(1, 2), dout, out=dv[c])
            xp.matmul(dout, self.v[c].swapaxes(1, 2), out=ds)
            ds -= delta
            ds *= p
            xp.matmul(ds, k, out=dq[c])
            xp.matmul(ds.swapaxes(1, 2), self.q[c], out=dk[c])
            dq[c] *= p.dtype.type(self.scale)
            dk[c] *= p.dtype.type(self.scale)
        return tuple(map(self._public, self.grads))

    def both(self):
        """`backward` behind `forward`."""
        self.forward()
        return self.backward()

    def _public(self, planes):
        """(batch * heads, seqlen, head_dim) in the public layout."""
        batch, n, heads, head_dim = self.shape
        return planes.reshape(batch, heads, n, head_dim).transpose(0, 2, 1, 3)


def fits_in_memory(backend, shape, dtype):
    """Whether the baseline's score matrices of a (batch, seqlen, heads, head_dim) problem fit."""
    batch, n, heads, _ = shape
    need = batch * heads * n * n * _work_dtype(backend, dtype).itemsize
    if backend.device == "cpu":
        return need <= CPU_LIMIT_BYTES
    free, _ = backend.xp.cuda.runtime.memGetInfo()
    return need <= free // 2


def _work_dtype(backend, dtype):
    """float16 has a matrix product on CUDA alone, bfloat16 in neither library."""
    native = dtype.itemsize >= 4 or (backend.device == "cuda" and dtype == np.float16)
    return np.dtype(dtype) if native else np.dtype(np.float32)


def _planes(xp, x, dtype):
    _, n, _, head_dim = x.shape
    return xp.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(-1, n, head_dim).astype(dtype))
