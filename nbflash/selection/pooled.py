"""Selections by means of blocks: the best of each row, or the fewest that make up a share."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from nbflash.definitions.types import Array, Block
from nbflash.inputs.block_map import BlockMap
from nbflash.selection.blocks import (
    best,
    check_blocks,
    check_count,
    check_threshold,
    descending,
    kernels,
    means,
    products,
    softmax,
)


def mean_pooled(
    q: Array,
    k: Array,
    *,
    block: Block = 64,
    topk: SupportsIndex,
    causal: bool = False,
    sinks: SupportsIndex = 0,
    local: SupportsIndex = 0,
) -> BlockMap:
    """The ``topk`` key blocks of each query block whose means have the largest product.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads, head_dim)
    k : array (batch, seqlen_k, heads_kv, head_dim)
    block : int or (int, int)
        Queries and keys of a block.
    topk : int
        Most blocks of a row, among those that it may attend to.
    causal : bool
        Bottom-right aligned; the map is within `masks.causal`.
    sinks, local : int
        Blocks that are always chosen: the first ones, and the last ones that a row may attend to.

    Returns
    -------
    nbflash.BlockMap
        (batch, heads, rows, topk).

    Notes
    -----
    VSA (arXiv 2505.13389): blocks of 64 = 4 × 4 × 4 tokens, in the order of cubes; no sinks.
    MoBA (arXiv 2502.13189), ``local=1``: there each query chooses, here each block of queries.
    """
    blocks, device = check_blocks(q, k, block, causal)
    topk = check_count("topk", topk, 1)
    sinks, local = check_count("sinks", sinks), check_count("local", local)
    with device:
        return best(blocks, _scores(blocks), topk, sinks, local)


def cumulative(
    q: Array,
    k: Array,
    *,
    block: Block = 128,
    threshold: float = 0.9,
    causal: bool = False,
    sinks: SupportsIndex = 1,
    local: SupportsIndex = 1,
) -> BlockMap:
    """The fewest blocks of a head's whole map whose estimated weights reach ``threshold``.

    Parameters
    ----------
    q, k, block, causal, sinks, local
        As of `mean_pooled`; ``sinks`` and ``local`` blocks are added to those of the threshold.
    threshold : float
        Share of the weights of all rows together. Weights are the softmax of each row of products
        of the blocks' means.

    Returns
    -------
    nbflash.BlockMap
        (batch, heads, rows, columns): rows differ in length.

    Notes
    -----
    FlexPrefill (arXiv 2502.20766), its query-aware heads.
    """
    blocks, device = check_blocks(q, k, block, causal)
    threshold = check_threshold(threshold)
    sinks, local = check_count("sinks", sinks), check_count("local", local)
    xp = blocks.xp
    with device:
        scores = _scores(blocks) * np.float32(blocks.problem.scale)
        weights = softmax(xp, scores, blocks.admissible)
        flat = weights.reshape(*weights.shape[:2], -1)
        order = descending(xp, flat)
        sorted_weights = xp.take_along_axis(flat, order, axis=-1)
        before = xp.cumsum(sorted_weights, axis=-1, dtype=np.float64) - sorted_weights
        total = sorted_weights.sum(axis=-1, keepdims=True, dtype=np.float64)
        needed = (before < threshold * total) & (sorted_weights > 0)
        # Where each place stands in the order: the inverse permutation.
        rank = xp.argsort(order, axis=-1)
        keep = xp.take_along_axis(needed, rank, axis=-1).reshape(weights.shape)
        return blocks.map_of_dense(keep | blocks.always(sinks, local))


def _scores(blocks):
    """Products of the means: float32 (batch, heads, rows, columns)."""
    pooled = (
        means(blocks.xp, x, n) for x, n in zip((blocks.q, blocks.k), blocks.block, strict=True)
    )
    if on_device := kernels(blocks.xp):  # a CUDA graph records these products, not CuPy's
        return on_device.block_products(*pooled)
    return products(blocks.xp, *pooled)
