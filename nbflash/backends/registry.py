"""The implementations, and one protocol over them: what a plan prepares and then runs.

An executor has ``schedule`` (a `TileSchedule`, or None), ``two_passes`` as `AttentionPlan` has it,
and two methods on checked arrays,

    forward(q, k, v, out, lse)
    backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic)

which write every element of ``out`` and ``lse``, or of ``dq``, ``dk`` and ``dv``. With dropout both
take ``seed`` after these: two integers, or an array of them in CUDA memory. Where the spec's mask
is a `BlockLayout`, ``lists`` come behind ``seed``: the indices and counts of a block map.

Executors on CUDA devices also have ``bind_forward()``, which returns the bound kernel, and
``bind_backward(deterministic)``: what is bound is compiled side by side when a kernel first runs.

`prepare_score_backward` gives what computes the gradients of a score's arrays: one function,

    score_backward(dout, q, k, v, out, lse, dlse, sums)

which writes every element of the arrays ``sums``, in the order of the score's; with ``seed`` alike.
"""

from __future__ import annotations

from nbflash.backends.cpu import Cpu
from nbflash.backends.reference import EmptyExecutor, Reference
from nbflash.backends.simt import Simt
from nbflash.backends.sm80 import Sm80
from nbflash.backends.sm90 import Sm90
from nbflash.inputs.block_layout import BlockLayout

#: By name, in the order in which "auto" tries those that run where the arrays are.
BACKENDS = {backend.name: backend for backend in (Sm90(), Sm80(), Simt(), Cpu(), Reference())}


def prepare(impl: str, spec, device=None):
    """The executor of ``impl`` for an `AttentionSpec`; ``device`` instead of the spec's."""
    if spec.problem.empty:
        return EmptyExecutor()
    backend = BACKENDS[impl]
    executor = backend.executor(spec) if device is None else backend.executor(spec, device)
    if not isinstance(spec.mask, BlockLayout):
        return executor
    from nbflash.backends.block_plan.host import Guarded

    return Guarded(executor, spec, device)


def prepare_score_backward(impl: str, spec):
    """What writes the gradients of the arrays of the spec's score, for a plan of ``impl``."""
    if spec.problem.empty:
        return EmptyExecutor().score_backward
    return BACKENDS[BACKENDS[impl].score_backward_impl].score_backward(spec)
