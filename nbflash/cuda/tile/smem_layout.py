"""Where the parts of a block's shared memory are, by name."""

import functools
from collections import namedtuple
from itertools import accumulate


def smem_layout(start=0, **sizes):
    """Parts of the given sizes one after the other: where each begins, and ``end``.

    >>> smem_layout(q=64, k=32)
    SmemLayout(q=0, k=64, end=96)
    """
    places = accumulate(sizes.values(), initial=start)
    return _layout_of((*sizes, "end"))(*places)


@functools.cache
def _layout_of(names):
    return namedtuple("SmemLayout", names)


def barrier_layout(start, **counts):
    """Groups of so many mbarriers one after the other, 8 bytes each, as in `smem_layout`."""
    return smem_layout(start, **{name: 8 * count for name, count in counts.items()})
