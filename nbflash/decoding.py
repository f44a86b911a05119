"""decode: attention of the last few tokens of many sequences over cached keys and values."""

from __future__ import annotations

import functools
from typing import Literal, overload

import numpy as np

import masks
from nbflash.backends.reference import EmptyExecutor
from nbflash.backends.registry import BACKENDS
from nbflash.definitions.quantised import LIMITS, dequantise
from nbflash.definitions.types import Array, ArrayT, Scale
from nbflash.inputs.arrays import CUDA, as_given, device_of
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.block_map import as_mask
from nbflash.inputs.decode_problem import (
    Cache,
    check_contents,
    check_decode,
    check_decode_mask,
    decode_inputs,
)
from nbflash.inputs.problem import check_flag
from nbflash.planning import dispatch


@overload
def decode(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    block_table: Array | None = ...,
    mask: masks.Mask | None = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    scale: Scale = ...,
    return_lse: Literal[False] = ...,
    impl: str = ...,
) -> ArrayT: ...


@overload
def decode(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    block_table: Array | None = ...,
    mask: masks.Mask | None = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    scale: Scale = ...,
    return_lse: Literal[True],
    impl: str = ...,
) -> tuple[ArrayT, Array]: ...


def decode(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    block_table: Array | None = None,
    mask: masks.Mask | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: Scale = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> ArrayT | tuple[ArrayT, Array]:
    """Attention of the last tokens of every sequence to its cached keys and values.

    Parameters
    ----------
    q : array (batch, q_len, heads, head_dim)
        1 to 64 tokens of each sequence, its last ones, whose keys and values are in the cache
        already: token ``i`` stands at position ``lengths[b] - q_len + i``. float16, bfloat16
        (`ml_dtypes`), float32 or float64. NumPy arrays, or CUDA arrays, on the current stream.
    k_cache, v_cache : array (batch, capacity, heads_kv, head_dim)
        With a ``block_table``: (pages, page_size, heads_kv, head_dim). The dtype of ``q``, or int8
        or float8_e4m3fn. ``heads % heads_kv == 0``. What is not read (behind ``lengths``, pages of
        no sequence) may hold anything, NaN included.
    lengths : int32 array (batch,)
        Keys of each sequence, those of ``q`` included; 0 to the capacity. In host memory this and
        ``block_table`` may be integers of any type, and lists.
    block_table : int32 array (batch, pages per sequence), optional
        Pages of each sequence in order; key ``j`` is at ``[block_table[b, j // page_size],
        j % page_size]``. Entries behind the last key are not read. `KVCache.block_table` is one.
    mask : masks.Mask or BlockMap, optional
        Shape (q_len, n), n from the longest of ``lengths`` to the capacity: which keys, counted
        from the first of the sequence, each query attends; plain, per head or per batch. It takes
        the place of the causal rule. Default: token ``i`` attends the keys up to its own position.
        `masks.sinks` and `masks.window` end at key n - 1: sequences of several lengths have one
        each, see the notes.
    k_scale, v_scale : float32 array (heads_kv,), or like the cache without head_dim
        Of an int8 or float8 cache, and only of one: a key is ``k_cache * k_scale``, in float32
        (float64 for float64 queries).
    scale : float, optional
        Default ``head_dim**-0.5``.
    return_lse : bool
    impl : {"auto", "sm90", "simt", "cpu"}
        As of `attention`.

    Returns
    -------
    out : array like q
        A query that attends nothing is 0: all of a sequence of length 0, the first ones where a
        sequence is shorter than ``q_len``.
    lse : array (batch, heads, q_len), only with ``return_lse=True``
        Natural logarithm, -inf for a query that attends nothing; float32, or float64 for float64.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right, before anything is computed. What
        ``lengths`` and ``block_table`` hold is checked in host memory only: in CUDA memory that
        would wait for the device. There lengths count up to the capacity, or to the columns of the
        mask, and pages out of range are the caller's fault.

    Notes
    -----
    A paged cache gives the bits of a contiguous one of its capacity; not on a Hopper GPU if its
    pages are no multiple of 8 tokens, since another kernel takes those. FlashDecoding (Dao, Haziza,
    Massa and Sizov, 2023) and PagedAttention (Kwon et al., 2023, arXiv 2309.06180).

    The first 4 keys and the last 508 of sequences of several ``lengths``, n keys wide::

        def sinks(length):
            def attends(i, j):
                own = length - q_len + i
                return (j <= own) & ((j < 4) | (own - j < 508))

            return masks.from_function(attends, q_len, n)

        mask = masks.per_batch([sinks(length) for length in lengths])

    In a CUDA graph a call reads lengths, pages and caches anew at every replay. The memory of its
    partial results then belongs to the graph, and is not freed; the call must have run before on
    the stream that is captured.
    """
    return_lse = check_flag("return_lse", return_lse)
    arrays = Cache(k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    given = q
    q, cache = decode_inputs(q, arrays)
    mask = as_mask(mask, q.shape[2] if q.ndim == 4 else None)
    if device_of(q)[0] == CUDA or impl not in ("auto", "cpu"):
        out, lse = _cuda().lookup(q, cache, mask, scale, impl)(q, cache, return_lse)
        return as_given(given, (out, lse) if return_lse else out)
    problem = _check_on_host(q, cache, mask, scale, impl)
    out, lse = np.empty(q.shape, q.dtype), np.empty(problem.lse_shape, problem.lse_dtype)
    _write_on_host(problem, q, cache, mask, out, lse)
    return as_given(given, (out, lse) if return_lse else out)


def write_decode(q, cache: Cache, mask, scale, out, lse) -> None:
    """`decode` of native arrays into new ones of the caller's, on the device that is current."""
    q, cache = decode_inputs(q, cache)
    if device_of(q)[0] == CUDA:
        _cuda().lookup(q, cache, mask, scale, "auto").write(q, cache, out, lse)
    else:
        problem = _check_on_host(q, cache, mask, scale, "auto")
        _write_on_host(problem, q, cache, mask, out, lse)


def _check_on_host(q, cache, mask, scale, impl):
    problem = check_decode(q, cache, scale)
    check_decode_mask(mask, problem)
    dispatch.choose_decode(impl, problem, mask, q, cache)
    check_contents(problem, cache, mask)
    return problem


def _write_on_host(problem, q, cache, mask, out, lse):
    executor = functools.cache(functools.partial(_executor, problem))
    for b in range(problem.batch):
        one = slice(b, b + 1)
        k = _keys(problem, cache, cache.k_cache, cache.k_scale, b)
        v = _keys(problem, cache, cache.v_cache, cache.v_scale, b)
        own = _sequence_mask(problem, mask, b, len(k))
        executor(own).forward(q[one], k[None], v[None], out[one], lse[one])


@functools.cache
def _cuda():
    """The module for CUDA arrays, imported when the first ones arrive."""
    from nbflash.planning import decode_plan

    return decode_plan


def _executor(problem, mask):
    """What runs all sequences of one mask: their schedule is made once."""
    spec = AttentionSpec(problem, mask)
    return BACKENDS["cpu"].executor(spec) if mask.shape[1] else EmptyExecutor()


def _keys(problem, cache, stored, scale, b):
    """The keys (or values) of one sequence: (length, heads_kv, head_dim)."""
    x = _rows(stored, cache, b)
    if problem.cache_dtype not in LIMITS:
        return x
    scale = scale if scale.ndim == 1 else _rows(scale, cache, b)
    return dequantise(x, scale, np.dtype(problem.lse_dtype))


def _rows(stored, cache, b):
    """What is stored of the tokens of one sequence: a view, or a copy gathered from its pages."""
    length = cache.lengths[b]
    if cache.block_table is None:
        return stored[b, :length]
    page_size = stored.shape[1]
    pages = cache.block_table[b, : -(-length // page_size)]
    return stored[pages].reshape(-1, *stored.shape[2:])[:length]


def _sequence_mask(problem, mask, b, length):
    """The mask of one sequence over its own keys, plain or per head."""
    if mask is None:
        return masks.causal(problem.nq, length)
    planes = np.broadcast_to(mask.plane_index, (problem.batch, problem.heads))[b]
    used, of_head = np.unique(planes, return_inverse=True)
    own = [masks.restrict(mask.planes[i], kv_idx=np.arange(length)) for i in used]
    return own[0] if len(own) == 1 else masks.per_head([own[i] for i in of_head])
