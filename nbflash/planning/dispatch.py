"""Which implementation can run what: the dispatcher, its error messages and `show_config` ask here.

Each implementation states its own limits: `nbflash.backends.base.Backend`.
"""

from __future__ import annotations

from nbflash.backends.registry import BACKENDS
from nbflash.cuda import availability
from nbflash.inputs.arrays import CPU, CUDA, device_of

IMPLEMENTATIONS = tuple(BACKENDS)

# What "auto" tries, in this order. "reference" is the specification and is never chosen.
_AUTO = {
    memory: [b.name for b in BACKENDS.values() if b.memory == memory and b.name != "reference"]
    for memory in (CUDA, CPU)
}


def why_not(impl: str, spec) -> list[str]:
    """Reasons why ``impl`` cannot run an `AttentionSpec` on this machine; empty when it can.

    Parameters
    ----------
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
    spec : nbflash.inputs.attention_spec.AttentionSpec

    Raises
    ------
    ValueError, TypeError
        If ``impl`` is not one of these names.
    """

    def reasons_of(backend):
        reasons = backend.why_not_here(spec.problem.device_id)
        reasons = reasons + backend.why_not_memory(spec.problem) + backend.why_not(spec)
        return reasons + backend.why_not_positions(spec)

    return _reasons(impl, spec.problem.device, reasons_of)


def choose(impl: str, spec) -> str:
    """The implementation that runs a spec: ``impl`` itself, or for "auto" the first that can.

    Raises
    ------
    ValueError
        If none can, with every reason. An explicit ``impl`` never falls back.
    """
    if reasons := why_not(impl, spec):
        raise ValueError(f"{impl=} cannot run ({spec.problem}):\n  " + "\n  ".join(reasons))
    if impl != "auto":
        return impl
    return next(name for name in _AUTO[spec.problem.device] if not why_not(name, spec))


def plans_on_device(impl, q, block_map) -> bool:
    """Whether a `BlockMap` is planned where it is, or becomes a mask on the host."""
    kernels = device_of(q)[0] == CUDA or (
        isinstance(impl, str) and impl in BACKENDS and BACKENDS[impl].memory == CUDA
    )
    return kernels and device_of(block_map.indices) == device_of(q)


def _reasons(impl, memory, reasons_of):
    """Those of a backend, or of all that "auto" tries for arrays in ``memory``."""
    check_impl(impl)
    if impl != "auto":
        return reasons_of(BACKENDS[impl])
    reasons = {name: reasons_of(BACKENDS[name]) for name in _AUTO[memory]}
    if not all(reasons.values()):
        return []
    return [f"{name}: {reason}" for name, why in reasons.items() for reason in why]


def check_impl(impl) -> None:
    """Raise unless ``impl`` names an implementation or is "auto"."""
    if not isinstance(impl, str):
        raise TypeError(f"impl must be a string, got {impl!r}")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def why_not_here(impl: str, device_id: int = 0) -> list[str]:
    """Reasons why ``impl`` cannot run anything on this machine, on a CUDA device of it."""
    return BACKENDS[impl].why_not_here(device_id)


def why_not_decode(impl: str, problem, mask=None, q=None, cache=None) -> list[str]:
    """Reasons why ``impl`` cannot run a call of `decode` on this machine; empty when it can.

    Parameters
    ----------
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
    problem : nbflash.inputs.decode_problem.DecodeProblem
    mask : masks.Mask, optional
    q, cache
        Arrays of the call; only their layout is read.
    """

    def reasons_of(backend):
        reasons = backend.why_not_here(problem.device_id) + backend.why_not_memory(problem)
        reasons = reasons or backend.why_not_decode(problem, mask, q, cache)
        if reasons or problem.device != CUDA:
            return reasons
        return backend.why_not_decode_on(problem, availability.capability(problem.device_id))

    return _reasons(impl, problem.device, reasons_of)


def choose_decode(impl: str, problem, mask, q, cache) -> str:
    """The implementation that runs a call of `decode`; ValueError as of `choose`.

    For "auto" the first that can, unless that one knows of a faster one, which can, too.
    """
    if reasons := why_not_decode(impl, problem, mask, q, cache):
        raise ValueError(f"decode: {impl=} cannot run ({problem}):\n  " + "\n  ".join(reasons))
    if impl != "auto":
        return impl
    given = problem, mask, q, cache
    able = [name for name in _AUTO[problem.device] if not why_not_decode(name, *given)]
    return fastest_decode(able, problem, mask)


def fastest_decode(able, problem, mask=None) -> str:
    """What "auto" takes of the implementations that can run a `DecodeProblem`, in their order."""
    faster = BACKENDS[able[0]].faster_decode(problem, mask)
    return faster if faster in able else able[0]
