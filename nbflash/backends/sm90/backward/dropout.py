"""Dropout in the Hopper pass over columns: see :mod:`nbflash.cuda.tile.wgmma.dropout`.

What the statistics hold is −δ (1 − p), and P and dS are (1 − p) of what they should be until dV and
dK leave.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.backends.sm90.backward.config import PLACE_WORDS
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.dropout import make_shifts
from nbflash.cuda.tile.ring import read_descriptor
from nbflash.cuda.tile.wgmma.dropout import make_drop_across, make_firsts


class Dropping(NamedTuple):
    """What `make_dropping` returns.

    draw(smem, place, stage, row, pair, drawn, dropping)   for a tile, by the thread's upper key and
                                                           first query in it
    dropped(p, drawn)                                      of packed P
    dropped_dp(dp, minus_deltas, drawn)                    of dP − δ
    factor_of(dropping)                                    1 / (1 − p)
    """

    draw: Callable
    dropped: Callable
    dropped_dp: Callable
    factor_of: Callable


def make_dropping(cfg):
    """`Dropping` of a configuration; without dropout nothing happens."""
    if not cfg.dropout:

        @inlined
        def nothing(smem, place, stage, row, pair, drawn, dropping):
            return types.int32(0)

        @inlined
        def same(p, drawn):
            return p

        @inlined
        def same_dp(dp, minus_deltas, drawn):
            return dp

        @inlined
        def one(dropping):
            return types.float32(1)

        return Dropping(nothing, same, same_dp, one)
    PLACES, (_, _, key_at) = cfg.smem.places, make_shifts(cfg.dropout)
    masks_at, drop, drop_dp = make_drop_across(cfg.tile_m)
    firsts_of = make_firsts(cfg.dropout, cfg.tile_m)

    @inlined
    def draw(smem, place, stage, row, pair, drawn, dropping):
        b, h, q, kv = read_descriptor(smem, place[1] + PLACES // 4 + PLACE_WORDS * stage)
        (keys, shifts), head = drawn, (types.uint32(h), types.uint32(b))
        key, firsts = types.uint32(key_at(shifts, kv + row)), firsts_of(shifts, q + pair)
        return masks_at(keys, dropping[0], key, firsts, *head), dropping[0]

    @inlined
    def dropped(p, drawn):
        return drop(p, drawn[0])

    @inlined
    def dropped_dp(dp, minus_deltas, drawn):
        return drop_dp(dp, minus_deltas, *drawn)

    @inlined
    def factor_of(dropping):
        return dropping[1]

    return Dropping(draw, dropped, dropped_dp, factor_of)
