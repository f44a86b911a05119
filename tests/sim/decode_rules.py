"""Windows and scores of decode: what kernels must give for them, whichever kernel it is.

``run(q, k, v, lengths, table, mask, *, window, score, scale)`` gives ``(out, lse)``; ``tile`` is
the number of keys of its tiles.
"""

import numpy as np
from decode_cases import check, check_scored, contiguous, hide, keep_of, paged

import masks
from nbflash import scores

NQ, HEADS, PAGE = 3, (4, 2), 16


def lengths_of(tile):
    """Shorter than the queries; a key behind a tile; three keys and the queries behind three."""
    return np.array([2, tile + 1, 3 * tile + NQ + 3], np.int32)


def mask_of(capacity):
    """Of a group of heads all keys, of the other scattered ones."""
    scattered = masks.from_function(lambda i, j: (5 * i + 7 * j) % 11 < 6, NQ, capacity)
    return masks.per_head([masks.dense(NQ, capacity)] * 2 + [scattered] * 2)


def out_of_reach(table, lengths, left, tile, page_size=PAGE):
    """The table with no page in the tiles that lie wholly before a window."""
    table = table.copy()
    for b, n in enumerate(lengths):
        first = max(int(n) - NQ - left, 0) // tile * tile
        table[b, : first // page_size] = 10**6
    return table


def windowed(run, tile, dtype, window, mask=None, head_dim=16):
    """In pages; keys outside the window are NaN, and tiles of them are nowhere."""
    lengths = lengths_of(tile)
    q, k, v = contiguous(NQ, HEADS, head_dim, dtype, lengths, int(lengths.max()) + 9)
    mask = mask_of(k.shape[1]) if mask else None
    keep = keep_of(lengths, NQ, window, mask)
    *pages, table = paged(*hide(k, v, lengths, keep), lengths=lengths, page_size=PAGE)
    if window[0] is not None:
        table = out_of_reach(table, lengths, window[0], tile)
    got = run(q, *pages, lengths, table, mask, window=window)
    check(got, q, k, v, lengths, keep)


def scored(run, tile, dtype, name, window=None, mask=None, head_dim=16, scale=None):
    """Contiguous; the first sequence is shorter than the queries."""
    lengths = lengths_of(tile)
    q, k, v = contiguous(NQ, HEADS, head_dim, dtype, lengths, int(lengths.max()) + 9)
    mask = mask_of(k.shape[1]) if mask else None
    keep = keep_of(lengths, NQ, window, mask)
    score_of = score_named(name, k.shape[1])
    got = run(q, k, v, lengths, None, mask, window=window, score=score_of(k.shape[1]), scale=scale)
    check_scored(got, q, k, v, lengths, score_of, keep, scale)


def score_named(name, capacity):
    """``score_of(n)``: a score over n keys, whose arrays are those of the capacity."""
    rng = np.random.default_rng(1)
    both = rng.standard_normal((1, HEADS[0], capacity, capacity)).astype(np.float32)
    keys = rng.standard_normal((1, 1, 1, capacity)).astype(np.float32)
    return {
        "softcap": lambda n: scores.softcap(0.7),
        "alibi": lambda n: scores.alibi([0.5, 0.1, 0.02, 0.3]),
        "bias": lambda n: scores.bias(both[..., :n, :n]),
        "keys": lambda n: scores.compose(scores.softcap(2.0), scores.bias(keys[..., :n])),
        "place": lambda n: scores.custom(_place, _one),
    }[name]


def _place(s, b, h, q_idx, kv_idx):
    return s + 0.05 * (b + h + q_idx % 5 * (kv_idx % 3))


def _one(s, b, h, q_idx, kv_idx):
    return 1.0
