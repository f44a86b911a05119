"""Selection per K/V head by the attention to compressed keys."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from nbflash.definitions.types import Array, Block
from nbflash.inputs.block_map import BlockMap
from nbflash.selection.blocks import best, check_blocks, check_count, means, products, softmax

_SCORES = 1 << 26  # at a time


def compressed(
    q: Array,
    k: Array,
    *,
    block: Block = 64,
    topk: SupportsIndex = 16,
    length: SupportsIndex = 16,
    causal: bool = False,
    sinks: SupportsIndex = 1,
    local: SupportsIndex = 2,
) -> BlockMap:
    """The ``topk`` blocks that the queries of a group attend to most, by keys in short means.

    Parameters
    ----------
    q, k, block, causal, sinks, local
        As of `mean_pooled`. The heads that share a K/V head choose together.
    topk : int
        Blocks of a row, the ``sinks`` and ``local`` ones among them.
    length : int
        Keys of a mean; divides the keys of a block.

    Returns
    -------
    nbflash.BlockMap
        (batch, heads_kv, rows, topk).

    Notes
    -----
    The selected branch of NSA (arXiv 2502.11089, equations 8 to 12), with means for its learned
    compression, without overlap. A block's score is the sum of softmax weights over its means, over
    the queries of the row and the heads of the group; causal queries see the means of past keys.
    There each query chooses, here each block of queries.
    """
    blocks, device = check_blocks(q, k, block, causal)
    topk, length = check_count("topk", topk, 1), check_count("length", length, 1)
    sinks, local = check_count("sinks", sinks), check_count("local", local)
    if blocks.block[1] % length:
        raise ValueError(f"length={length}: must divide the {blocks.block[1]} keys of a block")
    with device:
        return best(blocks, _importance(blocks, length), topk, sinks, local)


def _importance(blocks, length):
    """Weights by blocks: float32 (batch, heads_kv, rows, columns)."""
    xp, problem, (rows, columns) = blocks.xp, blocks.problem, blocks.grid
    keys, per_block = means(xp, blocks.k, length), blocks.block[1] // length
    total = xp.zeros((problem.batch, problem.heads_kv, rows, columns), np.float32)
    step = max(1, _SCORES // (problem.batch * problem.heads * blocks.block[0] * keys.shape[2]))
    for first in range(0, rows, step):
        start, stop = first * blocks.block[0], min((first + step) * blocks.block[0], problem.nq)
        queries = blocks.q[:, start:stop].astype(np.float32).transpose(0, 2, 1, 3)
        scores = products(xp, queries, keys) * np.float32(problem.scale)
        end = xp.minimum((xp.arange(keys.shape[2]) + 1) * length, problem.nk) - 1
        position = xp.arange(start, stop) + (problem.nk - problem.nq)
        seen = end <= (position[:, None] if blocks.causal else problem.nk)
        weights = softmax(xp, scores, seen)
        total[:, :, first : first + step] = _summed(xp, weights, total.shape, blocks, per_block)
    return total


def _summed(xp, weights, shape, blocks, per_block):
    """Over the heads of a group, the queries of a block and its means."""
    batch, heads_kv, _, columns = shape
    heads, queries, count = weights.shape[1:]
    rows = -(-queries // blocks.block[0])
    padded = (batch, heads_kv, heads // heads_kv, rows * blocks.block[0], columns * per_block)
    whole = xp.zeros(padded, np.float32)
    whole[..., :queries, :count] = weights.reshape(*padded[:3], queries, count)
    cut = (*padded[:3], rows, blocks.block[0], columns, per_block)
    return whole.reshape(cut).sum(axis=(2, 4, 6))
