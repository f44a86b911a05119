"""NumPy arrays: Numba over the same `TileSchedule` as the GPU kernels."""

from __future__ import annotations

from nbflash.backends.base import Backend
from nbflash.cuda import availability
from nbflash.inputs.arrays import CPU


class Cpu(Backend):
    """Every problem in host memory."""

    name, memory, dropout_block = "cpu", CPU, 32

    def why_not_here(self, device_id: int = 0) -> list[str]:
        if availability.installed("numba"):
            return []
        return ["numba is not installed: pip install numba"]

    def why_not_decode(self, problem, mask, q, cache) -> list[str]:
        return []

    def executor(self, spec):
        from nbflash.backends.cpu.executor import CpuExecutor

        return CpuExecutor(spec)

    def score_backward(self, spec):
        return self.executor(spec).score_backward

    def decoder(self, problem, mask):
        from nbflash.backends.cpu.decode_host import CpuDecoder

        return CpuDecoder(problem, mask)
