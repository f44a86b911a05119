"""Hopper: kernels of wgmma, TMA and mbarriers, and what binds them."""

from __future__ import annotations

from nbflash.backends.base import Backend
from nbflash.cuda import availability
from nbflash.inputs.arrays import CUDA

# 15 bits are compared as float16, in which larger thresholds would be NaN.
_MOST_DROPOUT = 0x7C00 / 2**15


class Sm90(Backend):
    """Half precision on devices of compute capability 9.0.

    What there is to write of the gradients of a score's arrays may be as large as the scores: no
    kernel of its own computes them.
    """

    name, score_backward_impl = "sm90", "simt"

    def why_not_here(self, device_id: int = 0) -> list[str]:
        if reasons := availability.why_not_kernels():
            return reasons
        if availability.simulator():
            return []
        if reasons := self.why_not_capability(availability.capability(device_id)):
            return reasons
        return availability.why_not_ptxas()

    def why_not_capability(self, capability) -> list[str]:
        if capability == (9, 0):
            return []
        return ["needs compute capability 9.0 (Hopper), this device has {}.{}".format(*capability)]

    def why_not(self, spec) -> list[str]:
        """What wgmma and TMA ask of dtype, head_dim and memory layout."""
        problem, reasons = spec.problem, []
        if spec.dropout > _MOST_DROPOUT:
            reasons.append(f"sm90 takes a dropout of at most {_MOST_DROPOUT}, got {spec.dropout}")
        if problem.dtype not in ("float16", "bfloat16"):
            reasons.append(f"needs float16 or bfloat16, got {problem.dtype}")
        if problem.head_dim % 8 or problem.head_dim > 256:
            reasons.append(f"needs a head_dim of 8, 16, ... 256, got {problem.head_dim}")
        if problem.alignment < 16 and problem.device == CUDA:
            reasons.append(
                f"needs addresses and strides of q, k and v that are multiples of 16 bytes, got "
                f"{problem.alignment}"
            )
        if any(stride < 0 for three in problem.strides for stride in three):
            reasons.append("needs strides that are not negative: copy the array first")
        return reasons

    def why_not_decode(self, problem, mask, q, cache) -> list[str]:
        from nbflash.backends.sm90.decode import host

        return host.why_not(problem, mask, q, cache)

    def faster_decode(self, problem, mask) -> str | None:
        """Where memory bounds it: few rows, and nothing to convert (notes/sm80.md)."""
        from nbflash.backends.split_kv.splits import heads_together

        rows = problem.nq * heads_together(problem, mask)
        return "sm80" if rows <= 16 and problem.cache_dtype == problem.dtype else None

    def executor(self, spec, device=None):
        from nbflash.backends.sm90.executor import Sm90Executor

        return Sm90Executor(spec, device=device)

    def decode_partial(self, device, problem, mask, q, cache):
        from nbflash.backends.sm90.decode.host import Sm90Partial

        return Sm90Partial(device, problem, mask, q, cache)
