"""CUDA devices without tensor cores: kernels, configurations, and what binds them."""

from __future__ import annotations

from nbflash.backends.base import Backend


class Simt(Backend):
    """Every problem on every CUDA device."""

    name = "simt"

    def why_not_decode(self, problem, mask, q, cache) -> list[str]:
        return []

    def executor(self, spec, device=None):
        from nbflash.backends.simt.executor import SimtExecutor

        return SimtExecutor(spec, device=device)

    def score_backward(self, spec):
        from nbflash.backends.simt.score_gradient_host import SimtScoreBackward

        return SimtScoreBackward(spec)

    def decode_partial(self, device, problem, mask, q, cache):
        from nbflash.backends.simt.decode_host import SimtPartial

        return SimtPartial(device, problem, mask, q, cache)
