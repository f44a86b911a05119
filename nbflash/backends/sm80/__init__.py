"""Tensor cores of every GPU since compute capability 8.0: kernels of mma, ldmatrix and cp.async."""

from __future__ import annotations

from nbflash.backends.base import TensorCores
from nbflash.cuda import availability


class Sm80(TensorCores):
    """Half precision on devices of compute capability 8.0 and later."""

    name = "sm80"

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
