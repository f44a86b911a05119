"""decode: attention of the last few tokens of many sequences over cached keys and values."""

from __future__ import annotations

from typing import Literal, overload

import masks
from nbflash.definitions.types import Array, ArrayT, Scale, Window
from nbflash.inputs.arrays import as_given
from nbflash.inputs.block_map import BlockMap, as_mask
from nbflash.inputs.decode_problem import Cache, decode_inputs
from nbflash.inputs.problem import check_flag, check_window
from nbflash.inputs.tensors import operators_for
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
    decoder = decode_plan.lookup(q, cache, mask, scale, impl, window, score)
    return decoder(q, cache, with_lse)
