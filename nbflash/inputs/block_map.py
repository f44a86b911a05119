"""BlockMap: the blocks of keys that each block of queries attends to, as arrays that may change.

A `masks.Mask` is immutable and hashed by its content; a block map is chosen anew in every layer and
step. Its arrays are read when a call runs: a plan depends on their shapes alone.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

import masks
from masks import _check
from masks.block import BlockSparse
from masks.interval import Interval
from nbflash.definitions.types import Array, Block
from nbflash.inputs.arrays import library, native

_INT32_MAX = 2**31 - 1
_FORM = "(batch or 1, heads or heads_kv or 1, rows, k)"


class BlockMap:
    """Query block ``r`` attends to the key blocks ``indices[b, h, r, :counts[b, h, r]]``.

    Parameters
    ----------
    indices : int array (batch or 1, heads or heads_kv or 1, rows, k)
        Key blocks in any order, in host or CUDA memory. Duplicates count once. A C-contiguous int32
        array is kept and read when a call runs, so that it may be changed in place; any other array
        is copied.
    counts : int array (batch or 1, heads or heads_kv or 1, rows), optional
        Number of entries of each row that count, from the first; all when omitted.
    shape : (int, int)
        ``(seqlen_q, seqlen_k)``; the last blocks may be ragged.
    block : int or (int, int)
        Queries and keys of a block.
    within : masks.Mask, optional
        Pairs that are attended at most: any mask whose rows are intervals of keys (`masks.causal`,
        `window`, `padding`, `documents`, …). ``block_map & mask`` says the same.
    checked : bool
        Check the contents now: an index out of range or a count above ``k`` is an error, and the
        host waits for the device. Otherwise an index out of range is ignored.

    Raises
    ------
    TypeError
        If an array is not one of integers, or ``within`` is no such mask.
    ValueError
        If shapes do not fit each other or, with ``checked``, the contents are wrong.
    """

    __slots__ = ("block", "counts", "indices", "shape", "within")
    __array_ufunc__ = None
    __hash__ = None  # the contents change

    def __init__(
        self,
        indices: Array,
        counts: Array | None = None,
        *,
        shape: tuple[SupportsIndex, SupportsIndex],
        block: Block,
        within: masks.Mask | None = None,
        checked: bool = False,
    ) -> None:
        self.shape, self.block = _pair("shape", shape, 0), _pair("block", block, 1)
        named = {"indices": indices} if counts is None else {"indices": indices, "counts": counts}
        indices, *rest = (
            _integers(name, x) for name, x in zip(named, native(**named), strict=True)
        )
        _check_shape(indices, self.grid_shape[0])
        xp, device = library(indices)
        with device:
            counts = rest[0] if rest else xp.full(indices.shape[:3], indices.shape[3], np.int32)
            if counts.shape != indices.shape[:3]:
                raise ValueError(
                    f"counts must have shape {indices.shape[:3]}, one for each row of indices, got "
                    f"{counts.shape}"
                )
            self.indices = _int32(xp, indices, -1, self.grid_shape[1])
            self.counts = _int32(xp, counts, 0, _INT32_MAX)
        self.within = None
        if within is not None:
            self.within = _check_within(within, self)
        if _check.flag("checked", checked):
            self.check()

    @classmethod
    def from_dense(
        cls,
        keep: Array,
        *,
        shape: tuple[SupportsIndex, SupportsIndex],
        block: Block,
        within: masks.Mask | None = None,
    ) -> BlockMap:
        """From a map of booleans.

        Parameters
        ----------
        keep : bool array (batch or 1, heads or heads_kv or 1, rows, columns)
            Whether a block is attended; read once.
        shape, block, within
            As of `BlockMap`.
        """
        (keep,) = native(keep=keep)
        if keep.ndim != 4 or keep.dtype != bool:
            raise TypeError(
                f"keep must be bool {_FORM.replace('k)', 'columns)')}, got {keep.dtype} of shape "
                f"{keep.shape}"
            )
        columns = -(-_pair("shape", shape, 0)[1] // _pair("block", block, 1)[1])
        if keep.shape[3] != columns:
            raise ValueError(f"keep must have {columns} columns of blocks, got {keep.shape[3]}")
        xp, device = library(keep)
        with device:
            indices = xp.argsort(~keep, axis=3, kind="stable").astype(np.int32)
            counts = keep.sum(axis=3, dtype=np.int32)
        return cls(indices, counts, shape=shape, block=block, within=within)

    @classmethod
    def from_csr(
        cls,
        indptr: Array,
        indices: Array,
        *,
        shape: tuple[SupportsIndex, SupportsIndex],
        block: Block,
        width: SupportsIndex | None = None,
        within: masks.Mask | None = None,
    ) -> BlockMap:
        """From lists of any length: rows ``indices[indptr[r]:indptr[r + 1]]``.

        Parameters
        ----------
        indptr : int array (rows + 1,) or (batch or 1, heads or heads_kv or 1, rows + 1)
            Where each row's entries begin and end, in all of ``indices``.
        indices : int array (entries,)
            Key blocks.
        width : int, optional
            Most entries of a row, ``k`` of the map. When omitted it is counted, and the host waits
            for the device. A longer row is an error where contents are checked.
        shape, block, within
            As of `BlockMap`.
        """
        indptr, indices = native(indptr=indptr, indices=indices)
        indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
        if indptr.ndim == 1:
            indptr = indptr[None, None]
        if indptr.ndim != 3 or indptr.shape[2] < 1 or indices.ndim != 1:
            raise ValueError(
                "indptr must have shape (rows + 1,) or (batch, heads, rows + 1), and indices one "
                f"axis, got {indptr.shape} and {indices.shape}"
            )
        xp, device = library(indices)
        with device:
            counts = indptr[..., 1:] - indptr[..., :-1]
            if width is None:
                width = int(counts.max()) if counts.size else 0
            # NumPy adds uint64 and int64 as float64, which indexes nothing.
            kind = np.uint64 if indptr.dtype == np.uint64 else np.int64
            places = indptr[..., :-1, None] + xp.arange(_check.integer("width", width), dtype=kind)
            places = xp.clip(places, 0, max(indices.size - 1, 0))
            rows = indices[places] if indices.size else xp.full(places.shape, -1, np.int32)
        return cls(rows, counts, shape=shape, block=block, within=within)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))

    @property
    def layout(self) -> tuple:
        """Everything but the contents, for the key of a plan."""
        return self.shape, self.block, self.indices.shape, self.within

    @property
    def width(self) -> int:
        """Most blocks of a row: ``k``."""
        return self.indices.shape[3]

    @property
    def batch(self) -> int | None:
        """Batch elements that it distinguishes, or None."""
        return self.indices.shape[0] if self.indices.shape[0] > 1 else None

    @property
    def heads(self) -> int | None:
        """Heads that it distinguishes, or None: of queries, or of keys and values."""
        return self.indices.shape[1] if self.indices.shape[1] > 1 else None

    def check(self) -> None:
        """Raise ValueError for a count above ``k`` or an index out of range; waits for the device.

        The message says how many entries the longest row needs.
        """
        indices, counts = self._on_host()
        if (needed := counts.max(initial=0)) > self.width:
            at = tuple(map(int, np.argwhere(counts == needed)[0]))
            raise ValueError(
                f"counts[{at}]={needed}: the row needs {needed} entries, and indices has room for "
                f"k={self.width}"
            )
        listed = np.arange(self.width) < counts[..., None]
        bad = listed & ((indices < 0) | (indices >= self.grid_shape[1]))
        if bad.any():
            at = tuple(map(int, np.argwhere(bad)[0]))
            raise ValueError(
                f"indices[{at}] is out of range: there are {self.grid_shape[1]} blocks of keys"
            )

    def dense(self) -> Array:
        """The map as booleans, (batch or 1, heads or heads_kv or 1, rows, columns), in the same
        memory, without ``within``.
        """
        xp, device = library(self.indices)
        columns = self.grid_shape[1]
        with device:
            listed = xp.arange(self.width) < self.counts[..., None]
            column = xp.where(listed & (self.indices >= 0), self.indices, columns)
            column = xp.minimum(column, columns)
            keep = xp.zeros((*self.counts.shape, columns + 1), bool)
            row = xp.arange(self.counts.size).reshape(*self.counts.shape, 1)
            keep.reshape(-1)[row * (columns + 1) + column] = True
            return keep[..., :columns]

    def to_mask(self, heads: int | None = None) -> masks.Mask:
        """The `masks.Mask` of the current contents, within ``within``.

        Parameters
        ----------
        heads : int, optional
            Query heads, a multiple of the map's; as many as the map has when omitted.

        Raises
        ------
        ValueError
            If a count is above ``k``, or the map's heads do not divide ``heads``.

        Notes
        -----
        Arrays in CUDA memory are copied, and the host waits for the device.
        """
        indices, counts = self._on_host()
        if counts.max(initial=0) > self.width:
            self.check()
        own = indices.shape[1]
        heads = own if heads is None else _check.integer("heads", heads, 1)
        if heads % own:
            raise ValueError(f"heads={heads}: must be a multiple of the {own} heads of the map")
        planes = [
            [self._plane(*lists) for lists in zip(*of, strict=True)]
            for of in zip(indices, counts, strict=True)
        ]
        each = [masks.per_head([m for m in row for _ in range(heads // own)]) for row in planes]
        mask = masks.per_batch(each)
        return mask if self.within is None else mask & self.within

    def _plane(self, indices, counts):
        listed = np.arange(self.width) < counts[:, None]
        row, at = np.nonzero(listed & (indices >= 0) & (indices < self.grid_shape[1]))
        return BlockSparse(*self.shape, self.block, row, indices[row, at])

    def _on_host(self):
        if isinstance(self.indices, np.ndarray):
            return self.indices, self.counts
        return self.indices.get(), self.counts.get()

    def __and__(self, mask: masks.Mask) -> BlockMap:
        """The map within a mask whose rows are intervals of keys, of the same arrays."""
        if not isinstance(mask, masks.Mask):
            return NotImplemented
        both = mask if self.within is None else self.within & mask
        return BlockMap(self.indices, self.counts, shape=self.shape, block=self.block, within=both)

    __rand__ = __and__

    def __repr__(self):
        where = "host" if isinstance(self.indices, np.ndarray) else "CUDA"
        within = "" if self.within is None else f", within {self.within!r}"
        return (
            f"<BlockMap {self.shape[0]} x {self.shape[1]}, blocks of {self.block[0]}x"
            f"{self.block[1]}, batch={self.batch}, heads={self.heads}, k={self.width}, in {where} "
            f"memory{within}>"
        )


def as_mask(mask, heads):
    """``mask``, or what a `BlockMap` holds now as a mask of so many query heads."""
    return mask.to_mask(heads) if isinstance(mask, BlockMap) else mask


def _pair(name, value, least):
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value!r}: must be a pair")
    return tuple(_check.integer(name, size, least) for size in pair)


def _integers(name, x):
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} must be of integers, got {x.dtype}")
    return x


def _check_shape(indices, rows):
    if indices.ndim != 4:
        raise ValueError(f"indices must have 4 axes {_FORM}, got shape {indices.shape}")
    if indices.shape[2] != rows:
        raise ValueError(f"indices must have {rows} rows of blocks, got {indices.shape[2]}")
    if not indices.shape[0] or not indices.shape[1]:
        raise ValueError(
            f"indices must have at least one batch element and one head, got {indices.shape}"
        )


def _int32(xp, x, least, most):
    """C-contiguous int32: itself, or a copy with what is beyond at the ends."""
    if x.dtype == np.int32:
        return xp.ascontiguousarray(x)
    return xp.clip(x, *(np.array((least, most)).astype(np.int64))).astype(np.int32)


def _check_within(mask, of):
    if not isinstance(mask, masks.Mask):
        raise TypeError(f"within is {type(mask).__name__}: must be a masks.Mask")
    if mask.shape != of.shape:
        raise ValueError(f"within has shape {mask.shape}: must have {of.shape} like the block map")
    if not all(isinstance(plane, Interval) for plane in mask.planes):
        raise TypeError(
            f"within is {mask!r}: must have an interval of keys in each row, as masks.causal, "
            "window, padding and documents have"
        )
    for axis, own, others in (("batch", of.batch, mask.batch), ("heads", of.heads, mask.heads)):
        if None not in (own, others) and others % own:
            raise ValueError(f"within has {axis}={others}, but the block map has {axis}={own}")
    return mask
