"""decode: attention of the last few tokens of many sequences over cached keys and values."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np

import masks
from nbflash.definitions.quantised import LIMITS, dequantise
from nbflash.definitions.types import Array, ArrayT, Scale, Window
from nbflash.inputs.arrays import CUDA, as_given, device_of
from nbflash.inputs.block_map import BlockMap, as_mask
from nbflash.inputs.decode_problem import (
    Cache,
    check_contents,
    decode_inputs,
)
from nbflash.inputs.problem import check_flag, check_window
from nbflash.inputs.tensors import operators_for
from nbflash.planning import cache as cache_of_plans
from nbflash.planning import decode_plan, dispatch
from nbflash.scores import Score


@overload
def decode(
    q: ArrayT,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    block_table: Array | None = ...,
    mask: masks.Mask | BlockMap | None = ...,
    window: Window = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    scale: Scale = ...,
    score: Score | None = ...,
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
    mask: masks.Mask | BlockMap | None = ...,
    window: Window = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    scale: Scale = ...,
    score: Score | None = ...,
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
    mask: masks.Mask | BlockMap | None = None,
    window: Window = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: Scale = None,
    score: Score | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> ArrayT | tuple[ArrayT, Array]:
    """Attention of the last tokens of every sequence to its cached keys and values.

    Parameters
    ----------
    q : array (batch, q_len, heads, head_dim)
        1 to 64 tokens of each sequence, its last ones, whose keys and values are in the cache
        already: token ``i`` stands at position ``lengths[b] - q_len + i``. float16, bfloat16
        (``ml_dtypes``), float32 or float64. NumPy arrays, or CUDA arrays, on the current stream.
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
        from the first of the sequence, each query attends; plain, per head or per batch. It
        replaces the default causal mask, by which token ``i`` attends the keys up to its own
        position.
        `masks.sinks` and `masks.window` end at key n - 1: sequences of several lengths have one
        each, see the notes.
    window : (int or None, int or None), optional
        Keys to the left and right of each query's own position, inclusive, as in `attention`;
        joined with ``mask``, or without one with the causal rule, by ``&``. Keys outside are not
        read; on a GPU those of the tile in which the window begins are, and attended by nothing.
        ``block_table`` names the pages before a window, too.
    k_scale, v_scale : float32 array (heads_kv,), or like the cache without head_dim
        Of an int8 or float8 cache, and only of one: a key is ``k_cache * k_scale``, in float32
        (float64 for float64 queries).
    scale : float, optional
        Default ``head_dim**-0.5``.
    score : nbflash.scores.Score, optional
        As in `attention`, of positions: ``q_idx`` of token ``i`` is ``lengths[b] - q_len + i``.
        With one, tokens before the first key of a sequence attend nothing. An array with an axis
        of queries or keys has the capacity's length along it.
    return_lse : bool
    impl : {"auto", "sm90", "sm80", "simt", "cpu"}
        As of `attention`. "sm90" takes no window and no score.

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
    A paged cache gives the bits of a contiguous one of its capacity; not on a GPU with tensor cores
    if its pages are no multiple of 16 tokens, since another kernel may take those. FlashDecoding
    (Dao, Haziza, Massa and Sizov, 2023) and PagedAttention (Kwon et al., 2023, arXiv 2309.06180).

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
    if operators := operators_for(q):
        if impl != "auto":
            raise ValueError(f"impl must be 'auto' within torch.compile, got {impl!r}")
        given = q, k_cache, v_cache, lengths
        how = {"block_table": block_table, "mask": mask, "window": window, "scale": scale}
        how |= {"k_scale": k_scale, "v_scale": v_scale, "score": score, "return_lse": return_lse}
        return operators.decode(*given, **how)
    window = None if window is None else check_window(window)
    arrays = Cache(k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    given = q
    q, cache = decode_inputs(q, arrays)
    mask = as_mask(mask, q.shape[2] if q.ndim == 4 else None)
    out, lse = run_decode(q, cache, mask, scale, window, score, impl, with_lse=return_lse)
    return as_given(given, (out, lse) if return_lse else out)


def why_not_decode(
    impl: str,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    block_table: Array | None = None,
    mask: masks.Mask | BlockMap | None = None,
    window: Window = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: Scale = None,
    score: Score | None = None,
) -> list[str]:
    """Reasons why ``impl`` cannot run this call of `decode` on this machine.

    Parameters
    ----------
    impl : {"auto", "sm90", "sm80", "simt", "cpu", "reference"}
    q, k_cache, v_cache, lengths, block_table, mask, window, k_scale, v_scale, scale, score
        As in `decode`; only shapes and layouts are read.

    Returns
    -------
    list of str
        Empty when it can.

    Raises
    ------
    TypeError, ValueError
        If the arguments are not a valid call of any implementation.
    """
    dispatch.check_impl(impl)
    window = None if window is None else check_window(window)
    arrays = Cache(k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    q, cache = decode_inputs(q, arrays)
    mask = as_mask(mask, q.shape[2] if q.ndim == 4 else None)
    problem = decode_plan.checked(q, cache, mask, scale, window, score)
    return dispatch.why_not_decode(impl, problem, mask, q, cache)


def run_decode(
    q, cache: Cache, mask, scale, window=None, score=None, impl="auto", *, with_lse=True
):
    """``(out, lse)`` of `decode` for native arrays; lse may be None without ``with_lse``."""
    dispatch.check_impl(impl)
    if device_of(q)[0] == CUDA or impl not in ("auto", "cpu"):
        decoder = decode_plan.lookup(q, cache, mask, scale, impl, window, score)
        return decoder(q, cache, with_lse)
    problem = _check_on_host(q, cache, mask, scale, impl, window, score)
    out, lse = np.empty(q.shape, q.dtype), np.empty(problem.lse_shape, problem.lse_dtype)
    _write_on_host(problem, q, cache, mask, out, lse)
    return out, lse


def _check_on_host(q, cache, mask, scale, impl, window=None, score=None):
    call = decode_plan.key_of(q, cache, mask, scale, impl, window, score)
    problem = cache_of_plans.plans.get(call)
    if problem is None:
        problem = decode_plan.checked(q, cache, mask, scale, window, score)
        dispatch.choose_decode(impl, problem, mask, q, cache)
        cache_of_plans.plans.put(call, problem)
    check_contents(problem, cache, mask)
    return problem


def _write_on_host(problem, q, cache, mask, out, lse):
    from nbflash.backends.cpu import decode as cpu

    given = mask, problem.window_within(mask), problem.batch, problem.heads
    cells = _remembered(("cells", *given), lambda: cpu.cells_of(*given))
    score, real = problem.score, np.dtype(problem.lse_dtype).type
    caches = (cache.k_cache, cache.k_scale), (cache.v_cache, cache.v_scale)
    if problem.page_size is None and all(cpu.is_addressable(x, real) for x, _ in caches):
        held, keys = None, cpu.Keys.of_caches(cache.k_cache, cache.v_cache, cache.lengths)
    else:
        held = [
            [cpu.addressable(_keys(problem, cache, *x, b), real) for x in caches]
            for b in range(problem.batch)
        ]
        keys = cpu.Keys.of_sequences(held)
    bound = cpu.ABSENT
    if score is not None:  # of positions: the last query is at the last key
        bound = _remembered(("decode", score, real), lambda: cpu.prepare(score, 1, 1, real))
    cpu.decode(q, keys, problem.heads_kv, out, lse, cells, problem.scale, bound)
    del held  # not before: the kernel knows addresses


def _remembered(key, make):
    """What ``make`` returns, from the cache of plans."""
    found = cache_of_plans.plans.get(key)
    if found is None:
        found = make()
        cache_of_plans.plans.put(key, found)
    return found


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
