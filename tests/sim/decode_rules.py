"""Windows and scores of decode: what kernels must give for them, whichever kernel it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from decode_cases import check, check_scored, contiguous, hide, keep_of, paged

import masks
from nbflash import scores

NQ, PAGE = 3, 16


class Kernel(NamedTuple):
    """What is tried: ``run(q, k, v, lengths, table, mask, *, window, score, scale)``.

    It gives ``(out, lse)``; ``tile`` is the number of keys of its tiles.
    """

    run: Callable
    tile: int
    dtype: Any
    heads: tuple = (4, 2)
    head_dim: int = 16

    def problem(self, nq, lengths, capacity):
        """q and contiguous caches."""
        return contiguous(nq, self.heads, self.head_dim, self.dtype, lengths, capacity)

    def lengths(self):
        """Shorter than the queries; a key behind a tile; three keys and the queries behind three.

        The last one's first query is three keys behind a tile's edge.
        """
        return np.array([2, self.tile + 1, 3 * self.tile + NQ + 3], np.int32)

    def mask(self, capacity):
        """Of the first half of the heads all keys, of the other half scattered ones."""
        scattered = masks.from_function(lambda i, j: (5 * i + 7 * j) % 11 < 6, NQ, capacity)
        half = self.heads[0] // 2
        return masks.per_head([masks.dense(NQ, capacity)] * half + [scattered] * half)


#: Of a number of keys of a tile.
WINDOWS = {
    "own": lambda tile: (0, 0),
    "edge": lambda tile: (tile + 3, None),
    "before-an-edge": lambda tile: (tile + 4, None),
    "last-tile": lambda tile: (3, 1),
    "both": lambda tile: (tile + 4, 1),
    "long": lambda tile: (5 * tile, None),
    "right": lambda tile: (None, 1),
}


def out_of_reach(table, lengths, left, tile):
    """The table with no page in the tiles that lie wholly before a window."""
    table = table.copy()
    for b, n in enumerate(lengths):
        first = max(int(n) - NQ - left, 0) // tile * tile
        table[b, : first // PAGE] = 10**6
    return table


def windowed(kernel, name, *, masked=False):
    """In pages; keys outside the window are NaN, and tiles of them are nowhere."""
    lengths, window = kernel.lengths(), WINDOWS[name](kernel.tile)
    q, k, v = kernel.problem(NQ, lengths, int(lengths.max()) + 9)
    mask = kernel.mask(k.shape[1]) if masked else None
    keep = keep_of(lengths, NQ, window, mask)
    *pages, table = paged(*hide(k, v, lengths, keep), lengths=lengths, page_size=PAGE)
    if window[0] is not None:
        table = out_of_reach(table, lengths, window[0], kernel.tile)
    got = kernel.run(q, *pages, lengths, table, mask, window=window)
    check(got, q, k, v, lengths, keep)


def scored(kernel, name, *, window=None, masked=False, scale=None):
    """Contiguous; the first sequence is shorter than the queries."""
    lengths = kernel.lengths()
    q, k, v = kernel.problem(NQ, lengths, int(lengths.max()) + 9)
    mask, capacity = (kernel.mask(k.shape[1]) if masked else None), k.shape[1]
    keep, score_of = keep_of(lengths, NQ, window, mask), score_named(name, capacity, q.shape[2])
    how = {"window": window, "score": score_of(capacity), "scale": scale}
    got = kernel.run(q, k, v, lengths, None, mask, **how)
    check_scored(got, q, k, v, lengths, score_of, keep, scale)


def before_the_first_key(kernel, before=2):
    """More tokens than keys, of which there is a whole tile that a mask does not hide."""
    kernel = kernel._replace(heads=(1, 1))
    nq, lengths = kernel.tile + 2 + before, np.array([kernel.tile + 2], np.int32)
    q, k, v = kernel.problem(nq, lengths, 2 * kernel.tile)
    v[0, 0], mask = np.inf, masks.dense(nq, 2 * kernel.tile)
    out, lse = kernel.run(q, k, v, lengths, None, mask, score=scores.softcap(0.7))
    assert not out[0, :before].any()
    assert np.isneginf(lse[0, :, :before]).all()
    assert not np.isfinite(out[0, before:]).any()


def score_named(name, capacity, heads):
    """``score_of(n)``: a score over n keys, whose arrays are those of the capacity."""
    rng = np.random.default_rng(1)
    both = rng.standard_normal((1, heads, capacity, capacity)).astype(np.float32)
    keys = rng.standard_normal((1, 1, 1, capacity)).astype(np.float32)
    return {
        "softcap": lambda n: scores.softcap(0.7),
        "alibi": lambda n: scores.alibi(0.5 / 2 ** np.arange(heads)),
        "bias": lambda n: scores.bias(both[..., :n, :n]),
        "keys": lambda n: scores.compose(scores.softcap(2.0), scores.bias(keys[..., :n])),
        "place": lambda n: scores.custom(_place, _one),
    }[name]


def _place(s, b, h, q_idx, kv_idx):
    return s + 0.05 * (b + h + q_idx % 5 * (kv_idx % 3))


def _one(s, b, h, q_idx, kv_idx):
    return 1.0


def windows(kernel):
    windowed(kernel, "edge")
    windowed(kernel, "both", masked=True)


def scores_of_places(kernel):
    scored(kernel, "place", window=(4, None), masked=True)
    scored(kernel, "alibi")


#: Cases of families of planted faults, each of a `Kernel`.
RULES = {"windows": windows, "scores": scores_of_places, "before": before_the_first_key}
