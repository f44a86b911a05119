"""Selection of columns and diagonals by what the last queries attend to."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from nbflash.definitions.types import Array, Block
from nbflash.inputs.block_map import BlockMap
from nbflash.selection.blocks import check_blocks, check_count, descending, products, softmax


def vertical_slash(
    q: Array,
    k: Array,
    *,
    block: Block = 64,
    vertical: SupportsIndex,
    slash: SupportsIndex,
    last: SupportsIndex = 64,
) -> BlockMap:
    """Blocks on the keys, and on the distances, that the last queries give most weight to.

    Parameters
    ----------
    q, k, block
        As of `mean_pooled`. Attention is causal.
    vertical, slash : int
        How many keys, and how many distances of a query to a key.
    last : int
        How many of the last queries.

    Returns
    -------
    nbflash.BlockMap
        (batch, heads, rows, k), within `masks.causal`.

    Notes
    -----
    MInference (arXiv 2407.02490, algorithm 3): softmax weights of the last queries, summed over
    queries for each key and over diagonals for each distance. `masks.vertical_slash` is the exact
    pattern of tokens; here every block that has a token of the pattern is attended to.
    """
    blocks, device = check_blocks(q, k, block, True)
    given = {"vertical": vertical, "slash": slash}
    vertical, slash = (min(check_count(name, n), k.shape[1]) for name, n in given.items())
    last = min(check_count("last", last, 1), blocks.problem.nq)
    with device:
        weights = _weights(blocks, last)
        keys = descending(blocks.xp, weights.sum(axis=2))[..., :vertical]
        distances = descending(blocks.xp, _diagonals(blocks, weights))[..., :slash]
        lists = _columns(blocks, keys), _along(blocks, distances)
        indices = blocks.xp.concatenate(lists, axis=3).astype(np.int32)
        chosen = blocks.map_of(indices)
        # Lists with duplicates may be longer than a row of the map.
        return chosen if chosen.width <= blocks.grid[1] else blocks.map_of_dense(chosen.dense())


def _weights(blocks, last):
    """Of the last queries: float32 (batch, heads, last, nk)."""
    xp, problem = blocks.xp, blocks.problem
    q = blocks.q[:, problem.nq - last :].astype(np.float32).transpose(0, 2, 1, 3)
    k = blocks.k.astype(np.float32).transpose(0, 2, 1, 3)
    scores = products(xp, q, k) * np.float32(problem.scale)
    position = xp.arange(problem.nk - last, problem.nk)
    return softmax(xp, scores, xp.arange(problem.nk) <= position[:, None])


def _diagonals(blocks, weights):
    """Sums over the keys at each distance behind the query: (batch, heads, nk)."""
    xp, (last, nk) = blocks.xp, weights.shape[2:]
    key = xp.arange(nk - last, nk)[:, None] - xp.arange(nk)
    there = xp.broadcast_to(xp.maximum(key, 0), weights.shape)
    return xp.where(key >= 0, xp.take_along_axis(weights, there, axis=3), 0).sum(axis=2)


def _columns(blocks, keys):
    """Blocks of these keys where a row may attend to them, else −1: (b, heads, rows, vertical)."""
    xp, keys = blocks.xp, keys[:, :, None]
    return xp.where(keys <= blocks.last_key[:, None], keys // blocks.block[1], -1)


def _along(blocks, distances):
    """Blocks that a row meets at these distances, else −1: (b, heads, rows, slash × most)."""
    xp, (size_q, size_k), (nq, nk) = blocks.xp, blocks.block, blocks.shape
    first = xp.arange(blocks.grid[0]) * size_q + (nk - nq)
    low = first[:, None] - distances[:, :, None]
    high = blocks.last_key[:, None] - distances[:, :, None]
    most = (size_q + size_k - 2) // size_k + 1  # blocks that an interval of size_q keys meets
    start = xp.maximum(low, 0) // size_k
    column = start[..., None] + xp.arange(most)
    column = xp.where((column * size_k <= high[..., None]) & (high[..., None] >= 0), column, -1)
    return column.reshape(*column.shape[:3], -1)
