"""DecodeProblem: the frozen description of one `decode` call, and every error its caller can meet.

What needs only shapes and dtypes (`check_decode`) comes before what reads lengths, pages and mask
(`check_contents`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nbflash.definitions.constants import MAX_QUERIES
from nbflash.definitions.quantised import LIMITS
from nbflash.inputs.arrays import are_native, device_of, native
from nbflash.inputs.problem import (
    MAX_HEAD_DIM,
    _check_dtype,
    _check_layout,
    _check_like,
    _check_rank,
    check_mask_type,
    check_scale,
    wide_dtype,
)

_INTEGERS = "lengths", "block_table"


class Cache(NamedTuple):
    """The arrays of a call besides q; those that it may lack are None."""

    k_cache: Any
    v_cache: Any
    lengths: Any
    block_table: Any = None
    k_scale: Any = None
    v_scale: Any = None


@dataclass(frozen=True)
class DecodeProblem:
    """Shapes, dtypes, scale and device of a call.

    Attributes
    ----------
    batch, nq, heads, heads_kv, head_dim : int
        Query head ``h`` uses key/value head ``h // (heads // heads_kv)``.
    capacity : int
        Keys that a sequence may have.
    page_size : int or None
        None for a contiguous cache.
    dtype, cache_dtype : str
        Of q, and of the cache.
    scale : float
    device : str
    device_id : int
    window : (int or None, int or None), optional
        Keys to the left and to the right of the position of a query.
    score : nbflash.scores.Score, optional
    """

    batch: int
    nq: int
    heads: int
    heads_kv: int
    head_dim: int
    capacity: int
    page_size: int | None
    dtype: str
    cache_dtype: str
    scale: float
    device: str
    device_id: int
    window: tuple | None = None
    score: Any = None

    @property
    def nk(self) -> int:
        """Keys that a score function may see."""
        return self.capacity

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse."""
        return self.batch, self.heads, self.nq

    @property
    def lse_dtype(self) -> str:
        """The precision of the computation: float64 for float64 queries, else float32."""
        return wide_dtype(self.dtype)

    @property
    def in_positions(self) -> DecodeProblem:
        """What score functions see: ``q_idx``, too, is a position in a sequence."""
        return replace(self, nq=self.capacity)

    def most_keys(self, mask) -> int:
        """The number of keys at which the length of a sequence is cut: all that a mask has columns
        for, at most the capacity.
        """
        return self.capacity if mask is None else min(self.capacity, mask.shape[1])

    def window_within(self, mask) -> tuple[int, int]:
        """How many keys to the left and right of its own position a token attends.

        Without a mask the causal rule holds. An unbounded side becomes the smallest number that
        hides nothing: kernels add positions to it in 32 bits.
        """
        left, right = self.window or (None, None)
        most = 0 if mask is None else self.nq - 1  # the first token is nq − 1 before the last key
        return (
            self.capacity if left is None else min(left, self.capacity),
            most if right is None else min(right, most),
        )

    def __str__(self) -> str:
        paged = "" if self.page_size is None else f" in pages of {self.page_size}"
        return (
            f"q {(self.batch, self.nq, self.heads, self.head_dim)}, {self.dtype}, up to "
            f"{self.capacity} keys{paged} of {self.heads_kv} heads, {self.cache_dtype}, "
            f"scale {self.scale:.4g}, {self.device}"
        )


def decode_inputs(q, cache: Cache):
    """q and the arrays of a cache as native arrays.

    Raises
    ------
    TypeError
        If one is not an array, or in another memory than q.
    ValueError
        If lengths or pages in host memory do not fit int32.
    """
    k_cache, v_cache, lengths, *others = cache
    if not are_native(q, k_cache, v_cache, lengths, *[x for x in others if x is not None]):
        named = {name: x for name, x in cache._asdict().items() if x is not None}
        named |= {name: getattr(cache, name) for name in ("k_cache", "v_cache", "lengths")}
        named |= {name: _listed(name, named[name]) for name in _INTEGERS if name in named}
        q, *arrays = native(q=q, **named)
        cache = cache._replace(**dict(zip(named, arrays, strict=True)))
    if isinstance(q, np.ndarray):
        cache = cache._replace(
            **{name: _as_int32(name, getattr(cache, name)) for name in _INTEGERS}
        )
    return q, cache


def _listed(name, x):
    """A list as an array; int32 if it is empty."""
    if not isinstance(x, (list, tuple)):
        return x
    if any(isinstance(i, bool) for i in x):
        raise TypeError(f"{name} must hold integers, got {x}")
    try:
        x = np.array(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array or a list of integers: {error}") from error
    return x if x.size else x.astype(np.int32)


def _as_int32(name, x):
    """Host integers of any type as int32; anything else as it is."""
    if x is None or x.dtype.kind not in "iu" or x.dtype == np.int32:
        return x
    limits = np.iinfo(np.int32)
    wrong = (x < limits.min) | (x > limits.max)
    if wrong.any():
        raise ValueError(f"{name} must fit int32, got {x[wrong][0]}")
    return x.astype(np.int32)


def check_decode(q, cache: Cache, scale=None, window=None, score=None) -> DecodeProblem:
    """The problem that native arrays and a scale state; reads no array.

    Raises
    ------
    TypeError
        If a dtype is not supported or differs, or ``scale`` is not a real number.
    ValueError
        If a shape, the number of query tokens, the ratio of heads, the layout, the alignment or
        ``scale`` is not usable, or scales do not belong to the dtype of the cache.
    """
    _check_rank("q", q, 4)
    _check_dtype("q", q)
    _check_layout("q", q)
    batch, nq, heads, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q must have head_dim 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if not 1 <= nq <= MAX_QUERIES:
        raise ValueError(
            f"q must have 1 to {MAX_QUERIES} tokens of each sequence, got {nq}, shape {q.shape}; "
            f"nbflash.attention takes more"
        )
    device = device_of(q)
    _check_caches(q, cache, device)
    capacity, page_size = _check_places(cache, batch, device)
    _check_scales(cache, device)
    return DecodeProblem(
        batch=batch,
        nq=nq,
        heads=heads,
        heads_kv=cache.k_cache.shape[2],
        head_dim=head_dim,
        capacity=capacity,
        page_size=page_size,
        dtype=q.dtype.name,
        cache_dtype=cache.k_cache.dtype.name,
        scale=check_scale(scale, q.dtype, head_dim),
        device=device[0],
        device_id=device[1],
        window=window,
        score=score,
    )


def check_contents(problem: DecodeProblem, cache: Cache, mask=None) -> None:
    """What host arrays and a mask hold: lengths, pages that are read, columns of the mask.

    Raises
    ------
    ValueError
        If one is out of range.
    """
    lengths, capacity = cache.lengths, problem.capacity
    longest = lengths.max(initial=0)
    if longest > capacity or lengths.min(initial=0) < 0:
        b = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise ValueError(f"lengths must be 0 to the capacity {capacity}, got {lengths[b]} at {b}")
    if cache.block_table is not None:
        _check_pages(cache)
    if mask is not None and mask.shape[1] < longest:
        raise ValueError(
            f"mask must have a column for every key, at least {longest}, got shape {mask.shape}"
        )


def check_decode_mask(mask, problem: DecodeProblem) -> None:
    """``mask`` is None, or fits the queries, the capacity, the batch and the heads."""
    if mask is None:
        return
    check_mask_type(mask)
    if mask.shape[0] != problem.nq or mask.shape[1] > problem.capacity:
        raise ValueError(
            f"mask must have {problem.nq} rows, one for each query token, and at most "
            f"{problem.capacity} columns, one for each key, got shape {mask.shape}"
        )
    for axis, size in (("batch", problem.batch), ("heads", problem.heads)):
        got = getattr(mask, axis)
        if got not in (None, size):
            raise ValueError(f"mask has {axis}={got}, but q has {axis}={size}")


def _check_caches(q, cache, device):
    k = cache.k_cache
    _check_rank("k_cache", k, 4)
    if k.dtype != q.dtype and k.dtype.name not in LIMITS:
        raise TypeError(
            f"k_cache must have the dtype of q, {q.dtype}, or {' or '.join(LIMITS)}, got {k.dtype}"
        )
    heads, head_dim = q.shape[2:]
    if k.shape[3] != head_dim:
        raise ValueError(f"k_cache must have head_dim={head_dim} like q, got shape {k.shape}")
    if not k.shape[2] or not heads or heads % k.shape[2]:
        raise ValueError(
            f"k_cache must have a number of heads that divides the {heads} heads of q, got "
            f"{k.shape[2]}"
        )
    _check_like("k_cache", k, k.shape, k.dtype, device)
    _check_like("v_cache", cache.v_cache, k.shape, k.dtype, device)


def _check_places(cache, batch, device):
    """Capacity of a sequence and page size (None where contiguous)."""
    _check_like("lengths", cache.lengths, (batch,), np.dtype(np.int32), device)
    (first, size), table = cache.k_cache.shape[:2], cache.block_table
    if table is None:
        if first != batch:
            raise ValueError(
                f"k_cache must have batch={batch} like q, got shape {cache.k_cache.shape}; pages "
                f"need a block_table"
            )
        return size, None
    if size == 0:
        raise ValueError(f"k_cache must have pages of 1 token or more, got {cache.k_cache.shape}")
    _check_rank("block_table", table, 2)
    _check_like("block_table", table, (batch, table.shape[1]), np.dtype(np.int32), device)
    return table.shape[1] * size, size


def _check_scales(cache, device):
    k = cache.k_cache
    for name, x in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if k.dtype.name not in LIMITS:
            if x is not None:
                raise ValueError(f"{name} must be None for a cache of {k.dtype}, got {x.shape}")
        elif x is None:
            raise ValueError(f"{name} must be given for a cache of {k.dtype}, got None")
        else:
            shape = k.shape[2:3] if x.ndim == 1 else k.shape[:3]
            if x.ndim not in (1, 3):
                raise ValueError(
                    f"{name} must have shape (heads_kv,) = {k.shape[2:3]} or {k.shape[:3]}, "
                    f"got {x.shape}"
                )
            _check_like(name, x, shape, np.dtype(np.float32), device)


def _check_pages(cache):
    table, pages = cache.block_table, cache.k_cache.shape[0]
    used = -(-cache.lengths // cache.k_cache.shape[1])
    read = np.arange(table.shape[1]) < used[:, None]
    wrong = read & ((table < 0) | (table >= pages))
    if wrong.any():
        b, i = (int(x) for x in np.unravel_index(np.argmax(wrong), wrong.shape))
        raise ValueError(
            f"block_table must hold pages 0 to {pages - 1} where lengths has tokens, got "
            f"{table[b, i]} at {b, i}, and lengths {cache.lengths[b]}"
        )
