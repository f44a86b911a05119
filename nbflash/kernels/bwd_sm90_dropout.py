"""Dropout in the Hopper pass over columns: see :mod:`nbflash.tile.dropout_wgmma`.

dP starts with zeros there, and −δ is added where dS is made: what the statistics hold is −δ
(1 − p), and P and dS are (1 − p) of what they should be until dV and dK leave.
"""

from nbflash.kernels.bwd_sm90_config import PLACE_WORDS
from nbflash.ptx._asm import inlined, types
from nbflash.tile.dropout_wgmma import make_drop_across
from nbflash.tile.pipeline import read_record


def make_dropping(cfg):
    """``masks_of, dropped, dropped_dp, factor_of``; without dropout nothing happens.

    ``masks_of(smem, place, stage, row, pair, drawn, dropping)`` of a tile, by the thread's upper
    key and first query in it; ``dropped(p, masks)`` of packed P; ``dropped_dp(dp, minus_deltas,
    masks)``; ``factor_of(dropping)``, 1 / (1 − p).
    """
    if not cfg.dropout:

        @inlined
        def nothing(smem, place, stage, row, pair, drawn, dropping):
            return types.int32(0)

        @inlined
        def same(p, masks):
            return p

        @inlined
        def same_dp(dp, minus_deltas, masks):
            return dp

        @inlined
        def one(dropping):
            return types.float32(1)

        return nothing, same, same_dp, one
    PLACES = cfg.places_offset
    masks_at, dropped, dropped_dp = make_drop_across(cfg.tile_m)

    @inlined
    def masks_of(smem, place, stage, row, pair, drawn, dropping):
        b, h, q, kv = read_record(smem, place[1] + PLACES // 4 + PLACE_WORDS * stage)
        at = types.uint32(kv + row), types.uint32(q + pair), types.uint32(h), types.uint32(b)
        return masks_at(drawn, dropping[0], *at)

    @inlined
    def factor_of(dropping):
        return dropping[1]

    return masks_of, dropped, dropped_dp, factor_of
