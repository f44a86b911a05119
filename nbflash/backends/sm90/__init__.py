"""Hopper: kernels of wgmma, TMA and mbarriers, and what binds them."""

from __future__ import annotations

from nbflash.backends.base import TensorCores
from nbflash.cuda import availability


class Sm90(TensorCores):
    """Half precision on devices of compute capability 9.0."""

    name = "sm90"

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
        """What TMA asks of strides besides."""
        reasons = super().why_not(spec)
        if any(stride < 0 for three in spec.problem.strides for stride in three):
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
