"""Trees of tokens, each of which sees its ancestors: drafts of speculative decoding, documents."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from masks import _check
from masks.base import Mask
from masks.block import values_of
from masks.interval import Interval, sums, unique_sorted
from masks.tiles import ABSENT, FULL, INTERVAL, OPEN


class Tree(Mask):
    """Query ``q`` attends to the first `prefix` keys, to key ``prefix + q`` and its ancestors.

    Parameters
    ----------
    nk : int
        Number of keys.
    prefix : int
        Keys before the nodes.
    parents : ndarray of int
        Parent of each node, which comes before the node; -1 for a root.
    """

    __slots__ = ("parents", "prefix")
    _fields = ("nk", "prefix", "parents")

    def __init__(self, nk, prefix, parents):
        super().__init__(parents.size, nk)
        self.prefix, self.parents = prefix, np.array(parents, np.int32)
        self.parents.setflags(write=False)

    def _parts(self):
        return self.prefix, self.parents

    def _at(self, q, kv):
        """Descendants of a node follow it without a gap where nodes are numbered depth first."""
        first, last = self._cached("numbers", lambda: _depth_first(self.parents))
        node = kv - self.prefix
        is_node = (node >= 0) & (node < self.parents.size)
        node = np.where(is_node, node, 0)
        sees = (first[node] <= first[q]) & (first[q] < last[node])
        return (kv < self.prefix) | (is_node & sees)

    def _hint(self):
        nq, _ = self.shape
        return np.broadcast_to(np.int32(0), nq), np.broadcast_to(np.int32(self.prefix), nq)

    def _nodes(self, grid):
        """Sorted linear indices of the tiles with attended nodes, and how many of each are."""
        key = "nodes", grid.tile_m, grid.tile_n
        return self._cached(key, lambda: _count_nodes(self.parents, self.prefix, grid))

    def _in_prefix(self, grid, rows, cols):
        """Attended cells of each tile that are of the prefix."""
        start, stop = grid.rows(rows)
        return (stop - start) * np.clip(self.prefix - cols * grid.tile_n, 0, grid.tile_n)

    def _live(self, grid):
        of_prefix = np.arange(-(-self.prefix // grid.tile_n))
        first = np.arange(grid.n_row)[:, None] * grid.n_col
        return unique_sorted(np.concatenate([(first + of_prefix).ravel(), self._nodes(grid)[0]]))

    def _of_nodes(self, grid, rows, cols):
        """Attended cells of each tile that are of nodes."""
        return values_of(rows * grid.n_col + cols, *self._nodes(grid))

    def _counts(self, grid, rows, cols):
        return self._of_nodes(grid, rows, cols) + self._in_prefix(grid, rows, cols)

    def _state(self, grid, rows, cols):
        of_nodes = self._of_nodes(grid, rows, cols)
        counts = of_nodes + self._in_prefix(grid, rows, cols)
        state = np.full(rows.size, OPEN, np.int8)
        state[of_nodes == 0] = INTERVAL
        state[counts == grid.area(rows, cols)] = FULL
        state[counts == 0] = ABSENT
        return state

    def _restricted(self, q, kv):
        """The prefix stays an interval of each row."""
        lo, hi = self._hint()
        return super()._restricted(q, kv) | Interval(self.shape[1], lo, hi)._restricted(q, kv)


def tree(parents: ArrayLike, prefix: SupportsIndex = 0, nk: SupportsIndex | None = None) -> Mask:
    """Speculative-decoding tree: a node sees its ancestors, itself, and a cached prefix.

    Parameters
    ----------
    parents : sequence of int
        Parent of each node, which comes before the node; -1 for a root.
    prefix : int
        Cached tokens before the tree. Keys are the prefix followed by the nodes.
    nk : int, optional
        Width of the key axis; keys behind the nodes are not attended. Trees behind prefixes of
        several lengths have one width, that `per_batch` may join them.

    Returns
    -------
    Mask
        Shape ``(len(parents), nk)``, ``nk`` at least ``prefix + len(parents)`` and by default that,
        with ``sum(depth + 1) + len(parents) * prefix`` cells (Medusa, Cai et al., 2024).
    """
    parents = _check.integers("parents", parents, -1)
    prefix = _check.integer("prefix", prefix)
    node = np.arange(parents.size)
    if (parents >= node).any():
        at = np.flatnonzero(parents >= node)[0]
        raise ValueError(f"parents[{at}]={parents[at]}: must come before node {at}")
    least = prefix + parents.size
    return Tree(least if nk is None else _check.integer("nk", nk, least), prefix, parents)


def _depth_first(parents):
    """Numbers of nodes, depth first, and one past the greatest among each node's descendants."""
    parents = parents.tolist()
    size, following = [1] * len(parents) + [0], [0] * (len(parents) + 1)  # [-1] is above the roots
    for node in reversed(range(len(parents))):
        size[parents[node]] += size[node]
    number = []
    for node, parent in enumerate(parents):
        number.append(following[parent])
        following[parent] += size[node]
        following[node] = number[-1] + 1
    number = np.array(number, np.int64)
    return number, number + size[:-1]


def _upwards(parents, prefix, tile_n):
    """Of each node the first ancestor in another tile column, or -1; and how many come before it.

    The node itself is one of these. Nodes that follow their parents are a run, which is passed in
    one step; from run to run steps are doubled.
    """
    node = np.arange(parents.size, dtype=np.int32)
    col = (node + prefix) // tile_n
    begins = (parents != node - 1) | (np.diff(col, prepend=-1) != 0)
    top = np.maximum.accumulate(np.where(begins, node, 0))
    above, height = parents[top], node - top + 1
    going = node
    while going.size:
        going = going[above[going] >= 0]
        going = going[col[above[going]] == col[going]]
        met = above[going]
        height[going] += height[met]
        above[going] = above[met]
    return above, height


def _count_nodes(parents, prefix, grid):
    """See `Tree._nodes`: O(nodes at which a tile row enters a tile column), column by column.

    A parent comes before its node, so ancestors are met from right to left. A tile row keeps the
    nodes at which its own enter the next column: each once, and how many of its own come by there.
    """
    above, height = _upwards(parents, prefix, grid.tile_n)
    node = np.arange(parents.size)
    row, times = node // grid.tile_m, np.ones(node.size, np.int64)
    found = []
    while node.size:
        tile = row * grid.n_col + (node + prefix) // grid.tile_n
        found.append(sums(tile, times * height[node]))
        node = above[node]
        alive = node >= 0
        entries, times = sums(row[alive] * above.size + node[alive], times[alive])
        row, node = np.divmod(entries, above.size)
    return sums(*map(np.concatenate, zip(*found, strict=True))) if found else (node, times)
