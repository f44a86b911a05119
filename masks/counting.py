"""How many cells of each tile are attended: in closed form, by smaller tiles, or by a sample."""

import math

import numpy as np

from masks.tiles import Grid

FINEST = 32  #: Tiles no larger than twice this are not cut into smaller ones.
MOST_TILES = 1 << 16  #: At a time; a picture cuts tiles into no more.
MOST_CELLS = 1 << 24  #: That a picture looks at one by one.
SAMPLE = 1 << 20  #: Cells that it looks at where there are more.


def total(mask):
    """Number of attended cells of a plain mask."""
    grid = _square(mask, picture_tile(mask, 32))
    rows, cols = np.divmod(mask._live(grid), max(grid.n_col, 1))
    return int(_count(mask, grid, rows, cols, _look).sum())


def shares(mask, tile):
    """Share of attended cells of every ``tile x tile`` tile, float ``(n_row, n_col)``.

    Closed forms are counted, at any number of tokens. What is left is cut into smaller tiles, of
    which a mask knows more, as long as these are few. Then cells are looked at: all of them, up to
    2**24, else a random sample of 2**20. So a function of a million tokens has a picture, in which
    what is thin may be missing.
    """
    grid = _square(mask, tile)
    rows, cols = np.divmod(mask._live(grid), max(grid.n_col, 1))
    image = np.zeros((grid.n_row, grid.n_col))
    image[rows, cols] = _count(mask, grid, rows, cols, _estimate) / grid.area(rows, cols)
    return image


def picture_tile(mask, size):
    """Smallest tile that gives at most `size` along the longer side and is cut well."""
    tile = max(1, -(-max(mask.shape) // size))
    part = 1
    while tile // part >= 4 * FINEST:
        part *= 4
    return -(-tile // part) * part


def _square(mask, tile):
    return Grid(*mask.shape, tile, tile)


def _count(mask, grid, rows, cols, look):
    """Attended cells of each tile, int64; what has no closed form is left to `look`."""
    counts = mask._counts(grid, rows, cols)
    unknown = np.flatnonzero(counts < 0)
    finer = _finer(grid)
    parts = finer and (grid.tile_m // finer.tile_m) ** 2
    if not finer or (look is _estimate and unknown.size * parts > MOST_TILES):
        counts[unknown] = look(mask, grid, rows[unknown], cols[unknown])
        return counts
    step = max(1, MOST_TILES // parts)
    for start in range(0, unknown.size, step):
        at = unknown[start : start + step]
        whole, *place = _cut(grid, finer, rows[at], cols[at])
        inside = np.zeros(at.size, np.int64)
        np.add.at(inside, whole, _count(mask, finer, *place, look))
        counts[at] = inside
    return counts


def _finer(grid):
    """The same cells in tiles of the largest divisor up to a quarter; None below `FINEST`."""
    tile = grid.tile_m
    sizes = range(tile // 4, FINEST - 1, -1)
    size = next((size for size in sizes if tile % size == 0), None)
    return size and Grid(grid.nq, grid.nk, size, size)


def _cut(grid, finer, rows, cols):
    """Of every smaller tile the number of the tile it is part of, its row and its column."""
    parts = np.arange(grid.tile_m // finer.tile_m)
    row = rows[:, None, None] * parts.size + parts[:, None]
    col = cols[:, None, None] * parts.size + parts
    row, col = np.broadcast_arrays(row, col)
    whole, *_ = exists = np.nonzero((row < finer.n_row) & (col < finer.n_col))
    return whole, row[exists], col[exists]


def _look(mask, grid, rows, cols):
    """Attended cells of each tile, one by one."""
    counts = np.zeros(rows.size, np.int64)
    for chunk in grid.chunks(rows.size, grid.tile_m * grid.tile_n):
        cells = mask._cells(grid, rows[chunk], cols[chunk])
        counts[chunk] = (cells & grid.existing(rows[chunk], cols[chunk])).sum((1, 2))
    return counts


def _estimate(mask, grid, rows, cols):
    """`_look` where that is quick, else estimates from a sample of each tile."""
    if rows.size * grid.tile_m * grid.tile_n <= MOST_CELLS:
        return _look(mask, grid, rows, cols)
    rng = np.random.default_rng(0)
    side = min(max(math.isqrt(SAMPLE // rows.size), 4), grid.tile_m)
    hits = np.empty(rows.size, np.int64)
    for chunk in grid.chunks(rows.size, side**2):
        q = _spread(rng, *grid.rows(rows[chunk]), side)[:, :, None]
        kv = _spread(rng, *grid.columns(cols[chunk]), side)[:, None, :]
        hits[chunk] = mask._at(q, kv).sum((1, 2))
    return hits * grid.area(rows, cols) // side**2


def _spread(rng, start, stop, count):
    """A random index from each of `count` equal parts of ``start <= index < stop``."""
    part = (np.arange(count) + rng.random((start.size, count))) / count
    return start[:, None] + (part * (stop - start)[:, None]).astype(np.int64)
