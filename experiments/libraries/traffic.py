"""Bytes that kernels move between memory and chip, counted by the tiles that they walk.

The model of the paper: what a tile needs is loaded for each tile, whatever a cache holds. The
forward pass keeps a tile of queries and streams K and V (`query_outer_forward`). The backward pass
in one pass keeps keys, streams Q and dO and adds to a float32 dQ in memory; in two passes the
second keeps queries and streams K and V. A pass over the rows before makes δ = rowsum(dO ∘ O).
"""

from experiments.libraries import paper_algorithms as alg
from experiments.libraries.hbm import Accesses

FLOAT = 4
#: LSE and δ of a query.
STATISTICS = 2 * FLOAT


def forward_bytes(n, head_dim, itemsize, tile, live=None):
    """Bytes of a forward pass of one head.

    Parameters
    ----------
    n, head_dim, itemsize : int
    tile : (int, int)
        Queries and keys of a tile.
    live : bool array (rows of tiles, columns of tiles), optional
        Live tiles; all unless given.

    Returns
    -------
    Accesses
    """
    rows = n * head_dim * itemsize
    _, keys = alg.visits(n, *tile, live)
    return Accesses(rows + keys * 2 * head_dim * itemsize, rows + FLOAT * n)


def backward_bytes(n, head_dim, itemsize, tile, live=None, two_passes=False):
    """Bytes of a backward pass of one head; arguments as of `forward_bytes`."""
    rows, sums = n * head_dim * itemsize, n * head_dim * FLOAT
    queries, keys = alg.visits(n, *tile, live)
    streamed = 2 * head_dim * itemsize
    reads = 2 * rows  # O and dO, for δ
    reads += 2 * rows + queries * (streamed + STATISTICS)  # K, V; Q, dO
    writes = FLOAT * n + 3 * rows  # δ; dQ, dK, dV
    if two_passes:
        return Accesses(reads + 2 * rows + STATISTICS * n + keys * streamed, writes)
    added = queries * head_dim * FLOAT
    return Accesses(reads + added + sums, writes + sums + added)  # zeroed, added to, converted


def once_bytes(n, head_dim, itemsize):
    """Forward and backward, if every array were moved once: the least that there can be."""
    rows = n * head_dim * itemsize
    return Accesses(3 * rows, rows + FLOAT * n), Accesses(5 * rows + FLOAT * n, 3 * rows)


def standard_bytes(n, head_dim, itemsize):
    """Forward and backward of Algorithms 0 and 3."""
    found = alg.standard_forward_accesses(n, head_dim), alg.standard_backward_accesses(n, head_dim)
    return tuple(Accesses(reads * itemsize, writes * itemsize) for reads, writes in found)
