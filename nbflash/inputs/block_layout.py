"""BlockLayout: everything of a `BlockMap` but its contents; a plan depends on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import masks
from nbflash.inputs.arrays import device_of
from nbflash.inputs.problem import check_mask

MOST_PATTERN_BITS = 4  # blocks of a tile


@dataclass(frozen=True)
class BlockLayout:
    """What stands for a mask in an `AttentionSpec` where the blocks are known on the device alone.

    Attributes
    ----------
    shape : (int, int)
        Queries and keys.
    block : (int, int)
    extent : (int, int)
        Batch elements and heads of the map: 1, or as many as there are; heads of K and V count.
    width : int
        Most blocks of a row.
    within : masks.Mask
        Row intervals of keys; pairs outside are not attended.
    heads : int
        Query heads.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    extent: tuple[int, int]
    width: int
    within: masks.Mask
    heads: int

    @property
    def grid_shape(self):
        """Rows and columns of blocks."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))

    @property
    def plane_extent(self):
        """Batch elements and heads that map and intervals together distinguish."""
        of_within = self.within.plane_index.shape
        heads = self.heads if of_within[1] > 1 else self.extent[1]
        return max(self.extent[0], of_within[0]), heads

    @property
    def planes(self):
        """As many as there are lists of tiles."""
        batch, heads = self.plane_extent
        return range(batch * heads)

    def per_tile(self, tile_m, tile_n):
        """Blocks of a tile along both axes, and tiles of a block; one of them is 1, on each."""
        pairs = list(zip((tile_m, tile_n), self.block, strict=True))
        return tuple(max(1, t // b) for t, b in pairs), tuple(max(1, b // t) for t, b in pairs)

    def fits(self, tile_m, tile_n):
        """Whether tiles are whole blocks, not too many, or blocks whole tiles."""
        whole = all(
            t % b == 0 or b % t == 0 for t, b in zip((tile_m, tile_n), self.block, strict=True)
        )
        (blocks_m, blocks_n), _ = self.per_tile(tile_m, tile_n)
        return whole and blocks_m * blocks_n <= MOST_PATTERN_BITS

    def live_tiles(self, tile_m, tile_n):
        """Upper bounds of attended tiles and of full tiles, as `masks.Mask.live_tiles`.

        Tiles outside the intervals are not subtracted.
        """
        rows, columns = (
            -(-n // tile) for n, tile in zip(self.shape, (tile_m, tile_n), strict=True)
        )
        (blocks_m, blocks_n), (_, tiles_n) = self.per_tile(tile_m, tile_n)
        of_row = min(columns, self.width * blocks_m * tiles_n)
        live = len(self.planes) * rows * of_row
        return live, live if blocks_m * blocks_n == 1 else 0


def check_block_map(block_map, problem, causal=False, window=None):
    """The `BlockLayout` of a map for a problem, within ``causal`` and ``window`` too.

    Raises
    ------
    TypeError, ValueError
        As of `check_mask`; also if the map has another number of heads, or is on another device.
    """
    nq, nk = problem.nq, problem.nk
    if block_map.shape != (nq, nk):
        raise ValueError(
            f"mask must have shape (seqlen_q, seqlen_k) = {(nq, nk)}, got {block_map.shape}"
        )
    extent = block_map.indices.shape[:2]
    if extent[0] not in (1, problem.batch):
        raise ValueError(f"mask has batch={extent[0]}, but q has batch={problem.batch}")
    if problem.heads % extent[1]:
        raise ValueError(f"mask has heads={extent[1]}, which do not divide q's {problem.heads}")
    if device_of(block_map.indices) != (problem.device, problem.device_id):
        raise ValueError(
            f"mask has its arrays on device {device_of(block_map.indices)}, but q is on "
            f"{(problem.device, problem.device_id)}; copy them there, or pass mask.to_mask()"
        )
    within = check_mask(block_map.within, problem, causal, window)
    return BlockLayout(
        block_map.shape, block_map.block, extent, block_map.width, within, problem.heads
    )
