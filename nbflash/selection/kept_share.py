"""What a selection loses."""

import numpy as np

import masks


def coverage(q, k, block_map, *, scale=None):
    """Share of the softmax attention that a block map keeps: see `masks.coverage`.

    Parameters
    ----------
    q, k : array
        As of `nbflash.attention`; those in CUDA memory are copied to the host.
    block_map : nbflash.BlockMap
        The share is that of what lies within its intervals (causal, …).
    scale : float, optional
        Default ``head_dim ** -0.5``.

    Returns
    -------
    ndarray
        float64 (batch, heads) in [0, 1].

    Notes
    -----
    Computes every score, on the host: a check of a selection, not a step of it.
    """
    q, k = (x if isinstance(x, np.ndarray) else x.get() for x in (q, k))
    mask = block_map.to_mask(q.shape[2])
    return masks.coverage(q, k, mask, scale=scale, within=block_map.within)
