"""Masks of every leaf and node kind with their definition written out in plain NumPy."""

import inspect
import textwrap

import numpy as np
from scipy.sparse import csr_array

import masks
from masks.leaves import Columns, Diagonals

N = 53  # prime: no tile or block size divides it
BLOCK = 6
PARENTS = (-1, 0, 0, 1, 1, 2, 5, 5, 3, 8, 0)


def index(nq, nk=None):
    """Column of query indices and row of key indices."""
    return np.arange(nq)[:, None], np.arange(nq if nk is None else nk)[None, :]


def butterfly_blocks(count, stages, radix=2):
    """Flat butterfly as the factor supports of Pixelfly's butterfly_factor, digit by digit."""
    row, col = index(count)
    keep = row == col
    for stage in range(stages):
        stride = radix**stage
        keep |= (row // stride // radix == col // stride // radix) & (row % stride == col % stride)
    return keep


def spread(blocks, block, nq, nk=None):
    """Repeat a boolean matrix of blocks over its cells and cut it to (nq, nk)."""
    nk = nq if nk is None else nk
    return np.kron(blocks, np.ones((block, block), bool))[:nq, :nk]


def ancestors(parents, prefix):
    keep = np.zeros((len(parents), prefix + len(parents)), bool)
    keep[:, :prefix] = True
    for node in range(len(parents)):
        at = node
        while at >= 0:
            keep[node, prefix + at] = True
            at = parents[at]
    return keep


def neighbourhood_1d(n, k, s, d):
    """NATTEN's predicate, cell by cell."""
    keep = np.zeros((n, n), bool)
    for q in range(n):
        group, length = q % d, len(range(q % d, n, d))
        centre = min(q // d // s * s + s // 2, length - 1)
        centre = min(max(centre, k // 2), length - 1 - (k // 2 + k % 2 - 1))
        for kv in range(group, n, d):
            keep[q, kv] = -(k // 2) <= kv // d - centre <= k // 2 + k % 2 - 1
    return keep


def plain_cases():
    """Name -> (mask, dense definition) for plain masks."""
    i, j = index(N)
    row, col = index(-(-N // BLOCK))
    band = abs(row - col) <= 1
    small = np.subtract.outer(*2 * [np.arange(-(-N // 3))])
    small_blocks = (abs(small) <= 1) | (small % 3 == 0)
    rng = np.random.default_rng(7)
    bitmap = rng.random((N, N)) < 0.3
    verticals = [*range(7), *range(8, 20), 40]
    document = np.repeat(np.arange(4), (20, 0, 13, 20))
    image_row, image_col = i // 8, i % 8
    p = np.arange(30)[:, None] + 23  # 30 queries at the end of 53 keys
    return {
        "dense": (masks.dense(N), (i >= 0) & (j >= 0)),
        "causal": (masks.causal(N), j <= i),
        "causal-wide": (masks.causal(30, N), j <= p),
        "causal-tall": (masks.causal(N, 30), j[:, :30] <= i - 23),
        "window": (masks.window(N, left=9, right=4), (i - 9 <= j) & (j <= i + 4)),
        "window-left": (masks.window(30, N, left=3), j >= p - 3),
        "window-tall": (masks.window(N, 30, left=5, right=1), abs(i - 23 - j[:, :30] - 2) <= 3),
        "prefix": (masks.prefix(N, 17), (j <= i) | (j < 17)),
        "documents": (masks.documents([20, 0, 13, 20]), document[:, None] == document),
        "documents-causal": (
            masks.documents([20, 0, 13, 20], causal=True),
            (document[:, None] == document) & (j <= i),
        ),
        "chunked": (masks.chunked(N, 10), (i // 10 == j // 10) & (j <= i)),
        "block-diagonal": (masks.block_diagonal(N, 10), i // 10 == j // 10),
        "butterfly": (masks.butterfly(N, BLOCK), spread(butterfly_blocks(9, 4), BLOCK, N)),
        "butterfly-causal": (
            masks.butterfly(N, BLOCK, causal=True),
            spread(butterfly_blocks(9, 4), BLOCK, N) & (j <= i),
        ),
        "butterfly-radix3": (
            masks.butterfly(N, 4, radix=3, stages=2),
            spread(butterfly_blocks(14, 2, 3), 4, N),
        ),
        "local": (masks.local(N, BLOCK), spread(band, BLOCK, N)),
        "strided": (
            masks.strided(N, BLOCK, 4),
            spread(band | ((row - col) % 4 == 0), BLOCK, N),
        ),
        "small-blocks-window": (  # few tiles of many blocks: each block is looked up
            masks.strided(N, 3, 3) & masks.window(N, left=4, right=4),
            spread(small_blocks, 3, N) & (abs(i - j) <= 4),
        ),
        "strided-token": (
            masks.strided(N, 1, 7, 3, causal=True),
            (j <= i) & ((i - j <= 3) | ((i - j) % 7 == 0)),
        ),
        "dilated": (masks.dilated(N, 3, 5), (abs(i - j) <= 15) & ((i - j) % 5 == 0)),
        "fixed": (
            masks.fixed(N, BLOCK, 4),
            spread((row // 4 == col // 4) | (col % 4 == 3), BLOCK, N),
        ),
        "global-local": (
            masks.global_local(N, BLOCK, 2),
            spread((row < 2) | (col < 2) | band, BLOCK, N),
        ),
        "sinks": (masks.sinks(N, 5, 12), (j <= i) & ((j < 5) | (i - j < 12))),
        "vertical-slash": (
            masks.vertical_slash(N, verticals, [0, 1, 25]),
            (j <= i) & (np.isin(j, verticals) | np.isin(i - j, [0, 1, 25])),
        ),
        "axial": (
            masks.axial(6, 8),
            ((image_row == image_row.T) | (image_col == image_col.T))[:48, :48],
        ),
        "tree": (masks.tree(PARENTS, prefix=9), ancestors(PARENTS, 9)),
        "tree-wide": (
            masks.tree(PARENTS, 9, nk=20 + len(PARENTS)),
            np.pad(ancestors(PARENTS, 9), ((0, 0), (0, 11))),
        ),
        "neighbourhood": (masks.neighborhood(N, 6, 2), neighbourhood_1d(N, 6, 2, 1)),
        "neighbourhood-dilated": (
            masks.neighborhood(N, 5, 1, 4),
            neighbourhood_1d(N, 5, 1, 4),
        ),
        "neighbourhood-2d": (
            masks.neighborhood((6, 9), (3, 4), (1, 2), (2, 1)),
            np.kron(neighbourhood_1d(6, 3, 1, 2), neighbourhood_1d(9, 4, 2, 1)),
        ),
        "bits": (masks.from_dense(bitmap), bitmap),
        "function": (masks.from_function(lambda q, kv: (q * kv) % 3 == 1, N), i * j % 3 == 1),
        "union": (
            masks.butterfly(N, BLOCK) | masks.window(N, left=4, right=2),
            spread(butterfly_blocks(9, 4), BLOCK, N) | ((i - 4 <= j) & (j <= i + 2)),
        ),
        "intersection": (
            masks.local(N, BLOCK) & masks.causal(N),
            spread(band, BLOCK, N) & (j <= i),
        ),
        "complement": (~masks.butterfly(N, BLOCK), ~spread(butterfly_blocks(9, 4), BLOCK, N)),
        "difference": (masks.causal(N) & ~masks.from_dense(bitmap), (j <= i) & ~bitmap),
        "transposed-ragged": (
            masks.neighborhood((6, 9), (3, 4)).T,
            np.kron(neighbourhood_1d(6, 3, 1, 1), neighbourhood_1d(9, 4, 1, 1)).T,
        ),
        "two-intervals": (~masks.window(N, left=8, right=3), ~((i - 8 <= j) & (j <= i + 3))),
        "empty": (~masks.dense(N), np.zeros((N, N), bool)),
        "diagonals-wide": (Diagonals(30, N, [-9, 0, 1, 30]), np.isin(p - j, [-9, 0, 1, 30])),
        "diagonals-tall": (Diagonals(N, 30, [-3, 0, 17]), np.isin(i - 23 - j[:, :30], [-3, 0, 17])),
        "columns-wide": (Columns(30, bitmap[0]), np.broadcast_to(bitmap[0], (30, N))),
        "bits-wide": (masks.from_dense(bitmap[:30]), bitmap[:30]),
        "blocks-tall": (
            masks.from_scipy(csr_array(bitmap[:9, :5]), (6, 7), shape=(N, 30)),
            np.kron(bitmap[:9, :5], np.ones((6, 7), bool))[:N, :30],
        ),
        "no-diagonals": (masks.toeplitz(N, []), np.zeros((N, N), bool)),
    }


def assert_tiles_exact(mask, dense, tile_m, tile_n):
    """Every tile has the right kind, and together the tiles hold exactly the mask's cells."""
    tiles = mask.tiles(tile_m, tile_n)
    nq, nk = mask.shape
    n_row, n_col = -(-nq // tile_m), -(-nk // tile_n)
    padded = np.zeros((n_row * tile_m, n_col * tile_n), bool)
    padded[:nq, :nk] = dense
    inside = np.zeros_like(padded)
    inside[:nq, :nk] = True
    bounded = np.zeros_like(padded)
    key = np.arange(nk)
    bounded[:nq, :nk] = (tiles.lo[:, None] <= key) & (key < tiles.hi[:, None])

    def cut(matrix):
        return matrix.reshape(n_row, tile_m, n_col, tile_n).swapaxes(1, 2)

    cells, inside, bounded = cut(padded), cut(inside), cut(bounded)
    kinds = tiles.kinds.toarray()
    assert tiles.kinds.shape == (n_row, n_col)
    assert ((kinds != masks.ABSENT) == cells.any((2, 3))).all()
    whole = (np.arange(n_col) + 1) * tile_n <= nk
    full = cells.any((2, 3)) & (cells == inside).all((2, 3)) & whole
    assert ((kinds == masks.FULL) == full).all()
    interval = kinds == masks.INTERVAL
    assert (cells[interval] == bounded[interval]).all()
    words = -(-tile_n // 32)
    assert tiles.bits.shape[1:] == (tile_m, words)
    for r, c in np.argwhere(kinds >= masks.BITS):
        word = tiles.bits[kinds[r, c] - masks.BITS]
        column = np.arange(words * 32)
        bit = (word[:, column // 32] >> (column % 32).astype(np.uint32)) & 1
        assert (bit[:, :tile_n] == cells[r, c]).all()
        assert not bit[:, tile_n:].any()
    assert len({word.tobytes() for word in tiles.bits}) == len(tiles.bits)
    assert (tiles.dense() == dense).all()
    assert tiles.count_nonzero() == dense.sum()


def plant(monkeypatch, owner, name, text, fault):
    """Replace a text of a function by a faulty one."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1
    scope = {}
    exec(source.replace(text, fault), function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope[name])
