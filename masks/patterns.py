"""Generators of block-sparse patterns. `n` counts tokens; the last block may be ragged."""

from __future__ import annotations

import math
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from masks import _check
from masks.base import Mask
from masks.block import BlockSparse
from masks.interval import causal as causal_mask
from masks.interval import ranges


def _blocks(n, block):
    n, block = _check.integer("n", n), _check.integer("block", block, 1)
    return n, block, -(-n // block)


def _mask(n, block, rows, cols, causal):
    """Block mask from coordinates; ``causal`` intersects with the token-exact causal mask."""
    mask = BlockSparse(n, n, (block, block), np.concatenate(rows), np.concatenate(cols))
    return mask & causal_mask(n) if _check.flag("causal", causal) else mask


def _band(count, width):
    """Coordinates with ``abs(I - J) <= width``."""
    index = np.arange(count)
    first = np.maximum(index - width, 0)
    length = np.minimum(index + width + 1, count) - first
    return np.repeat(index, length), ranges(first, length)


def butterfly(
    n: SupportsIndex,
    block: SupportsIndex,
    *,
    stages: SupportsIndex | None = None,
    radix: SupportsIndex = 2,
    causal: bool = False,
) -> Mask:
    """Flat block butterfly: ``I == J`` or the base-`radix` digits of I and J differ in one place.

    Only the `stages` lowest digits may differ. For radix 2 this is ``I == J`` or
    ``I xor J in {1, 2, 4, ..., 2**(stages-1)}``, and a number of blocks ``m`` that is a power of
    two gives ``m * (stages + 1)`` blocks, ``m * (1 + stages / 2)`` if causal.

    Any number of blocks is accepted: the pattern of the next power of the radix is *truncated* to
    the blocks that exist (never stretched), so a row of the last incomplete group may have fewer.

    Parameters
    ----------
    n, block : int
        Tokens, and tokens per block.
    stages : int, optional
        Number of low digits; default all of them, ``ceil(log(blocks, radix))``. With fewer the
        graph falls into ``ceil(blocks / radix**stages)`` components.
    radix : int
        Base of the digits, at least 2.
    causal : bool
        Intersect with the token-exact causal mask.

    References
    ----------
    Chen et al., "Pixelated Butterfly", 2021, flat block butterfly; Dao et al., FlashAttention,
    2022, section 3.3.
    """
    n, block, count = _blocks(n, block)
    radix = _check.integer("radix", radix, 2)
    digits = 0
    while radix**digits < count:
        digits += 1
    stages = digits if stages is None else _check.integer("stages", stages)
    index = np.arange(count)
    rows, cols = [index], [index]
    for stage in range(min(stages, digits)):
        stride = radix**stage
        digit = index // stride % radix
        for other in range(radix):
            partner = index + (other - digit) * stride
            kept = (other != digit) & (partner < count)
            rows.append(index[kept])
            cols.append(partner[kept])
    return _mask(n, block, rows, cols, causal)


def local(
    n: SupportsIndex, block: SupportsIndex, width: SupportsIndex = 1, *, causal: bool = False
) -> Mask:
    """Block band ``abs(I - J) <= width``: each block sees `width` neighbours on either side."""
    n, block, count = _blocks(n, block)
    rows, cols = _band(count, _check.integer("width", width))
    return _mask(n, block, [rows], [cols], causal)


def strided(
    n: SupportsIndex,
    block: SupportsIndex,
    stride: SupportsIndex,
    width: SupportsIndex = 1,
    *,
    causal: bool = False,
) -> Mask:
    """Strided pattern of the Sparse Transformer in blocks: a local band and every stride-th block.

    ``abs(I - J) <= width`` or ``(I - J) % stride == 0``. With ``block=1`` this is the token-exact
    A1 | A2 of Child et al. (2019), which fills about ``1 / tile`` of the tiles it touches:
    `reorder` makes it dense in tiles.
    """
    n, block, count = _blocks(n, block)
    stride, width = _check.integer("stride", stride, 1), _check.integer("width", width)
    offset = np.arange(count)
    return toeplitz(n, offset[(offset <= width) | (offset % stride == 0)], block, causal=causal)


def toeplitz(
    n: SupportsIndex, offsets: ArrayLike, block: SupportsIndex = 1, *, causal: bool = False
) -> Mask:
    """Any offset set: block ``(I, J)`` is attended iff ``abs(I - J)`` is in `offsets`."""
    n, block, count = _blocks(n, block)
    offsets = _check.distinct("offsets", _check.integers("offsets", offsets))
    offsets = offsets[offsets < count]
    if block == 1:
        from masks.leaves import Diagonals

        both = np.concatenate([-offsets[offsets > 0][::-1], offsets])
        mask = Diagonals(n, n, both)
        return mask & causal_mask(n) if _check.flag("causal", causal) else mask
    later = ranges(offsets, count - offsets)
    earlier = ranges(np.zeros_like(offsets), count - offsets)
    return _mask(n, block, [later, earlier], [earlier, later], causal)


def fixed(
    n: SupportsIndex,
    block: SupportsIndex,
    stride: SupportsIndex,
    summary: SupportsIndex = 1,
    *,
    causal: bool = False,
) -> Mask:
    """Fixed pattern of the Sparse Transformer: own group of `stride` blocks, and summary columns.

    ``I // stride == J // stride`` or ``J % stride >= stride - summary`` (Child et al., 2019).
    """
    n, block, count = _blocks(n, block)
    stride = _check.integer("stride", stride, 1)
    summary = _check.integer("summary", summary, 0, stride)
    index = np.arange(count)
    first = index // stride * stride
    length = np.minimum(first + stride, count) - first
    column = index[index % stride >= stride - summary]
    rows = [np.repeat(index, length), np.repeat(index, column.size)]
    return _mask(n, block, rows, [ranges(first, length), np.tile(column, count)], causal)


def global_local(
    n: SupportsIndex,
    block: SupportsIndex,
    n_global: SupportsIndex = 1,
    width: SupportsIndex = 1,
    *,
    causal: bool = False,
) -> Mask:
    """Longformer: the first `n_global` blocks see and are seen by all, plus a local band."""
    n, block, count = _blocks(n, block)
    n_global, width = _check.integer("n_global", n_global), _check.integer("width", width)
    band, rim = _band(count, width), _rim(count, np.arange(min(n_global, count)))
    return _mask(n, block, [band[0], rim[0]], [band[1], rim[1]], causal)


def _rim(count, chosen):
    """Coordinates of whole block rows and columns."""
    index = np.arange(count)
    along, across = np.repeat(chosen, count), np.tile(index, chosen.size)
    return np.concatenate([along, across]), np.concatenate([across, along])


def _generator(seed):
    """The random numbers of a seed: an integer, None for others every time, or a Generator."""
    if seed is None or isinstance(seed, np.random.Generator):
        return np.random.default_rng(seed)
    return np.random.default_rng(_check.integer("seed", seed, maximum=math.inf))


def bigbird(
    n: SupportsIndex,
    block: SupportsIndex,
    *,
    n_random: SupportsIndex = 3,
    width: SupportsIndex = 1,
    seed: SupportsIndex | np.random.Generator | None = 0,
    causal: bool = False,
) -> Mask:
    """BigBird (ITC): first and last block global, a local band, and `n_random` blocks per row.

    Random blocks are distinct and lie outside the band and the global columns; a row with fewer
    free blocks takes them all. With ``causal=True`` they are drawn from earlier blocks only.
    ``seed`` is as of `random`. Zaheer et al., 2020.
    """
    n, block, count = _blocks(n, block)
    n_random, width = _check.integer("n_random", n_random), _check.integer("width", width)
    rng, causal = _generator(seed), _check.flag("causal", causal)
    band = _band(count, width)
    rim = _rim(count, np.unique([0, count - 1]) if count else np.arange(0))
    index = np.arange(1, max(count - 1, 1))
    below = np.maximum(index - width - 1, 0)
    above = np.zeros_like(below) if causal else np.maximum(count - 2 - index - width, 0)
    row, rank = _distinct_ranks(rng, below + above, n_random)
    column = np.where(rank < below[row], 1 + rank, index[row] + width + 1 + rank - below[row])
    rows = [band[0], rim[0], index[row]]
    return _mask(n, block, rows, [band[1], rim[1], column], causal)


def _distinct_ranks(rng, available, wanted):
    """Per row `wanted` distinct integers below ``available[row]``, all when there are fewer.

    Floyd's algorithm (Bentley and Floyd, CACM 1987), one vectorised step per drawn integer.
    """
    chosen = np.full((available.size, wanted), -1)
    for step in range(wanted):
        top = available - np.minimum(wanted, available) + step
        row = np.flatnonzero(top < available)
        draw = rng.integers(0, top[row] + 1)
        taken = (chosen[row] == draw[:, None]).any(1)
        chosen[row, step] = np.where(taken, top[row], draw)
    row, step = np.nonzero(chosen >= 0)
    return row, chosen[row, step]


def random(
    n: SupportsIndex,
    block: SupportsIndex,
    density: float,
    seed: SupportsIndex | np.random.Generator | None = 0,
    *,
    causal: bool = False,
) -> Mask:
    """Uniformly random blocks, an exact number of them, the diagonal always among them.

    ``round(density * total)`` blocks are kept, but at least the diagonal ones, so that no row is
    empty. `total` is the number of blocks, of the lower triangle with ``causal=True``.

    Parameters
    ----------
    density : float
        Share of the blocks in ``[0, 1]``.
    seed : int, None or numpy.random.Generator
        As of ``numpy.random.default_rng``: None gives another mask every time, and a generator is
        advanced.
    """
    n, block, count = _blocks(n, block)
    density = _check.fraction("density", density)
    rng = _generator(seed)
    triangle = count * (count - 1) // 2
    free = triangle if _check.flag("causal", causal) else 2 * triangle
    extra = max(round(density * (free + count)) - count, 0)
    key = _distinct(rng, free, extra)
    row, col = _triangle(key % triangle) if triangle else (key, key)
    upper = key >= triangle
    row, col = np.where(upper, col, row), np.where(upper, row, col)
    index = np.arange(count)
    return _mask(n, block, [index, row], [index, col], causal)


def _triangle(key):
    """Strict lower triangle in row order: key = row (row - 1) / 2 + col, exact below 2**53."""
    row = ((1 + np.sqrt(1 + 8.0 * key)) / 2).astype(np.int64)
    row -= row * (row - 1) // 2 > key
    row += (row + 1) * row // 2 <= key
    return row, key - row * (row - 1) // 2


def _distinct(rng, total, count):
    """`count` distinct integers below `total`, sorted, in O(count) memory for any density."""
    if count > total // 2:
        left_out = _distinct(rng, total, total - count)
        return np.setdiff1d(np.arange(total), left_out, assume_unique=True)
    chosen = np.zeros(0, np.int64)
    while chosen.size < count:
        chosen = np.union1d(chosen, rng.integers(0, total, count - chosen.size))
    return chosen
