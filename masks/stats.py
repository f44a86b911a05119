"""What a mask costs and how it connects tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array, csr_array

from masks import _check
from masks.tiles import FULL

#: Nodes of the graph whose all-pairs distances are computed.
MAX_NODES = 1024


@dataclass(frozen=True)
class MaskStats:
    """Statistics of one plain mask cut into ``tile x tile`` tiles.

    Three numbers that are easy to confuse: `token_density` is the share of (query, key) pairs
    attended, `tile_density` the share of tiles a kernel has to visit, and `fill` the share of
    attended pairs inside visited tiles (``token_density / tile_density`` up to ragged edges).

    Attributes
    ----------
    tokens, tiles, all_tiles : int
        Attended pairs, live tiles, and tiles of the dense matrix.
    interval, full, bits, distinct_bits : int
        Live tiles by kind, and stored bit tiles.
    flops, dense_flops : int
        Forward multiply-adds counted as 2, existing cells of live tiles: ``4 * head_dim * cells``
        for one head.
    bytes, dense_bytes : int
        Forward traffic of one head with a query-stationary walk: Q, O once, K and V once per live
        tile, LSE in float32.
    row_min, row_mean, row_max : int, float, int
        Live tiles per tile row; `imbalance` is max / mean.
    empty_rows : int
        Queries that attend to nothing.
    components : int or None
        Connected components of the token graph; None unless ``nq == nk > 0``.
    layers : int or None
        Layers until information from every token can reach every other, or every *later* one if
        no token looks ahead; None if that never happens or ``nq != nk``.
    node : int
        Tokens per node of that graph, 1 up to 1024 tokens. Above 1 the tokens of a node count as
        mixed, so `components` and `layers` are lower bounds unless `reach_exact`.
    reach_exact : bool
        Whether `components` and `layers` hold token by token.
    """

    shape: tuple[int, int]
    tile: tuple[int, int]
    token_density: float
    tile_density: float
    fill: float
    tokens: int
    tiles: int
    all_tiles: int
    interval: int
    full: int
    bits: int
    distinct_bits: int
    flops: int
    dense_flops: int
    bytes: int
    dense_bytes: int
    row_min: int
    row_mean: float
    row_max: int
    empty_rows: int
    components: int | None
    layers: int | None
    node: int
    reach_exact: bool

    @property
    def imbalance(self) -> float:
        """Longest tile row over the mean one; 1 is perfectly balanced."""
        return self.row_max / self.row_mean if self.row_mean else 1.0

    def __str__(self):
        unit = "tokens" if self.node == 1 else f"blocks of {self.node} tokens"
        bound = "" if self.reach_exact else ">= "
        components, layers = "undefined for nq != nk", "undefined for nq != nk"
        if self.components is not None:
            components = f"{bound}{self.components} ({unit})"
            layers = "never" if self.layers is None else f"{bound}{self.layers}"
        return "\n".join(
            [
                f"mask            {self.shape[0]} x {self.shape[1]}, "
                f"tiles of {self.tile[0]} x {self.tile[1]}",
                f"token density   {self.token_density:8.4%}   {self.tokens:,} pairs",
                f"tile density    {self.tile_density:8.4%}   "
                f"{self.tiles:,} of {self.all_tiles:,} tiles",
                f"fill            {self.fill:8.4%}   of the live tiles' cells",
                f"tile kinds      {self.full:,} full, {self.interval:,} interval, "
                f"{self.bits:,} bits ({self.distinct_bits:,} distinct)",
                f"flops           {_share(self.flops, self.dense_flops):8.4%}   of dense "
                f"({self.flops:.3g})",
                f"bytes           {_share(self.bytes, self.dense_bytes):8.4%}   of dense "
                f"({self.bytes:.3g})",
                f"tiles per row   {self.row_min} / {self.row_mean:.2f} / {self.row_max} "
                f"(min / mean / max), imbalance {self.imbalance:.2f}",
                f"empty rows      {self.empty_rows}",
                f"components      {components}",
                f"layers to reach {layers}",
            ]
        )


def stats(mask, tile, head_dim, itemsize):
    """See `Mask.stats`: `tile` is an int or a pair ``(tile_m, tile_n)``."""
    tile = _check.sizes("tile", tile)
    head_dim = _check.integer("head_dim", head_dim, 1)
    itemsize = _check.integer("itemsize", itemsize, 1)
    tiles = mask.tiles(*tile)
    rows, cols = tiles.coordinates()
    nq, nk = mask.shape
    tokens = tiles.count_nonzero()
    cells = int(tiles.grid.area(rows, cols).sum())
    start, stop = tiles.grid.columns(cols)
    keys = int((stop - start).sum())
    per_row = np.diff(tiles.kinds.indptr)
    kinds = tiles.counts()
    stationary = nq * (2 * head_dim * itemsize + 4)
    all_tiles = tiles.grid.n_row * tiles.grid.n_col
    components, layers, node, exact = _reach(mask, tiles)
    return MaskStats(
        shape=mask.shape,
        tile=(tiles.tile_m, tiles.tile_n),
        token_density=_share(tokens, nq * nk),
        tile_density=_share(rows.size, all_tiles),
        fill=_share(tokens, cells),
        tokens=tokens,
        tiles=rows.size,
        all_tiles=all_tiles,
        **kinds,
        distinct_bits=len(tiles.bits),
        flops=4 * head_dim * cells,
        dense_flops=4 * head_dim * nq * nk,
        bytes=stationary + 2 * head_dim * itemsize * keys,
        dense_bytes=stationary + 2 * head_dim * itemsize * nk * tiles.grid.n_row,
        row_min=int(per_row.min(initial=rows.size)),
        row_mean=_share(rows.size, per_row.size),
        row_max=int(per_row.max(initial=0)),
        empty_rows=_empty_rows(tiles),
        components=components,
        layers=layers,
        node=node,
        reach_exact=exact,
    )


def _share(part, whole):
    return part / whole if whole else 0.0


def _empty_rows(tiles):
    rows, _ = tiles.coordinates()
    seen = np.zeros((tiles.grid.n_row, tiles.tile_m), bool)
    full = tiles.kinds.data == FULL
    seen[rows[full]] = True
    rest = np.flatnonzero(~full)
    for chunk in tiles.grid.chunks(rest.size, tiles.tile_m * tiles.tile_n):
        at = rest[chunk]
        np.logical_or.at(seen, rows[at], tiles.cells(at).any(2))
    return int(tiles.shape[0] - np.count_nonzero(seen.ravel()[: tiles.shape[0]]))


def _reach(mask, tiles):
    """Components, layers, tokens per node of the attention graph, and whether that is exact."""
    n = mask.shape[0]
    if n != mask.shape[1] or n == 0:
        return None, None, 1, True
    node, exact, graph = 1, True, None
    if n <= MAX_NODES:
        graph = mask.to_scipy()
    else:
        unit = math.lcm(tiles.tile_m, tiles.tile_n)
        node = -(-n // (MAX_NODES * unit)) * unit
        graph, exact = _coarse(tiles, node)
    from scipy.sparse.csgraph import connected_components, shortest_path  # slow to import

    components, _ = connected_components(graph, directed=False)
    # Row i of the graph lists the keys that query i reads; a token also keeps its own value.
    steps = shortest_path(graph, method="D", unweighted=True)
    edges = coo_array(graph)
    causal = (edges.col <= edges.row).all()
    longest = steps[np.tri(len(steps), dtype=bool)].max() if causal else steps.max()
    layers = int(longest) if np.isfinite(longest) else None
    return int(components), layers, node, exact


def _coarse(tiles, node):
    """Graph of `node x node` blocks touched by a live tile, and whether all are attended whole."""
    rows, cols = tiles.coordinates()
    count = -(-tiles.shape[0] // node)
    place = (rows * tiles.tile_m // node, cols * tiles.tile_n // node)
    graph = csr_array(coo_array((tiles.tile_counts(), place), shape=(count, count)))
    size = np.minimum(node, tiles.shape[0] - np.arange(count) * node)
    edges = coo_array(graph)
    return graph, bool((edges.data == size[edges.row] * size[edges.col]).all())
