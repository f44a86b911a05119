"""Dropout in these kernels: see :mod:`nbflash.cuda.tile.wgmma.dropout`, whose fragments are ours.

Without dropout nothing here leaves an instruction.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.dropout import key_of
from nbflash.cuda.tile.tracing import hide, unrolled
from nbflash.cuda.tile.wgmma.dropout import make_drop, place_words, round_keys


def make_dropped(cfg):
    """``keys_of(state)``, ``rows_of(keys, q, h, b)`` and ``dropped(p, keys, rows, threshold, n0,
    thread)``: P packed of a forward's tile, without what is dropped.
    """
    if not cfg.dropout:

        @inlined
        def no_keys(state):
            return types.int32(0)

        @inlined
        def no_rows(keys, q, h, b):
            return types.int32(0)

        @inlined
        def same(p, keys, rows, dropping, n0, thread):
            return p

        return no_keys, no_rows, same
    drop, _ = make_drop(cfg.tile_n)
    TWO = cfg.m_tiles == 2

    @unrolled
    def halves(p):
        return tuple(p[: len(p) // 2]), tuple(p[len(p) // 2 :])

    @inlined
    def keys_of(state):
        return round_keys(key_of(state))

    @inlined
    def rows_of(keys, q, h, b):
        """What the rows of each 16-row tile are for the counter."""
        return place_words(keys, q, h, b), place_words(keys, q + 16, h, b)

    @inlined
    def dropped(p, keys, rows, dropping, n0, thread):
        threshold, group, number = dropping[0], types.uint32(n0 >> 5), types.uint32(hide(thread))
        call = types.uint32(4 * group + number % 4), types.uint32((group ^ number >> 2) & 1)
        if not TWO:
            return drop(p, rows[0], keys, threshold, call)
        upper, lower = halves(p)
        upper = drop(upper, rows[0], keys, threshold, call)
        return upper + drop(lower, rows[1], keys, threshold, call)

    return keys_of, rows_of, dropped
