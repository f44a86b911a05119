"""Dropout in these kernels: see :mod:`nbflash.cuda.tile.wgmma.dropout`, whose fragments are ours.

What is kept is a word of all bits or none for each half of a packed fragment. P and dS are (1 − p)
of what they should be until results leave, if δ is. Without dropout nothing here leaves an
instruction.
"""

import operator

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.dropout import key_of
from nbflash.cuda.tile.tracing import equal, opaque, select, unrolled
from nbflash.cuda.tile.wgmma.dropout import make_drop, make_drop_across, place_words, round_keys

ALL = 0xFFFFFFFF


def make_random(cfg):
    """``keys_of(state)`` of a launch and ``rows_of(keys, q, h, b)`` of a thread's first query."""
    if not cfg.dropout:

        @inlined
        def no_keys(state):
            return types.int32(0)

        @inlined
        def no_rows(keys, q, h, b):
            return types.int32(0)

        return no_keys, no_rows

    @inlined
    def keys_of(state):
        return round_keys(key_of(state))

    @inlined
    def rows_of(keys, q, h, b):
        """What the rows of a warp's first and second 16-row tile are for the counter."""
        return place_words(keys, q, h, b), place_words(keys, q + 16, h, b)

    return keys_of, rows_of


def make_kept(m_tiles, n):
    """``kept(keys, rows, threshold, n0, thread)`` of a tile of ``n`` keys, queries down."""
    drop, _ = make_drop(n)
    ONES = (types.uint32(ALL),) * (n // 4)

    @inlined
    def kept(keys, rows, threshold, n0, thread):
        group, number = types.uint32(n0 >> 5), types.uint32(opaque(thread))
        call = types.uint32(4 * group + number % 4), types.uint32((group ^ number >> 2) & 1)
        words = drop(ONES, rows[0], keys, threshold, call)
        if m_tiles == 2:
            words = words + drop(ONES, rows[1], keys, threshold, call)
        return words

    return kept


def make_kept_across(m_tiles, n):
    """``kept(keys, threshold, key, q, h, b)`` of a tile of ``n`` queries, keys down: of the
    thread's first key and query.
    """
    masks, _, _ = make_drop_across(n)

    @inlined
    def kept(keys, threshold, key, q, h, b):
        at = types.uint32(q), types.uint32(h), types.uint32(b)
        words = masks(keys, threshold, types.uint32(key), *at)
        if m_tiles == 2:
            words = words + masks(keys, threshold, types.uint32(key + 16), *at)
        return words

    return kept


@unrolled
def drop_packed(p, kept):
    """P ∘ (1 − p) Z, of packed P."""
    return tuple(map(operator.and_, p, kept))


@unrolled
def drop_values(x, kept):
    """The same of a fragment that is not packed."""
    out = []
    for n, word in enumerate(kept):
        for i, bit in ((2 * n, word & 1), (2 * n + 1, word >> 31)):
            out.append(select(equal(bit, 0), 0.0, x[i]))
    return tuple(out)
