"""Dropout in these kernels: see :mod:`nbflash.cuda.tile.wgmma.dropout`, whose fragments are ours.

What is kept is a word of all bits or none for each half of a packed fragment. P and dS are (1 − p)
of what they should be until results leave, if δ is. Without dropout nothing here leaves an
instruction.
"""

import operator

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.dropout import key_of, make_shifts
from nbflash.cuda.tile.tracing import equal, opaque, select, unrolled
from nbflash.cuda.tile.wgmma.dropout import (
    make_call,
    make_drop,
    make_drop_across,
    make_firsts,
    round_keys,
    words_of_row,
)

ALL = 0xFFFFFFFF


def make_random(cfg):
    """``random_of(state)`` of a launch, ``rows_of(random, q, h, b)`` of a thread's first query."""
    if not cfg.dropout:

        @inlined
        def nothing(state):
            return types.int32(0)

        @inlined
        def no_rows(random, q, h, b):
            return types.int32(0)

        return nothing, no_rows

    shifts_of, query_at, _ = make_shifts(cfg.dropout)

    @inlined
    def random_of(state):
        return round_keys(key_of(state)), shifts_of(state)

    @inlined
    def rows_of(random, q, h, b):
        """What the rows of a warp's first and second 16-row tile are for the counter."""
        keys, shifts = random
        first, second = query_at(shifts, q), query_at(shifts, q + 16)
        return words_of_row(keys, first, h, b), words_of_row(keys, second, h, b)

    return random_of, rows_of


def make_kept(dropout, m_tiles, n):
    """``kept(random, rows, threshold, n0, thread)`` of a tile of ``n`` keys, queries down."""
    (drop, _), call_of = make_drop(n), make_call(dropout, n)
    ONES = (types.uint32(ALL),) * (n // 4)

    @inlined
    def kept(random, rows, threshold, n0, thread):
        keys, shifts = random
        call = call_of(shifts, n0, types.uint32(opaque(thread)))
        words = drop(ONES, rows[0], keys, threshold, call)
        if m_tiles == 2:
            words = words + drop(ONES, rows[1], keys, threshold, call)
        return words

    return kept


def make_kept_across(dropout, m_tiles, n):
    """``kept(random, threshold, key, q, h, b)`` of a tile of ``n`` queries, keys down: of the
    thread's first key and query.
    """
    (masks, _, _), firsts_of = make_drop_across(n), make_firsts(dropout, n)
    _, _, key_at = make_shifts(dropout)

    @inlined
    def kept(random, threshold, key, q, h, b):
        keys, shifts = random
        at = firsts_of(shifts, q), types.uint32(h), types.uint32(b)
        words = masks(keys, threshold, types.uint32(key_at(shifts, key)), *at)
        if m_tiles == 2:
            below = types.uint32(key_at(shifts, key + 16))
            words = words + masks(keys, threshold, below, *at)
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
