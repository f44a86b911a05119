"""Runs of the mma kernels in the simulator with tiles of a few rows, and their yardsticks."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from simt_runs import assert_close, expected

from nbflash import testing
from nbflash.backends.sm80.config import Sm80BackwardConfig, Sm80Config, passes_of
from nbflash.backends.sm80.executor import Sm80Executor
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Geometry:
    """A tiny configuration of all kernels of a problem, and the form of its backward pass.

    ``width`` is tile_n of the forward, and the rows of a tile that the backward walks.
    """

    warps: int = 1
    m_tiles: int = 1
    width: int = 16
    stages: int = 2
    walk_stages: int = 2
    deterministic: bool = False
    vector_red: bool = False

    def __str__(self):
        words = [f"{self.warps}x{self.m_tiles}x{self.width}", f"{self.stages}and{self.walk_stages}"]
        names = ("deterministic", "vector_red")
        return "-".join([*words, *(name for name in names if getattr(self, name))])

    @property
    def tile(self):
        return 16 * self.m_tiles * self.warps, self.width

    def executor(self, problem, mask, **how):
        return self.executor_of(AttentionSpec(problem, mask, **how))

    def executor_of(self, spec):
        problem = spec.problem
        shape = self.warps, self.m_tiles, self.width

        def backward(deterministic):
            base = Sm80BackwardConfig(problem.dtype, problem.head_dim, *shape, self.walk_stages)
            return passes_of(base, deterministic=deterministic, vector_red=self.vector_red)

        forward = Sm80Config(problem.dtype, problem.head_dim, *shape, self.stages)
        return Sm80Executor(spec, config=forward, backward=backward)


def run(geometry, mask, q, k, v, dout, *, scale=None, seed=None, dlse=None, **how):
    """``(out, lse, dq, dk, dv)`` on poisoned outputs; ``how`` are arguments of the executor."""
    executor = geometry.executor(check_forward(q, k, v, scale), mask, **how)
    out, dq, dk, dv = (testing.poisoned(x.shape, x.dtype) for x in (q, q, k, v))
    lse = testing.poisoned((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    dlse = np.zeros_like(lse) if dlse is None else dlse
    executor.forward(q, k, v, out, lse, seed)
    gradients = dq, dk, dv
    executor.backward(dout, q, k, v, out, lse, dlse, *gradients, geometry.deterministic, seed)
    return out, lse, dq, dk, dv


def check(geometry, mask, q, k, v, dout, *, scale=None, **how):
    """Run and compare; returns the five results."""
    got = run(geometry, mask, q, k, v, dout, scale=scale, **how)
    assert_close(got, *expected(mask, q, k, v, dout, scale, **how))
    return got
