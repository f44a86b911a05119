"""Work lists of persistent kernels: what runs at the same time should share the L2."""

import numpy as np

L2_BYTES = 24 << 20  # for the heads that are worked on at a time: half of an H100's


def ordered(work, length, heads_at_a_time, blocks, together=1):
    """The work list so that heads follow each other and every block gets its share.

    What is worked on at the same time then reads the same operands while they are in L2. ``blocks``
    items in turn are dealt out, the longest one to the block that has least to do; a block finds
    its item by :func:`~nbflash.cuda.tile.ring.item_of`. Groups of heads are equal: the last one has
    short items enough to make up for what the blocks still lack.

    Parameters
    ----------
    work : int32 (items, …)
        Row tile, head, …; in the order of length.
    length : int (items,)
        Tiles of each item; items without tiles come last.
    heads_at_a_time : int
        At most so many make a group; of ``together`` heads that read the same keys, so many times.
    blocks, together : int

    Returns
    -------
    The rows of ``work`` in another order.
    """
    live = np.count_nonzero(length)
    head = work[:, 1].astype(np.int64) // together
    heads = int(head.max(initial=0)) + 1
    groups = -(-heads // heads_at_a_time)
    by_heads = np.argsort(head[:live] * groups // heads, kind="stable")
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


def heads_at_a_time(head_bytes):
    """How many heads of so many bytes are worked on at a time."""
    return -(-L2_BYTES // head_bytes)


def kv_bytes(problem):
    """K and V of a head, in halves."""
    return 2 * problem.nk * problem.head_dim * 2


def row_tables(schedule, problem, blocks):
    """What a kernel that goes over rows walks.

    Parameters
    ----------
    schedule : TileSchedule or nbflash.backends.block_plan.host.BlockSchedule
        Of query rows.
    problem : nbflash.inputs.problem.Problem
    blocks : int
        How many will walk at the same time.

    Returns
    -------
    walked : tuple, or callable
        Work list, planes, row pointers, columns, kinds, lower and upper bounds: int32; bit tiles:
        uint32. Of blocks that are chosen at run time what makes them.
    live : int
        Items of the work list that have tiles.
    """
    p, s = problem, schedule
    if s.at_run_time:
        return s.row_tables(p)
    work, plane_of = s.work(p.batch, p.heads), s.plane_of(p.batch, p.heads)
    lengths = np.diff(s.row_ptr).reshape(s.planes, s.n_row)[plane_of[work[:, 1]], work[:, 0]]
    work = ordered(work, lengths, heads_at_a_time(kv_bytes(p)), blocks, p.group)
    walked = work, plane_of, s.row_ptr, s.col_idx, s.kind, s.lo, s.hi, s.bits
    walked = tuple(np.ascontiguousarray(x).ravel() for x in walked)
    return walked, int(np.count_nonzero(lengths))
