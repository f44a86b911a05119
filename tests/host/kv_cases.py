"""Numbered tokens for the tests of KVCache, and what it holds of them."""

import numpy as np

HEADS, D = 2, 3


def tokens(count, n, first=0):
    """Keys that are numbered on from ``first``, and values that are their negatives."""
    numbers = np.arange(first, first + count * n, dtype=np.float32).reshape(count, n, 1, 1)
    k = numbers + np.arange(HEADS * D, dtype=np.float32).reshape(HEADS, D) / 64
    return k, -k


def contents(cache, sequence):
    """Keys and values of a sequence, read through its block table."""
    table, length = cache.block_table([sequence])[0], cache.lengths([sequence])[0]
    assert len(table) == -(-length // cache.page_size)
    assert ((table >= 0) & (table < cache.pages)).all()
    return [x[table].reshape(-1, HEADS, D)[:length] for x in (cache.k, cache.v)]
