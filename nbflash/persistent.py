"""Work lists of persistent kernels: what runs at the same time should share the L2."""

import numpy as np

L2_BYTES = 24 << 20  # for the heads that are worked on at a time: half of an H100's


def ordered(work, length, heads_at_a_time, blocks):
    """The work list so that heads follow each other and every block gets its share.

    What is worked on at the same time then reads the same operands while they are in L2. ``blocks``
    items in turn are dealt out, the longest one to the block that has least to do; a block finds
    its item by :func:`~nbflash.tile.pipeline.item_of`.

    Parameters
    ----------
    work : int32 (items, …)
        Row tile, head, …; in the order of length.
    length : int (items,)
        Tiles of each item; items without tiles come last.
    heads_at_a_time, blocks : int

    Returns
    -------
    The rows of ``work`` in another order.
    """
    live = np.count_nonzero(length)
    by_heads = np.argsort(work[:live, 1] // heads_at_a_time, kind="stable")
    order, load = np.arange(len(work)), np.zeros(blocks, np.int64)
    for round_, start in enumerate(range(0, live, blocks)):
        items = by_heads[start : start + blocks]
        items = items[np.argsort(-length[items], kind="stable")]
        places = np.arange(len(items))
        owner = places if round_ % 2 == 0 else blocks - 1 - places
        owner = owner[np.argsort(load[owner], kind="stable")]
        order[start + (owner if round_ % 2 == 0 else blocks - 1 - owner)] = items
        load[owner] += length[items]
    return work[order]
