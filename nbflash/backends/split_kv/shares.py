"""The blocks of a decode kernel of tensor cores, and what it is told of a problem."""

from __future__ import annotations

from typing import NamedTuple

from nbflash.backends.split_kv.combine_in_block import joined_by_the_last
from nbflash.backends.split_kv.part import TOKENS
from nbflash.backends.split_kv.splits import heads_together, splits_for, walk
from nbflash.definitions.constants import tensor_core_factor


class Shares(NamedTuple):
    """How a problem is shared out among blocks."""

    splits: int
    counted: int  # row tiles, if the last block of each joins its parts and needs a count; else 0
    blocks: int
    sizes: tuple  # from the width of the block table to the scale, as the kernels take them
    tables: list  # of the mask's schedule


def share_out(device, problem, mask, cfg, block_table, splits=None) -> Shares:
    """The `Shares` of a kernel with the geometry ``cfg``.

    Parameters
    ----------
    device, problem, mask
        As of `nbflash.planning.decode_plan.CudaDecoder`.
    cfg
        Configuration of a kernel: ``tile_m`` rows, ``tile_n`` keys, ``min_blocks``, ``join_room``.
    block_table : array or None
        Only its layout is read.
    splits : int, optional
        Instead of what the rule gives.
    """
    p, pack = problem, heads_together(problem, mask)
    _, tiles, tables = walk(p, mask, TOKENS, cfg.tile_n, pack)
    items = p.batch * (p.heads // pack) * -(-p.nq * pack // cfg.tile_m)
    splits = splits or splits_for(items, tiles, device.multiprocessors * cfg.min_blocks)
    counted = items if joined_by_the_last(cfg, p.nq * pack, splits) else 0
    width, page_size = 0, 0
    if block_table is not None:
        width, page_size = block_table.strides[0] // block_table.itemsize, p.page_size
    heads = p.heads, pack, p.heads // p.heads_kv
    scale = tensor_core_factor(p.scale, p.score is not None)
    sizes = width, page_size, p.most_keys(mask), p.batch, p.nq, *heads, splits, scale
    return Shares(splits, counted, items * splits, sizes, tables)
