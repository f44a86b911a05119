"""What an implementation declares of itself, before any of its modules is imported."""

from __future__ import annotations

from nbflash.cuda import availability
from nbflash.definitions.constants import DROPOUT_BLOCK, HALF_PRECISION, VECTOR_BYTES
from nbflash.inputs.arrays import CPU, CUDA

_HOST_ARRAYS = "the CUDA simulator (NUMBA_ENABLE_CUDASIM=1) runs on NumPy arrays, got CUDA arrays"
# 15 bits are compared as float16, in which larger thresholds would be NaN.
_MOST_DROPOUT = 0x7C00 / 2**15


class Backend:
    """One implementation. `why_not`, here and on a call, is the only statement of its limits.

    Attributes
    ----------
    name : str
        The value of ``impl`` that chooses it.
    memory : {"cpu", "cuda"}
        Where the arrays are that it runs on; "cuda" is host memory in the simulator.
    dropout_block : int or None
        Tokens that must lie together in a rank's part of a sequence where there is dropout; None:
        it has no dropout for such a part.
    score_backward_impl : str
        Who computes the gradients of a score's arrays.
    """

    name: str
    memory = CUDA
    dropout_block = DROPOUT_BLOCK

    @property
    def score_backward_impl(self):
        return self.name

    def why_not_here(self, device_id: int = 0) -> list[str]:
        """Reasons why it cannot run anything on this machine, on a CUDA device of it."""
        return availability.why_not_kernels()

    def why_not_capability(self, capability) -> list[str]:
        """Reasons why it has no kernels for devices of a compute capability, ``(9, 0)`` say."""
        return []

    def why_not(self, spec) -> list[str]:
        """Reasons of its own why it cannot run an `AttentionSpec`, on any machine."""
        return []

    def why_not_positions(self, spec) -> list[str]:
        """Reasons in where the tokens of a spec are in a longer sequence."""
        if spec.positions is None or not spec.dropout:
            return []
        if self.dropout_block is None:
            return [f"{self.name} has no dropout for a rank's part of a sequence"]
        if spec.positions.starts(self.dropout_block) is None:
            return [f"dropout needs tiles of a multiple of {self.dropout_block} tokens"]
        return []

    def why_not_decode(self, problem, mask, q, cache) -> list[str]:
        """Reasons of its own why it cannot run a `DecodeProblem` in a layout, on any machine."""
        return [f"decode does not run on {self.name}"]

    def why_not_decode_on(self, problem, capability) -> list[str]:
        """Reasons why it cannot run a `DecodeProblem` on a device of this compute capability."""
        return []

    def faster_decode(self, problem, mask) -> str | None:
        """The name of an implementation that "auto" prefers, if it can run a `DecodeProblem`."""
        return None

    def why_not_memory(self, problem) -> list[str]:
        """Reasons in where the arrays of a problem are."""
        on_host = problem.device == CPU
        if self.memory == CPU and not on_host:
            return [
                f"{self.name} runs on NumPy arrays, got CUDA arrays: use cupy.asnumpy, or "
                "impl='auto'"
            ]
        if self.memory == CUDA and on_host and not availability.simulator():
            return [
                f"{self.name} runs on CUDA arrays, got NumPy arrays: use cupy.asarray, or "
                "impl='auto'"
            ]
        if self.memory == CUDA and not on_host and availability.simulator():
            return [_HOST_ARRAYS]
        return []

    def executor(self, spec, device=None):
        """What runs an `AttentionSpec`: see `nbflash.backends.registry`.

        ``device`` stands in for the CUDA device of the spec: `nbflash.cuda.device.Recording`.
        """
        raise NotImplementedError

    def score_backward(self, spec):
        """What computes the gradients of the arrays of the spec's score."""
        raise NotImplementedError

    def decoder(self, problem, mask):
        """Where ``memory`` is "cpu": what runs `decode` of a `DecodeProblem` and a mask.

        Called with ``q, cache, with_lse`` it returns ``(out, lse)``.
        """
        raise NotImplementedError

    def decode_partial(self, device, problem, mask, q, cache):
        """Where ``memory`` is "cuda": the first kernel of `decode`.

        As `nbflash.planning.decode_plan` runs it.
        """
        raise NotImplementedError


class TensorCores(Backend):
    """Half precision, in rows that are read `VECTOR_BYTES` at a time.

    What there is to write of the gradients of a score's arrays may be as large as the scores: no
    kernel of tensor cores computes them.
    """

    score_backward_impl = "simt"

    def why_not(self, spec) -> list[str]:
        """What the kernels ask of dtype, head_dim and memory layout."""
        problem, reasons = spec.problem, []
        if spec.dropout > _MOST_DROPOUT:
            reasons.append(
                f"{self.name} takes a dropout of at most {_MOST_DROPOUT}, got {spec.dropout}"
            )
        if problem.dtype not in HALF_PRECISION:
            reasons.append(f"needs float16 or bfloat16, got {problem.dtype}")
        if problem.head_dim % 8 or problem.head_dim > 256:
            reasons.append(f"needs a head_dim of 8, 16, ... 256, got {problem.head_dim}")
        if problem.alignment < VECTOR_BYTES and problem.device == CUDA:
            reasons.append(
                "needs addresses and strides of q, k and v that are multiples of "
                f"{VECTOR_BYTES} bytes, got {problem.alignment}"
            )
        return reasons
