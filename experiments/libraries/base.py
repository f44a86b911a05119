"""What all adapters to attention libraries have in common.

Each is made from the q, k and v of one shape, (batch, seqlen, heads, head_dim), and makes calls
without arguments: that of `forward` returns the output, those of `backward` and of `both`, which
runs the forward pass first, dQ, dK and dV, all in that layout. Block lists and whatever else a call
needs are prepared before.
"""

import numpy as np

import masks


class Library:
    """An adapter: a subclass gives ``label(case)``, ``version()`` and the passes."""

    #: A `features.Feature` where something else than plain attention is computed.
    feature = None

    @staticmethod
    def why_not(case):
        """Why a case is left out; empty where the library is to try it."""
        return ""

    def details(self, case, which):
        """More columns of the row of a case and a pass."""
        return {}

    def results(self, case):
        """By name, results of a forward pass to check before those of the call of `forward`."""
        return {}


def block_lists(mask, tile):
    """The blocks of each row of blocks, those attended in part and those attended in full.

    Returns
    -------
    two pairs (counts, columns)
        int32 (rows,) and int32 (rows, columns of blocks): row ``i`` has ``counts[i]`` blocks, the
        first ones of ``columns[i]``, in increasing order; what follows them is 0.
    """
    tiles = mask.tiles(tile)
    rows, cols = tiles.coordinates()
    full = tiles.kinds.data == masks.FULL
    return tuple(_padded(rows[at], cols[at], tiles.kinds.shape) for at in (~full, full))


def _padded(rows, cols, shape):
    counts = np.bincount(rows, minlength=shape[0])
    first = np.cumsum(counts) - counts
    columns = np.zeros(shape, np.int32)
    columns[rows, np.arange(rows.size) - first[rows]] = cols
    return counts.astype(np.int32), columns
