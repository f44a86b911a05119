"""Attention of JAX arrays, on the CPU and on CUDA devices, with gradients.

    from nbflash.jax import attention

    loss = jax.jit(lambda q, k, v: attention(q, k, v, mask).sum())
    jax.grad(loss, (0, 1, 2))(q, k, v)

The kernels run in callbacks of XLA, on its buffers and its stream: nothing is copied, and what they
allocate comes from a buffer of XLA's. Importing this imports JAX; nothing else in nbflash does.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

import masks
from nbflash.cuda.streams import external_stream
from nbflash.definitions.types import Scale, Seed, Window
from nbflash.inputs.arrays import native
from nbflash.inputs.block_map import BlockMap, as_mask
from nbflash.inputs.dropout import check_dropout, check_seed
from nbflash.inputs.problem import check_flag, check_forward, check_mask, wide_dtype
from nbflash.planning.dispatch import check_impl
from nbflash.planning.plan import lookup
from nbflash.scores import Score, check_score

__all__ = ["attention"]

_HOST = 1  # DLPack's kDLCPU
_WORD = 1 << 32
_ALIGNMENT = 512  # bytes
_TILE = 256  # rows, at most, that kernels round sequences up to


class _Call(NamedTuple):
    """The arguments that are no arrays; a constant of what is traced."""

    mask: Any
    causal: bool
    window: Any
    scale: float | None
    score: Any
    dropout: float
    deterministic: bool
    impl: str

    def plan(self, q, k, v):
        of_problem = self.mask, self.causal, self.window, self.scale, self.impl
        return lookup(q, k, v, *of_problem, self.score, self.dropout)


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    impl: str = ...,
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    impl: str = ...,
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: masks.Mask | BlockMap | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`nbflash.attention` of JAX arrays: under `jit`, `grad`, `remat`, `vmap` and `shard_map`.

    Parameters
    ----------
    q : jax.Array (batch, seqlen_q, heads, head_dim)
        float16, bfloat16, float32 or, where JAX has it enabled, float64.
    k, v : jax.Array (batch, seqlen_k, heads_kv, head_dim)
    mask, causal, window, scale, score, dropout, impl
        As in `nbflash.attention`; constants. A score's arrays have no gradients here.
    seed : int, (int, int), key of `jax.random`, or uint32 array (4,)
        Needed with dropout. An array holds seed and offset, the low word of each first; a key is
        the seed, and so are the two words of `jax.random.PRNGKey`. Traced, it changes without
        another compilation.
    return_lse : bool
        Also return the log-sum-exp; gradients flow through both.
    deterministic : bool
        Gradients are bitwise reproducible.

    Returns
    -------
    out : jax.Array like q
    lse : jax.Array (batch, heads, seqlen_q), only with ``return_lse=True``
        float32, or float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right, when the call is traced. An ``impl``
        that the device does not run is an error of XLA's when the call runs.

    Notes
    -----
    `vmap` joins its axis with the batch; with dropout, a score or a mask of several batch entries,
    which count batch entries, it calls one after the other. No second and no forward derivatives.
    """
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    q, k, v = map(jnp.asarray, (q, k, v))
    mask = as_mask(mask, q.shape[2] if q.ndim == 4 else None)
    call = _Call(mask, causal, window, scale, score, dropout, deterministic, impl)
    _check(call, q, k, v)
    out, lse = _attention(call, *_varying(q, k, v, _words(seed, dropout)))
    return (out, lse) if return_lse else out


def _check(call, q, k, v):
    """What arrays of these shapes are refused for, before anything is compiled."""
    check_impl(call.impl)
    problem = check_forward(*(np.empty(x.shape, x.dtype) for x in (q, k, v)), call.scale)
    check_score(call.score, problem)
    check_mask(call.mask, problem, call.causal, call.window)
    check_dropout(call.dropout)


def _words(seed, dropout):
    """Seed and offset as four words; zeros that nobody reads where there is no dropout."""
    if seed is None and not dropout:
        return jnp.zeros(4, jnp.uint32)
    if isinstance(seed, jax.Array) or (isinstance(seed, np.ndarray) and seed.dtype == np.uint32):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)[..., ::-1]
        elif seed.shape == (2,):  # a key of jax.random.PRNGKey
            seed = seed[::-1]
        if seed.dtype != jnp.uint32 or seed.shape not in ((2,), (4,)):
            raise TypeError(
                f"seed must be a key or a uint32 array (4,), got {seed.dtype}{seed.shape}"
            )
        return jnp.concatenate([seed, jnp.zeros(4 - seed.size, jnp.uint32)])
    pair = check_seed(seed, None)
    return jnp.array([word for x in pair for word in (x % _WORD, x // _WORD)], jnp.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, q, k, v, seed):
    return _forward(call, q, k, v, seed)


def _with_residuals(call, q, k, v, seed):
    if call.score is not None:
        call.score.check_gradient()
    out, lse = _forward(call, q, k, v, seed)
    return (out, lse), (q, k, v, out, lse, seed)


def _gradients(call, residuals, cotangents):
    (q, k, v, out, lse, seed), (dout, dlse) = residuals, cotangents
    gradients = _backward(call, dout, q, k, v, out, lse, dlse, seed)
    return *gradients, np.zeros(seed.shape, jax.dtypes.float0)


_attention.defvjp(_with_residuals, _gradients)


def _foldable(run):
    """``run(call, *arrays, seed)`` under `vmap`: its axis joins the batch axis, or is looped over.

    Arrays have the batch axis first, and so have the results.
    """

    @functools.wraps(run)
    def batched(call, *given):
        mapped = custom_vmap(functools.partial(run, call))

        @mapped.def_vmap
        def rule(size, is_batched, *given):
            if not size:
                shapes = (x.shape[batched:] for x, batched in zip(given, is_batched, strict=True))
                one = map(jax.ShapeDtypeStruct, shapes, (x.dtype for x in given))
                results = jax.eval_shape(functools.partial(run, call), *one)
                none = tuple(jnp.zeros((0, *x.shape), x.dtype) for x in results)
                return none, (True,) * len(none)
            *arrays, seed = (
                x if batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, batched in zip(given, is_batched, strict=True)
            )
            counts_batch = getattr(call.mask, "batch", None) is not None
            if call.dropout or call.score is not None or counts_batch:
                results = jax.lax.map(lambda each: again(call, *each), (*arrays, seed))
            else:
                arrays = (x.reshape(size * x.shape[1], *x.shape[2:]) for x in arrays)
                joined = again(call, *arrays, seed[0])
                results = tuple(x.reshape(size, len(x) // size, *x.shape[1:]) for x in joined)
            return results, (True,) * len(results)

        return mapped(*given)

    again = batched
    return batched


@_foldable
def _forward(call, q, k, v, seed):
    batch, nq, heads, _ = q.shape
    lse = jax.ShapeDtypeStruct((batch, heads, nq), wide_dtype(q.dtype.name))

    def run(context, results, *given):
        with _native(context, given, results) as (arrays, (out, lse)):
            *arrays, seed = arrays
            plan = call.plan(*arrays)
            plan.write_forward(*arrays, out, lse, _state(seed, call.dropout))

    results = jax.ShapeDtypeStruct(q.shape, q.dtype), lse
    return tuple(_called(run, results, q, k, v, seed))


@_foldable
def _backward(call, dout, q, k, v, out, lse, dlse, seed):
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    room = jax.ShapeDtypeStruct((_room(q, k),), jnp.uint8)

    def run(context, results, *given):
        *results, room = results
        with _native(context, given, results, room) as (arrays, gradients):
            dout, q, k, v, out, lse, dlse, seed = arrays
            plan = call.plan(q, k, v)
            arrays = dout, q, k, v, out, lse, dlse, *gradients
            plan.write_backward(*arrays, _state(seed, call.dropout), call.deterministic)

    return tuple(_called(run, (*results, room), dout, q, k, v, out, lse, dlse, seed)[:3])


def _called(run, results, *given):
    """What a callback writes, by its operands."""
    return _varying(*buffer_callback(run, results)(*given), like=given)


def _varying(*arrays, like=()):
    """Within `shard_map`, the arrays as different on each device as any of them and of ``like``."""
    own = [jax.typeof(x).mat.varying for x in arrays]
    axes = frozenset().union(*own, *(jax.typeof(x).mat.varying for x in like))
    missing = [tuple(axes - each) for each in own]
    pairs = zip(arrays, missing, strict=True)
    return [jax.lax.pcast(x, each, to="varying") if each else x for x, each in pairs]


def _room(q, k):
    """Bytes that the backward kernels allocate on a CUDA device, a bound that need not be exact.

    dQ in the precision of sums, and per row a few statistics.
    """
    if jax.default_backend() == "cpu":
        return 0
    (batch, nq, heads, head_dim), word = q.shape, np.dtype(wide_dtype(q.dtype.name)).itemsize
    rows = batch * heads * -(-nq // _TILE) * _TILE
    return word * rows * (-(-head_dim // 64) * 64 + 8) + 8 * _ALIGNMENT


def _state(seed, dropout):
    """What a plan takes as the seed: words in host memory are read, others stay where they are."""
    if not dropout:
        return None
    return seed.view("uint64") if isinstance(seed, np.ndarray) else seed.view("int64")


@contextlib.contextmanager
def _native(context, given, results, room=None):
    """Buffers of XLA as arrays, in a context in which CuPy works on XLA's stream."""
    kind, device = given[0].__dlpack_device__()
    if kind == _HOST:
        yield [np.asarray(x) for x in given], [np.asarray(x) for x in results]
        return
    import cupy

    native(x=cupy.ndarray((0,)))  # from now on arrays of CuPy are recognised
    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device))
        stack.enter_context(external_stream(cupy, device, context.stream))
        if room is not None:
            stack.enter_context(cupy.cuda.using_allocator(_Room(cupy, room, device)))
        arrays = [[_cupy_array(cupy, x, device) for x in each] for each in (given, results)]
        yield arrays


def _address(buffer):
    return buffer.__cuda_array_interface__["data"][0]


def _cupy_array(cupy, buffer, device):
    memory = cupy.cuda.UnownedMemory(_address(buffer), 0, buffer, device)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(buffer.shape, np.dtype(buffer.dtype), start)


class _Room:
    """Allocates from a buffer, one behind the other; what does not fit comes from CuPy's pool."""

    def __init__(self, cupy, buffer, device):
        self._cupy, self._device, self._buffer = cupy, device, buffer
        self._next = _address(buffer)
        self._end = self._next + buffer.shape[0]

    def __call__(self, nbytes):
        start = -(-self._next // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._end:
            return self._cupy.get_default_memory_pool().malloc(nbytes)
        self._next = start + nbytes
        memory = self._cupy.cuda.UnownedMemory(start, nbytes, self._buffer, self._device)
        return self._cupy.cuda.MemoryPointer(memory, 0)
