"""What a computing warpgroup of the Hopper forward kernel does: see :mod:`.kernel`."""

from masks import FULL
from nbflash.backends.sm90.forward.alibi_gemm import make_straight
from nbflash.backends.sm90.forward.config import END, FIRST
from nbflash.backends.sm90.forward.epilogue import (
    ALL,
    PAST,
    make_finish_row,
    make_masking,
    make_stages,
)
from nbflash.backends.sm90.forward.mainloop_overlap import make_halves
from nbflash.backends.sm90.forward.mainloop_pingpong import make_whole
from nbflash.backends.sm90.shared.dropout import make_drawing
from nbflash.backends.sm90.shared.score import make_scoring
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_wait
from nbflash.cuda.ptx.tma import bulk_wait_read
from nbflash.cuda.tile.ring import make_advance
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import make_warpgroup_of


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, masking, operands, params, drawn, thread)``, for every
    thread.

    A tile's work is that of the configuration's form, halves or a whole, which brings

        q_of(smem, place, stage, turn, thread)   Q as its products take it
        start(base, q, turn)                     the state before the first tile
        make_step(masked, first)                 one tile; one form per kind of tile
        last(state, v_ago, turn)                 the last product: O, m, l

    ``step(state, q, now, ago, tile, keep, ending, smem, place, scoring, who)``: ``q``, ``now`` and
    ``ago`` say where Q, this tile and the one before are, ``tile`` its kind, first key, row and
    head, ``ending`` which row ends where another begins; ``scoring`` is that of
    :mod:`nbflash.backends.sm90.shared.score`, the operands, and what
    :mod:`nbflash.backends.sm90.shared.dropout` draws. Returns the state, the record of the next
    tile and where its Q is.
    """
    warpgroup_of, STAGED = make_warpgroup_of(cfg.consumers), cfg.q_stages > 1
    FULL_Q = cfg.barriers.full_q
    q_of, start, make_step, last = make_halves(cfg) if cfg.halves else make_whole(cfg)
    step_full, step_masked = make_step(False, False), make_step(True, False)
    FULL_TILES = cfg.full_tiles
    step_first = make_step(not FULL_TILES, True)
    record_of, k_of, v_of, _ = make_stages(cfg)
    keep_of, _ = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    where_of, scoring_of = make_scoring(cfg)
    _, spot_of, drawing_of = make_drawing(cfg)
    straight = make_straight(cfg)
    advance, advance_v = make_advance(cfg.k_stages), make_advance(cfg.v_stages)

    @inlined
    def compute_stream(smem, place, result, masking, operands, params, drawn, thread):
        base, _ = place
        turn, zero = types.int32(warpgroup_of(thread)), types.int32(0)
        heads, scale, dropping = result[5:]
        thread = opaque(types.int32(thread))
        lead = opaque(types.int32(thread % 128))
        who = thread, lead, turn
        kind, n0, next_row, next_bh = record_of(smem, place, zero, zero)
        if kind != END:
            row, bh, now = types.int32(PAST), zero, (zero, zero, zero, zero)
            mbarrier_wait(base + FULL_Q, 0)
            q = q_of(smem, place, zero, turn, thread), zero, zero
            # O of no row, which nobody stores: of no weights, and K instead of V.
            state, ago = start(base, q[0], turn), (k_of(base, zero), types.int32(-1))
            where = where_of(next_row, next_bh, heads, scale, params, thread)
            spot = spot_of(drawn, next_row, next_bh, heads, thread)
            while kind != END:
                if kind == FULL and straight(row, n0, params, turn):
                    keep, ending = (types.uint32(ALL), types.uint32(ALL)), zero
                    tile = kind, (n0, row, bh)
                    drawing = drawing_of(drawn, spot, dropping, n0, thread)
                    scoring = scoring_of(where, row, n0, scale, params, thread), operands, drawing
                    state, following, q = step_full(
                        state, q, now, ago, tile, keep, ending, smem, place, scoring, who
                    )
                elif FULL_TILES or kind & FIRST:
                    kind, ending = kind & ~FIRST, (row, bh, result)
                    keep = keep_of(kind, n0, next_row, next_bh, masking, thread)
                    tile = kind, (n0, next_row, next_bh)
                    where = where_of(next_row, next_bh, heads, scale, params, thread)
                    spot = spot_of(drawn, next_row, next_bh, heads, thread)
                    drawing = drawing_of(drawn, spot, dropping, n0, thread)
                    scoring = scoring_of(where, next_row, n0, scale, params, thread)
                    scoring = scoring, operands, drawing
                    state, following, q = step_first(
                        state, q, now, ago, tile, keep, ending, smem, place, scoring, who
                    )
                    row, bh = next_row, next_bh
                else:
                    keep, ending = keep_of(kind, n0, row, bh, masking, thread), zero
                    tile = kind, (n0, row, bh)
                    drawing = drawing_of(drawn, spot, dropping, n0, thread)
                    scoring = scoring_of(where, row, n0, scale, params, thread), operands, drawing
                    state, following, q = step_masked(
                        state, q, now, ago, tile, keep, ending, smem, place, scoring, who
                    )
                kind, n0, next_row, next_bh = following
                ago = v_of(base, now[2]), now[2]
                now = advance(now[0], now[1]) + advance_v(now[2], now[3])
            acc, m, l = last(state, ago[0], turn)
            finish_row(acc, m, l, row, bh, result, q[1], base, turn, thread)
            if STAGED and lead == 0:
                bulk_wait_read()

    return compute_stream
