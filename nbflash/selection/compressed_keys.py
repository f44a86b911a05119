"""Selection per K/V head by the attention to compressed keys."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from nbflash.definitions.constants import ITEMSIZE
from nbflash.definitions.types import Array, Block
from nbflash.inputs.block_map import BlockMap
from nbflash.selection.blocks import (
    best,
    check_blocks,
    check_count,
    kernels,
    means,
    softmax,
    token_products,
)

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
    compression, without overlap: of the dtype of k if it has 16 bits, else float32. A block's score
    is the sum of softmax weights over its means, over the queries of the row and the heads of the
    group; causal queries see the means of past keys.
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
    keys, of_kernels = means(xp, blocks.k, length), kernels(xp)
    if ITEMSIZE[problem.dtype] == 2:
        keys = keys.astype(blocks.k.dtype)
    sum_weights = of_kernels.block_weights if of_kernels else block_weights
    total = xp.empty((problem.batch, problem.heads_kv, rows, columns), np.float32)
    step = max(1, _SCORES // (problem.batch * problem.heads * blocks.block[0] * keys.shape[2]))
    for row in range(0, rows, step):
        start, stop = row * blocks.block[0], min((row + step) * blocks.block[0], problem.nq)
        scores = token_products(xp, blocks.q[:, start:stop], keys)
        first = start + problem.nk - problem.nq if blocks.causal else problem.nk - 1
        of_keys = blocks.block, length, problem.nk
        sum_weights(scores, total, row, first, problem.scale, *of_keys)
    return total


def block_weights(scores, weights, first_row, first, scale, size, length, nk):
    """As `nbflash.backends.block_selection.host.block_weights`, of NumPy arrays, float64 too."""
    batch, heads, queries, n = scores.shape
    heads_kv, _, columns = weights.shape[1:]
    end = np.minimum((np.arange(n) + 1) * length, nk) - 1
    seen = end <= first + np.arange(queries)[:, None]
    found = softmax(np, scores * scores.dtype.type(scale), seen)
    rows, per_column = -(-queries // size[0]), size[1] // length
    padded = (batch, heads_kv, heads // heads_kv, rows * size[0], columns * per_column)
    whole = np.zeros(padded, scores.dtype)
    whole[..., :queries, :n] = found.reshape(*padded[:3], queries, n)
    cut = (*padded[:3], rows, size[0], columns, per_column)
    weights[:, :, first_row : first_row + rows] = whole.reshape(cut).sum(axis=(2, 4, 6))
