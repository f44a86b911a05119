"""Which kernels a call needs, without a device: what is compiled ahead, and what wheels carry."""

from __future__ import annotations

import masks
from nbflash.backends.registry import BACKENDS, prepare
from nbflash.inputs.arrays import CUDA
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import Problem

ALIGNMENT = 16  # bytes: arrays that come from an allocator have it


def cuda_problem(dtype, head_dim, nq, nk, scale=None) -> Problem:
    """A problem of one head on a CUDA device; the kernels of every one like it are its own."""
    return Problem(
        batch=1,
        nq=nq,
        nk=nk,
        heads=1,
        heads_kv=1,
        head_dim=head_dim,
        dtype=dtype,
        scale=head_dim**-0.5 if scale is None else scale,
        strides=((0, 0, 0, 1),) * 3,
        device=CUDA,
        device_id=0,
        alignment=ALIGNMENT,
    )


def backend_for(spec, capability, impl="auto"):
    """The `Backend` that runs a spec on a device of a compute capability; None if none does."""
    for backend in BACKENDS.values():
        wanted = backend.memory == CUDA and impl in ("auto", backend.name)
        if wanted and not backend.why_not_capability(capability) and not backend.why_not(spec):
            return backend
    return None


def kernels_of(spec, capability, *, impl="auto", passes=("forward", "backward")) -> list:
    """The `KernelSpec` of all kernels that a spec needs, each once.

    Parameters
    ----------
    spec : nbflash.inputs.attention_spec.AttentionSpec
    capability : (int, int)
    impl : {"auto", "sm90", "sm80", "simt"}
    passes : iterable of {"forward", "backward", "deterministic"}
    """
    from nbflash.cuda.device import Recording

    backend = backend_for(spec, capability, impl)
    if backend is None:
        raise ValueError(f"{impl=} has no kernels of compute capability {capability} for {spec}")
    if spec.problem.empty:
        return []
    device = Recording(capability)
    executor = prepare(backend.name, spec, device)
    for which in passes:
        if which == "forward":
            executor.bind_forward()
        else:
            executor.bind_backward(which == "deterministic")
    return list(device.specs)


#: Masks by name, of so many queries and keys.
PATTERNS = {
    "dense": lambda n: masks.dense(n),
    "causal": lambda n: masks.causal(n),
    "window": lambda n: masks.window(n, left=min(255, n - 1), right=0),
    "documents": lambda n: masks.documents([n // 3, n // 3, n - 2 * (n // 3)]),
    "block": lambda n: masks.butterfly(n, 128),
    "small-block": lambda n: masks.butterfly(n, 64),
}
# Tiles' edges, short rows, long ones ragged and whole: between them every kernel of a pattern is
# chosen.
LENGTHS = 64, 100, 128, 192, 512, 576, 1088, 4160, 8100, 8192


def common_kernels(dtype, head_dim, capability, patterns=tuple(PATTERNS), **how) -> list:
    """The kernels of masks by name, as `kernels_of` gives them; ``how``: its other arguments."""
    found = {}
    for pattern in patterns:
        for n in LENGTHS:
            problem = cuda_problem(dtype, head_dim, n, n)
            spec = AttentionSpec(problem, PATTERNS[pattern](n))
            found |= dict.fromkeys(kernels_of(spec, capability, **how))
    return list(found)
