"""Runs of the SIMT kernels in the simulator with tiles of a few rows, and their yardsticks."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import ml_dtypes
import numpy as np

from nbflash import reference, testing
from nbflash.backends.simt.configs import SimtBackwardConfig, SimtConfig
from nbflash.backends.simt.executor import SimtExecutor
from nbflash.inputs import arrays
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
RESULTS = ("out", "lse", "dq", "dk", "dv")
# The budgets of FlashAttention-2's own tests, in units of the plain computation's error: a
# gradient goes through one more product and one more rounded operand than the output.
FACTORS = (2, 2, 3, 3, 3)


@dataclass(frozen=True)
class Geometry:
    """A tiny configuration of all kernels of a problem, and the form of its backward pass."""

    tx: int = 2
    ty: int = 2
    rm: int = 4
    rn: int = 4
    vectors: bool = False
    p_over_k: bool = False
    chunks: int = 1
    unroll: int = 4
    deterministic: bool = False
    vector_red: bool = False
    send_v: bool = False

    def __str__(self):
        words = [f"{self.tx}x{self.ty}x{self.rm}x{self.rn}"]
        words += [
            name
            for name in ("vectors", "p_over_k", "deterministic", "vector_red", "send_v")
            if getattr(self, name)
        ]
        return "-".join(words)

    @property
    def tile(self):
        return self.ty * self.rm, self.tx * self.rn

    def fitted(self, dtype, head_dim):
        """Without what this dtype and head_dim do not allow."""
        whole = head_dim % 4 == 0
        blocks = (
            min(self.tile) * -(-head_dim // (8 * self.tx)) // (4 * self.ty)
        )  # 4 × 4, per thread
        return replace(
            self,
            vectors=self.vectors and whole,
            chunks=min(self.chunks, blocks) if self.vectors else self.chunks,
            vector_red=self.vector_red and whole and dtype != "float64",
            send_v=self.send_v
            and self.vectors
            and dtype == "float32"
            and head_dim % (4 * self.tx) == 0,
        )

    def base(self, problem):
        """The fields of a configuration that forward and backward share."""
        names = ("tx", "ty", "rm", "rn", "vectors", "p_over_k", "chunks", "unroll")
        own = {name: getattr(self, name) for name in names}
        return {"dtype": problem.dtype, "head_dim": problem.head_dim, **own}

    def backward(self, problem):
        """What takes the place of the backward table."""

        def configs(deterministic, vectors):
            columns = SimtBackwardConfig(**self.base(problem))
            if deterministic:
                return replace(columns, walk="rows"), columns
            return (replace(columns, atomic_dq=True, vector_red=self.vector_red),)

        return configs

    def executor(self, q, k, v, mask, scale=None, **how):
        return self.executor_of(AttentionSpec(check_forward(q, k, v, scale), mask, **how))

    def executor_of(self, spec):
        forward = SimtConfig(**self.base(spec.problem), send_v=self.send_v)
        return SimtExecutor(spec, config=forward, backward=self.backward(spec.problem))


def with_alignment():
    """A context in which vectors are read where memory allows it, as on a GPU."""
    return patch.object(arrays, "alignment", arrays.alignment_in_memory)


def run(geometry, mask, q, k, v, dout, *, scale=None, outputs=None, seed=None, **how):
    """``(out, lse, dq, dk, dv)`` on poisoned outputs, or on those given.

    ``how`` are arguments of the executor.
    """
    geometry = geometry.fitted(q.dtype.name, q.shape[-1])
    executor = geometry.executor(q, k, v, mask, scale, **how)
    out, dq, dk, dv = outputs or [testing.poisoned(x.shape, x.dtype) for x in (q, q, k, v)]
    wide = np.float64 if q.dtype == np.float64 else np.float32
    lse = testing.poisoned((q.shape[0], q.shape[2], q.shape[1]), wide)
    executor.forward(q, k, v, out, lse, seed)
    none = np.zeros_like(lse)
    gradients = dq, dk, dv
    executor.backward(dout, q, k, v, out, lse, none, *gradients, geometry.deterministic, seed)
    return out, lse, dq, dk, dv


def expected(mask, q, k, v, dout, scale=None, **how):
    """The float64 reference and the plain computation in q's dtype, of the same five results."""
    ref = reference.attention(q, k, v, mask, scale, **how)
    ref += reference.attention_backward(dout, q, k, v, mask, scale, **how)
    low = testing.low_precision(q, k, v, mask, scale, **how)
    low += testing.low_precision_backward(dout, q, k, v, mask, scale, **how)
    return ref, low


def assert_close(got, ref, low):
    """Hold the five results to their budgets."""
    for name, factor, *values in zip(RESULTS, FACTORS, got, ref, low, strict=True):
        testing.assert_within_reference(*values, name=name, factor=factor)


def check(geometry, mask, q, k, v, dout, *, scale=None, **how):
    """Run and compare; returns the five results."""
    got = run(geometry, mask, q, k, v, dout, scale=scale, **how)
    assert_close(got, *expected(mask, q, k, v, dout, scale, **how))
    return got


def bits(results):
    """The results as bytes, to compare bit for bit."""
    return [x.tobytes() for x in results]
