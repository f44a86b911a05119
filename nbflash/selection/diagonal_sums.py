"""Selection by sums over antidiagonals."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from nbflash.definitions.types import Array, Block
from nbflash.inputs.block_map import BlockMap
from nbflash.selection.blocks import (
    check_blocks,
    check_count,
    check_threshold,
    enough,
    products,
    softmax,
)


def antidiagonal(
    q: Array,
    k: Array,
    *,
    block: Block = 128,
    stride: SupportsIndex = 8,
    threshold: float = 0.9,
    most: SupportsIndex | None = None,
    causal: bool = False,
    sinks: SupportsIndex = 0,
    local: SupportsIndex = 0,
) -> BlockMap:
    """The fewest blocks of each row that reach a share of weights seen along antidiagonals.

    Parameters
    ----------
    q, k, block, causal, sinks, local
        As of `mean_pooled`.
    stride : int
        Queries and keys that are summed together; divides both sizes of a block.
    threshold : float
        Share of a row's weights.
    most : int, optional
        Most blocks of a row, the best ones; default all.

    Returns
    -------
    nbflash.BlockMap
        (batch, heads, rows, most or columns): rows differ in length.

    Notes
    -----
    XAttention (arXiv 2503.16428, algorithm 1). In every square of ``stride × stride`` scores the
    antidiagonal is summed, which crosses each row, column and diagonal. The softmax of each row of
    these sums, divided by ``stride``, is summed over blocks: these are the weights.
    """
    blocks, device = check_blocks(q, k, block, causal)
    stride, threshold = check_count("stride", stride, 1), check_threshold(threshold)
    sinks, local = check_count("sinks", sinks), check_count("local", local)
    most = blocks.grid[1] if most is None else check_count("most", most, 1)
    for axis, size in zip(("queries", "keys"), blocks.block, strict=True):
        if size % stride:
            raise ValueError(f"stride={stride}: must divide the {size} {axis} of a block")
    with device:
        weights = _weights(blocks, stride)
        return enough(blocks, weights, threshold, most, sinks, local)


def _weights(blocks, stride):
    """By blocks: float32 (batch, heads, rows, columns)."""
    xp, problem, (rows, columns) = blocks.xp, blocks.problem, blocks.grid
    q = _folded(xp, blocks.q, stride, rows * blocks.block[0], backwards=True)
    k = _folded(xp, blocks.k, stride, columns * blocks.block[1])
    scores = products(xp, q, k) * np.float32(problem.scale / stride)
    group_q, group_k = (xp.arange(n) * stride for n in scores.shape[2:])
    seen = group_k < problem.nk
    if blocks.causal:
        last = xp.minimum(group_q + stride, problem.nq) - 1 + (problem.nk - problem.nq)
        seen = seen & (group_k <= last[:, None])
    weights = softmax(xp, scores, seen) * (group_q < problem.nq)[:, None]
    cut = rows, blocks.block[0] // stride, columns, blocks.block[1] // stride
    return weights.reshape(*scores.shape[:2], *cut).sum(axis=(3, 5))


def _folded(xp, x, stride, length, *, backwards=False):
    """``stride`` tokens behind each other in one vector: float32 (b, heads, groups, stride d)."""
    batch, n, heads, head_dim = x.shape
    padded = xp.zeros((batch, length, heads, head_dim), np.float32)
    padded[:, :n] = x
    groups = padded.reshape(batch, length // stride, stride, heads, head_dim)
    groups = groups[:, :, ::-1] if backwards else groups
    return groups.transpose(0, 3, 1, 2, 4).reshape(batch, heads, length // stride, -1)
