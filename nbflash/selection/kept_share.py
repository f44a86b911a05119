"""What a selection loses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import masks
from nbflash.definitions.types import Array
from nbflash.inputs.arrays import native
from nbflash.inputs.block_map import BlockMap


def coverage(
    q: Array,
    k: Array,
    block_map: BlockMap,
    *,
    scale: float | None = None,
    queries: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """Share of the softmax attention that a block map keeps: see `masks.coverage`.

    Parameters
    ----------
    q, k : array
        As of `nbflash.attention`; those in CUDA memory are copied to the host.
    block_map : nbflash.BlockMap
        The share refers to the attention within its intervals (causal, …).
    scale : float, optional
        Default ``head_dim ** -0.5``.
    queries : int array, optional
        Places of the queries that are averaged. Default all.

    Returns
    -------
    ndarray
        float64 (batch, heads) in [0, 1].

    Notes
    -----
    Computes every score of these queries, on the host: for checks, not for use in a model.
    """
    if not isinstance(block_map, BlockMap):
        raise TypeError(f"block_map must be a BlockMap, got {type(block_map).__name__}")
    q, k = (x if isinstance(x, np.ndarray) else x.get() for x in native(q=q, k=k))
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, seqlen, heads, head_dim), got {x.shape}")
    if block_map.shape != (q.shape[1], k.shape[1]):
        shape = q.shape[1], k.shape[1]
        raise ValueError(f"block_map must have shape {shape}, got {block_map.shape}")
    mask = block_map.to_mask(q.shape[2])
    return masks.coverage(q, k, mask, scale=scale, within=block_map.within, queries=queries)
