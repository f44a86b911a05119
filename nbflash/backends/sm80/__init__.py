"""Tensor cores of every GPU since compute capability 8.0: kernels of mma, ldmatrix and cp.async."""

from __future__ import annotations

from nbflash.backends.base import Backend
from nbflash.cuda import availability
from nbflash.inputs.arrays import CUDA

# 15 bits are compared as float16, in which larger thresholds would be NaN.
_MOST_DROPOUT = 0x7C00 / 2**15


class Sm80(Backend):
    """Half precision on devices of compute capability 8.0 and later."""

    name, score_backward_impl = "sm80", "simt"

    def why_not_here(self, device_id: int = 0) -> list[str]:
        if reasons := availability.why_not_kernels():
            return reasons
        if availability.simulator():
            return []
        return self.why_not_capability(availability.capability(device_id))

    def why_not_capability(self, capability) -> list[str]:
        if capability >= (8, 0):
            return []
        return ["needs compute capability 8.0 or later, this device has {}.{}".format(*capability)]

    def why_not(self, spec) -> list[str]:
        """What mma and cp.async ask of dtype, head_dim and memory layout."""
        problem, reasons = spec.problem, []
        if spec.dropout > _MOST_DROPOUT:
            reasons.append(f"sm80 takes a dropout of at most {_MOST_DROPOUT}, got {spec.dropout}")
        if problem.dtype not in ("float16", "bfloat16"):
            reasons.append(f"needs float16 or bfloat16, got {problem.dtype}")
        if problem.head_dim % 8 or problem.head_dim > 256:
            reasons.append(f"needs a head_dim of 8, 16, ... 256, got {problem.head_dim}")
        if problem.alignment < 16 and problem.device == CUDA:
            reasons.append(
                f"needs addresses and strides of q, k and v that are multiples of 16 bytes, got "
                f"{problem.alignment}"
            )
        return reasons

    def why_not_decode(self, problem, mask, q, cache) -> list[str]:
        from nbflash.backends.sm80.decode import host

        return host.why_not(problem, q, cache)

    def why_not_decode_on(self, problem, capability) -> list[str]:
        from nbflash.backends.sm80.decode import host

        return host.why_not_capability(problem, capability) + availability.why_not_ptxas()

    def executor(self, spec, device=None):
        from nbflash.backends.sm80.executor import Sm80Executor

        return Sm80Executor(spec, device=device)

    def decode_partial(self, device, problem, mask, q, cache):
        from nbflash.backends.sm80.decode.host import Sm80Partial

        return Sm80Partial(device, problem, mask, q, cache)
