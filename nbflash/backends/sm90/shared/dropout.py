"""Dropout in the Hopper kernels: see :mod:`nbflash.cuda.tile.wgmma.dropout`.

Without dropout what is here is nothing, and leaves no instruction.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.dropout import key_of, make_shifts
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.dropout import make_call, make_drop, round_keys, words_of_row
from nbflash.cuda.tile.wgmma.gradient import make_row_gradients, make_score_gradients


def make_drawing(cfg):
    """``drawn_of(state)`` of a launch; ``row_words_of(drawn, row, bh, heads, thread)`` of a row
    tile, what is the same for its tiles; and of each of them
    ``drawing_of(drawn, row_words, dropping, n0, thread)``, which `make_dropped` takes.
    """
    if not cfg.dropout:

        @inlined
        def no_key(state):
            return types.int32(0)

        @inlined
        def no_words(drawn, row, bh, heads, thread):
            return types.int32(0)

        @inlined
        def nothing(drawn, row_words, dropping, n0, thread):
            return types.int32(0)

        return no_key, no_words, nothing
    TILE_M, (shifts_of, query_at, _) = cfg.tile_m, make_shifts(cfg.dropout)
    call_of = make_call(cfg.dropout, cfg.tile_n)

    @inlined
    def drawn_of(state):
        return round_keys(key_of(state)), shifts_of(state)

    @inlined
    def row_words_of(drawn, row, bh, heads, thread):
        (keys, shifts), (b, h) = drawn, divmod_int32(bh, heads)
        q = types.int32(row * TILE_M + row_of_thread(thread))
        return words_of_row(keys, query_at(shifts, q), h, b)

    @inlined
    def drawing_of(drawn, row_words, dropping, n0, thread):
        keys, shifts = drawn
        return keys, row_words, dropping[0], call_of(shifts, n0, types.uint32(opaque(thread)))

    return drawn_of, row_words_of, drawing_of


def make_dropped(cfg, n, part=0):
    """``dropped(p, drawing)``: P packed, of part ``part`` of ``n`` columns."""
    if not cfg.dropout:

        @inlined
        def same(p, drawing):
            return p

        return same
    drop, _ = make_drop(n, part)

    @inlined
    def dropped(p, drawing):
        keys, row_words, threshold, call = drawing
        return drop(p, row_words, keys, threshold, call)

    return dropped


def make_gradients(cfg, n):
    """``dropped_dp(dp, minus_delta, drawing)``, and then ``full, masked`` of ``(p, dp,
    minus_delta)``: dS of a tile. Dropout adds −δ, which is not added again.
    """
    if not cfg.dropout:

        @inlined
        def same(dp, minus_delta, drawing):
            return dp

        return same, *make_row_gradients(n)
    _, drop_dp = make_drop(n)
    gradients, counted, _ = make_score_gradients(n, cfg.dtype)

    @inlined
    def dropped_dp(dp, minus_delta, drawing):
        keys, row_words, threshold, call = drawing
        return drop_dp(dp, minus_delta, row_words, keys, threshold, call)

    @inlined
    def full(p, dp, minus_delta):
        return gradients(p, dp)

    @inlined
    def masked(p, dp, minus_delta):
        return counted(p, gradients(p, dp))

    return dropped_dp, full, masked
