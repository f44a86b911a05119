"""Which kernels a call needs, without a device: what is compiled ahead, and what wheels carry."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import masks
from nbflash.backends.registry import BACKENDS, prepare
from nbflash.definitions.constants import ITEMSIZE, VECTOR_BYTES
from nbflash.inputs.arrays import CUDA
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.decode_problem import Cache, DecodeProblem
from nbflash.inputs.problem import Problem
from nbflash.planning.dispatch import fastest_decode


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
        alignment=VECTOR_BYTES,  # arrays that come from an allocator have it
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


#: What chooses between kernels of `decode`: tokens of a sequence, query heads of a key head, and
#: tokens of a page. Pages of 64 tokens and more have the kernels of a contiguous cache.
DECODED = tuple(itertools.product((1, 8), (1, 4, 8), (None, 16, 32)))


def decode_problem(
    dtype, head_dim, cache_dtype, nq, group, page_size, *, batch=1, heads_kv=1, capacity=4096
) -> DecodeProblem:
    """A problem on a CUDA device; ``group`` query heads have a key head."""
    return DecodeProblem(
        batch=batch,
        nq=nq,
        heads=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dim,
        capacity=capacity,
        page_size=page_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scale=head_dim**-0.5,
        device=CUDA,
        device_id=0,
    )


def kernels_of_decode(problem, capability) -> list:
    """The `KernelSpec` of the kernels of a `DecodeProblem` without a mask, each once."""
    from nbflash.cuda.device import Recording
    from nbflash.planning.decode_plan import bind_combine

    q, cache = _stand_ins(problem)
    able = [
        backend.name
        for backend in BACKENDS.values()
        if backend.memory == CUDA
        and not backend.why_not_capability(capability)
        and not backend.why_not_decode(problem, None, q, cache)
        and not backend.why_not_decode_on(problem, capability)
    ]
    device = Recording(capability)
    backend = BACKENDS[fastest_decode(able, problem)]
    partial = backend.decode_partial(device, problem, None, q, cache)
    if not partial.counted:
        bind_combine(device, problem, partial.splits)
    return list(device.specs)


class _Dtype(NamedTuple):
    name: str
    itemsize: int


@dataclass(frozen=True)
class _Contiguous:
    """What a C-contiguous array on a device has, but for its elements."""

    shape: tuple
    dtype: _Dtype
    ptr = 0

    @property
    def data(self):
        """What has ``ptr``."""
        return self

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def strides(self):
        """In bytes."""
        return tuple(self.itemsize * math.prod(self.shape[i + 1 :]) for i in range(self.ndim))


def _stand_ins(problem):
    """q and a cache in the layout of a problem."""
    p, table, scales = problem, None, None
    own, integer = _Dtype(p.dtype, ITEMSIZE[p.dtype]), _Dtype("int32", 4)
    pages, stored = (p.batch, p.capacity), own
    if p.page_size is not None:
        entries = p.capacity // p.page_size
        pages, table = (entries, p.page_size), _Contiguous((p.batch, entries), integer)
    if p.cache_dtype != p.dtype:
        stored = _Dtype(p.cache_dtype, 1)
        scales = _Contiguous((*pages, p.heads_kv), _Dtype("float32", 4))
    keys = _Contiguous((*pages, p.heads_kv, p.head_dim), stored)
    q = _Contiguous((p.batch, p.nq, p.heads, p.head_dim), own)
    return q, Cache(keys, keys, _Contiguous((p.batch,), integer), table, scales, scales)


def common_decode_kernels(dtype, head_dim, capability, cache_dtypes=(None,)) -> list:
    """The kernels of `decode` by caches of these dtypes; None: that of the queries.

    How many parts there are depends on a device and a problem, and so does who joins them.
    """
    from nbflash.backends.split_kv.combine import combine_specs

    found = dict.fromkeys(combine_specs(dtype, head_dim))
    for cache_dtype, sizes in itertools.product(cache_dtypes, DECODED):
        problem = decode_problem(dtype, head_dim, cache_dtype or dtype, *sizes)
        found |= dict.fromkeys(kernels_of_decode(problem, capability))
    return list(found)
