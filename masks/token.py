"""Token-exact patterns: dilated windows, attention sinks, vertical-slash, axial, neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from masks import _check
from masks.base import Mask
from masks.block import isin_sorted
from masks.interval import Interval, causal, chunked, ranges, unique_sorted
from masks.interval import window as window_mask
from masks.leaves import Columns, Diagonals
from masks.patterns import toeplitz
from masks.tiles import ABSENT, OPEN


def dilated(
    n: SupportsIndex, width: SupportsIndex, dilation: SupportsIndex, *, causal: bool = False
) -> Mask:
    """Dilated window: `width` keys on either side, `dilation` positions apart (Longformer)."""
    width = _check.integer("width", width)
    dilation = _check.integer("dilation", dilation, 1)
    return toeplitz(n, np.arange(width + 1) * dilation, causal=causal)


def sinks(
    n: SupportsIndex, sink: SupportsIndex, window: SupportsIndex, *, nk: SupportsIndex | None = None
) -> Mask:
    """Attention sinks: causal, the first `sink` keys and the last `window` ones.

    ``j <= p and (j < sink or p - j < window)`` with ``p = i + nk - n``; StreamingLLM (Xiao et al.,
    2023), the A-shape of MInference.
    """
    nq = _check.integer("n", n)
    nk = nq if nk is None else _check.integer("nk", nk)
    sink = min(_check.integer("sink", sink), nk)
    recent = window_mask(nq, nk, left=_check.integer("window", window, 1) - 1, right=0)
    first = Interval(nk, np.zeros(nq, np.int32), np.full(nq, sink)) & causal(nq, nk)
    return recent | first


def vertical_slash(n: SupportsIndex, verticals: ArrayLike, slashes: ArrayLike) -> Mask:
    """Causal, and either key ``j`` in `verticals` or distance ``i - j`` in `slashes` (MInference).

    Parameters
    ----------
    n : int
        Tokens.
    verticals, slashes : sequence of int
        Distinct keys, and distinct distances, all in ``[0, n)``.
    """
    n = _check.integer("n", n)
    keys = _check.integers("verticals", verticals, 0, n - 1)
    offsets = _check.integers("slashes", slashes, 0, n - 1)
    chosen = np.zeros(n, bool)
    chosen[_check.distinct("verticals", keys)] = True
    offsets = _check.distinct("slashes", offsets)
    return (Columns(n, chosen) | Diagonals(n, n, offsets)) & causal(n)


def axial(height: SupportsIndex, width: SupportsIndex, *, causal: bool = False) -> Mask:
    """Axial attention on an image in row order: same row or same column (Ho et al., 2019).

    ``height * width * (height + width - 1)`` cells. Column attention touches every tile row at
    once: `reorder` can make one of the two axes dense in tiles.
    """
    height = _check.integer("height", height, 1)
    width = _check.integer("width", width, 1)
    n = _check.integer("height * width", height * width)
    multiples = np.arange(-(height - 1), height) * width
    mask = chunked(n, width, causal=False) | Diagonals(n, n, multiples)
    return mask & window_mask(n, right=0) if _check.flag("causal", causal) else mask


class Neighborhood(Mask):
    """Product over dimensions of "one of `kernel` keys, `dilation` apart, around the query"."""

    __slots__ = ("dilation", "first", "kernel", "sizes", "stride")
    _fields = ("sizes", "kernel", "stride", "dilation")

    def __init__(self, sizes, kernel, stride, dilation):
        super().__init__(math.prod(sizes), math.prod(sizes))
        self.sizes, self.kernel, self.stride, self.dilation = sizes, kernel, stride, dilation
        self.first = [
            _first_neighbour(*axis) for axis in zip(sizes, kernel, stride, dilation, strict=True)
        ]

    def _parts(self):
        return self.sizes, self.kernel, self.stride, self.dilation

    def _at(self, q, kv):
        inside = np.ones((), bool)
        for x, y, first, k, d in zip(
            _coordinates(q, self.sizes),
            _coordinates(kv, self.sizes),
            self.first,
            self.kernel,
            self.dilation,
            strict=True,
        ):
            distance = y - first[x]
            inside = inside & (distance >= 0) & (distance < k * d)
            if d > 1:
                inside &= distance % d == 0
        return inside

    def _live(self, grid):
        return self._cached(("live", grid.tile_m, grid.tile_n), lambda: self._make_live(grid))

    def _make_live(self, grid):
        """Key runs along the last dimension of every (tile row, image line) segment."""
        *lead, last = self.sizes
        starts = np.union1d(np.arange(0, grid.nq, grid.tile_m), np.arange(0, grid.nq, last)).astype(
            np.int64
        )
        first = np.tile(self.first[-1], grid.nq // last)
        low = np.minimum.reduceat(first, starts)
        high = np.maximum.reduceat(first, starts) + (self.kernel[-1] - 1) * self.dilation[-1]
        line = np.zeros((starts.size, 1), np.int64)
        for axis, x in enumerate(np.unravel_index(starts // last, lead) if lead else ()):
            key = self.first[axis][x][:, None] + np.arange(self.kernel[axis]) * self.dilation[axis]
            line = (line[:, :, None] * self.sizes[axis] + key[:, None, :]).reshape(starts.size, -1)
        begin = (line * last + low[:, None]) // grid.tile_n
        length = (line * last + high[:, None]) // grid.tile_n - begin + 1
        row = starts[:, None] // grid.tile_m * grid.n_col
        return unique_sorted(ranges((row + begin).ravel(), length.ravel()))

    def _state(self, grid, rows, cols):
        live = isin_sorted(self._live(grid), rows * grid.n_col + cols)
        return np.where(live, OPEN, ABSENT).astype(np.int8)


def _coordinates(place, sizes):
    """Of tokens along each dimension; `numpy.unravel_index` errs for columns beyond 8192."""
    found = []
    for size in sizes[:0:-1]:
        place, own = np.divmod(place, size)
        found.append(own)
    return [place, *reversed(found)]


def _first_neighbour(size, kernel, stride, dilation):
    """Smallest coordinate that each coordinate of one dimension attends to."""
    x = np.arange(size)
    group, position = x % dilation, x // dilation
    length = -(-(size - group) // dilation)
    leader = np.minimum(position // stride * stride + stride // 2, length - 1)
    before, after = kernel // 2, kernel // 2 + kernel % 2 - 1
    centre = np.minimum(np.maximum(leader, before), length - 1 - after)
    return (centre - before) * dilation + group


def neighborhood(
    shape: SupportsIndex | Sequence[SupportsIndex],
    kernel: SupportsIndex | Sequence[SupportsIndex],
    stride: SupportsIndex | Sequence[SupportsIndex] = 1,
    dilation: SupportsIndex | Sequence[SupportsIndex] = 1,
) -> Mask:
    """Neighbourhood attention in 1 to 3 dimensions: exactly ``prod(kernel)`` keys per query.

    Parameters
    ----------
    shape : int or tuple of int
        Extents of the token grid in row-major order, 1-D to 3-D.
    kernel, stride, dilation : int or tuple of int
        Per dimension. The window is shifted, not cut, at the edges, so ``kernel * dilation`` may
        not exceed the extent; queries of one group of `stride` share a window (``1 <= stride <=
        kernel``).

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", 2022; "Generalized Neighborhood
    Attention", 2025, definition 1.
    """
    shape = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"shape={tuple(shape)}: must have 1 to 3 dimensions")
    sizes = tuple(_check.integer(f"shape[{i}]", n, 1) for i, n in enumerate(shape))
    dilation = _per_axis("dilation", dilation, sizes)
    kernel = _per_axis("kernel", kernel, sizes)
    stride = _per_axis("stride", stride, sizes)
    for i, (n, k, s, d) in enumerate(zip(sizes, kernel, stride, dilation, strict=True)):
        if k * d > n:
            raise ValueError(
                f"kernel[{i}]={k}: kernel * dilation = {k * d} must not exceed shape[{i}]={n}"
            )
        if s > k:
            raise ValueError(f"stride[{i}]={s}: must not exceed kernel[{i}]={k}")
    _check.integer("prod(shape)", math.prod(sizes))
    if len(sizes) == 1 and dilation == (1,):
        first = _first_neighbour(sizes[0], kernel[0], stride[0], 1)
        return Interval(sizes[0], first, first + kernel[0])
    return Neighborhood(sizes, kernel, stride, dilation)


def _per_axis(name, value, sizes):
    values = value if isinstance(value, (tuple, list)) else (value,) * len(sizes)
    if len(values) != len(sizes):
        raise ValueError(f"{name}={tuple(values)}: must have {len(sizes)} entries like shape")
    return tuple(_check.integer(f"{name}[{i}]", v, 1) for i, v in enumerate(values))
