"""Tile sizes for a mask: large tiles keep BLAS busy, small ones leave out what is masked."""

import numpy as np

from masks.tiles import BITS, FULL, INTERVAL

LARGEST = 128

#: Time per score in tiles of each size, relative to the largest: float32, head_dim 64, one core
#: of an AMD EPYC (Zen 5), OpenBLAS 0.3.30, causal mask of 8192 tokens, forward and backward alike.
COST = {128: 1.0, 64: 1.12, 32: 1.35}


def tile_sizes(head_dim, mask):
    """Tile sizes ``(tile_m, tile_n)`` that suit a mask.

    The live sub-tiles of each candidate size are counted inside the tiles of the largest size,
    which costs O(live tiles); the choice does not depend on any block size the mask was made of.

    Parameters
    ----------
    head_dim : int
        Not used: scores and operands of a tile fit the L2 cache for every head_dim up to 256.
    mask : masks.Mask
        Plain, per head or per batch.
    """
    area = dict.fromkeys(COST, 0)
    for plane in mask.planes:
        tiles = plane.tiles(LARGEST, LARGEST)
        for size in COST:
            area[size] += size**2 * _live(tiles, size)
    best = min(COST, key=lambda size: COST[size] * area[size])
    return best, best


def _live(tiles, size):
    """Tiles of ``size`` that hold an attended pair, found within the stored tiles.

    Ragged tiles at the edges count in full.
    """
    kinds, parts = tiles.kinds, LARGEST // size
    rows = np.repeat(np.arange(kinds.shape[0]), np.diff(kinds.indptr))
    full = np.count_nonzero(kinds.data == FULL) * parts**2
    interval = kinds.data == INTERVAL
    by_number = np.bincount(kinds.data[kinds.data >= BITS] - BITS, minlength=len(tiles.bits))
    return (
        full
        + _live_intervals(tiles, size, rows[interval], kinds.indices[interval])
        + int(by_number @ _live_bits(tiles.bits, size))
    )


def _live_intervals(tiles, size, rows, cols):
    """Sub-tiles between the smallest lo and the largest hi of their rows."""
    nq, parts = tiles.shape[0], LARGEST // size
    starts = np.arange(0, nq, size)
    if rows.size == 0:
        return 0
    live = tiles.lo < tiles.hi
    lo = np.minimum.reduceat(np.where(live, tiles.lo, tiles.shape[1]), starts)
    hi = np.maximum.reduceat(np.where(live, tiles.hi, 0), starts)
    count = 0
    for part in range(parts):
        row = rows * parts + part
        exists = row < len(starts)
        start = cols[exists].astype(np.int64) * LARGEST
        first = np.maximum(lo[row[exists]], start) // size
        last = -(-np.minimum(hi[row[exists]], start + LARGEST) // size)
        count += int(np.maximum(last - first, 0).sum())
    return count


def _live_bits(bits, size):
    """Sub-tiles of each bit tile with any bit set."""
    parts, words = LARGEST // size, size // 32
    blocks = bits.reshape(len(bits), parts, size, parts, words)
    return blocks.any(axis=(2, 4)).sum(axis=(1, 2))
