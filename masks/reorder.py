"""Permute tokens so that a pattern becomes dense in tiles."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from masks import _check
from masks.algebra import Complement, Transposed, _Nary
from masks.base import Mask
from masks.block import BlockSparse
from masks.leaves import Diagonals
from masks.token import Neighborhood


def reorder(mask: Mask, tile: SupportsIndex = 64) -> NDArray[Any]:
    """Find a token order in which the mask needs fewer tiles.

    Tried in turn: the order as it is; tokens grouped by their residue modulo the pattern's own
    period (strided and dilated patterns); compact patches of the pattern's own image (axial
    patterns, neighbourhoods); reverse Cuthill-McKee (Cuthill and McKee, 1969) on the tokens, or on
    the blocks of a block-sparse mask. The order with the fewest live tiles wins, the earlier one
    on a tie, so the result never needs more tiles than the mask.

    Parameters
    ----------
    mask : Mask
        Plain and square.
    tile : int
        Tile size to count with.

    Returns
    -------
    permutation : ndarray
        int64 ``(n,)``; position ``i`` of the new order holds token ``permutation[i]``. Attend with
        ``q[:, permutation]``, ``k[:, permutation]``, ``v[:, permutation]`` and the new mask, then
        undo with ``out[:, numpy.argsort(permutation)]``.
    reordered : Mask
        ``reordered(i, j) == mask(permutation[i], permutation[j])``.

    Notes
    -----
    O(attended pairs) time and memory; O(blocks) for a block-sparse mask with no ragged block.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {type(mask).__name__}: must be a Mask")
    if not mask.is_plain:
        raise ValueError(f"mask has batch={mask.batch}, heads={mask.heads}: reorder its .planes")
    if mask.shape[0] != mask.shape[1]:
        raise ValueError(f"mask.shape={mask.shape}: must be square to permute tokens")
    tile = _check.integer("tile", tile, 1)
    n = mask.shape[0]
    best = np.arange(n), mask
    if mask.tiles(tile).kinds.nnz == 0:
        return best
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # a fifth of the time of `import masks`

    unit = _whole_block(mask)
    graph = mask.to_scipy(unit)
    orders = [reverse_cuthill_mckee(_symmetric(graph), symmetric_mode=True).astype(np.int64)]
    if unit == 1:
        orders = _own_orders(mask, tile) + orders
    for order in orders:
        candidate = _permuted(graph, order, unit, n)
        if candidate.tiles(tile).kinds.nnz < best[1].tiles(tile).kinds.nnz:
            token = (order[:, None] * unit + np.arange(unit)).ravel()
            best = token, candidate
    return best


def _whole_block(mask):
    """Block size if the mask is square blocks without a ragged one, else 1."""
    if isinstance(mask, BlockSparse) and mask.block[0] == mask.block[1]:
        return 1 if mask.shape[0] % mask.block[0] else mask.block[0]
    return 1


def _own_orders(mask, tile):
    """Orders by residue and by patch from the periods and image shapes found in the mask."""
    n = mask.shape[0]
    periods, token = _periods(mask), np.arange(n)
    images = [(-(-n // period), period) for period in periods] + _images(mask)
    by_residue = [np.argsort(token % period, kind="stable") for period in periods]
    return by_residue + [_patches(token, image, tile) for image in images]


def _patches(token, image, tile):
    """Tokens of a row-major image visited patch by patch, a patch holding about `tile` tokens."""
    side = max(1, round(tile ** (1 / len(image))))
    place = np.unravel_index(token, image)
    return np.lexsort([x % side for x in place[::-1]] + [x // side for x in place[::-1]])


def _images(mask):
    """Image extents of every neighbourhood leaf."""
    if isinstance(mask, _Nary):
        return sorted(set().union(*map(_images, mask.operands)))
    if isinstance(mask, (Complement, Transposed)):
        return _images(mask.inner)
    return [mask.sizes] if isinstance(mask, Neighborhood) else []


def _periods(mask):
    """Most frequent distance between neighbouring offsets of every diagonal leaf, if above 1."""
    if isinstance(mask, _Nary):
        return sorted(set().union(*map(_periods, mask.operands)))
    if isinstance(mask, (Complement, Transposed)):
        return _periods(mask.inner)
    if not isinstance(mask, Diagonals):
        return []
    gaps = np.diff(mask.offsets)
    gaps, counts = np.unique(gaps[gaps > 1], return_counts=True)
    return [int(gaps[counts.argmax()])] if gaps.size else []


def _symmetric(graph):
    both = csr_array(graph, dtype=np.int8)
    return csr_array(both + both.T)


def _permuted(graph, order, unit, n):
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    coo = coo_array(graph)
    return BlockSparse(n, n, (unit, unit), position[coo.row], position[coo.col])
