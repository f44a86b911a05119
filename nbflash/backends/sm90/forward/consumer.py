"""What a consumer warpgroup of the Hopper forward kernel does: see :mod:`.kernel`."""

from masks import FULL
from nbflash.backends.sm90.forward.alibi_gemm import make_straight
from nbflash.backends.sm90.forward.epilogue import PAST, make_finish_row
from nbflash.backends.sm90.forward.mainloop_overlap import make_halves
from nbflash.backends.sm90.forward.mainloop_pingpong import make_whole
from nbflash.backends.sm90.forward.rings import make_rings
from nbflash.backends.sm90.shared.config import END, FIRST
from nbflash.backends.sm90.shared.dropout import make_drawing
from nbflash.backends.sm90.shared.masking import ALL, make_keep_of
from nbflash.backends.sm90.shared.score import make_scoring
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.tma import bulk_wait_read
from nbflash.cuda.tile.ring import make_advance
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import make_warpgroup_of


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, masking, operands, params, drawn, thread)``, for every
    thread of the consumer warpgroups.

    A tile's work is that of the configuration's `Mainloop`, by halves or as a whole.
    """
    warpgroup_of, STAGED = make_warpgroup_of(cfg.consumers), cfg.q_stages > 1
    mainloop = make_halves(cfg) if cfg.halves else make_whole(cfg)
    q_of, start, last = mainloop.q_of, mainloop.start, mainloop.last
    make_step = mainloop.make_step
    step_full, step_masked = make_step(False, False), make_step(True, False)
    FULL_TILES = cfg.full_tiles
    step_first = make_step(not FULL_TILES, True)
    rings, keep_of = make_rings(cfg), make_keep_of(cfg)
    wait_k, wait_q, k_of, v_of = rings.wait_k, rings.wait_q, rings.k_of, rings.v_of
    finish_row = make_finish_row(cfg)
    where_of, scoring_of = make_scoring(cfg)
    _, row_words_of, drawing_of = make_drawing(cfg)
    straight = make_straight(cfg)
    advance, advance_v = make_advance(cfg.k_stages), make_advance(cfg.v_stages)

    @inlined
    def row_at(m_block, bh, sources, thread):
        """What the scores of a row tile and its dropout go by."""
        heads, scale, params, _, drawn, _ = sources
        where = where_of(m_block, bh, heads, scale, params, thread)
        return where, row_words_of(drawn, m_block, bh, heads, thread)

    @inlined
    def scoring_at(where, row_words, m_block, n0, sources, thread):
        """``scoring`` of a tile of the row."""
        _, scale, params, operands, drawn, dropping = sources
        drawing = drawing_of(drawn, row_words, dropping, n0, thread)
        return scoring_of(where, m_block, n0, scale, params, thread), operands, drawing

    @inlined
    def compute_stream(smem, place, result, masking, operands, params, drawn, thread):
        base, _ = place
        warpgroup, zero = types.int32(warpgroup_of(thread)), types.int32(0)
        heads, scale, dropping = result[5:]
        sources = heads, scale, params, operands, drawn, dropping
        thread = opaque(types.int32(thread))
        lead = opaque(types.int32(thread % 128))
        ids = thread, lead, warpgroup
        kind, n0, next_block, next_bh = wait_k(smem, place, zero, zero)
        if kind != END:
            m_block, bh, now = types.int32(PAST), zero, (zero, zero, zero, zero)
            wait_q(base, zero, zero)
            q = q_of(smem, place, zero, warpgroup, thread), zero, zero
            # O of no row, which nobody stores: of no weights, and K instead of V.
            state, prior = start(base, q[0], warpgroup), (k_of(base, zero), types.int32(-1))
            where, row_words = row_at(next_block, next_bh, sources, thread)
            while kind != END:
                if kind == FULL and straight(m_block, n0, params, warpgroup):
                    keep, ending = (types.uint32(ALL), types.uint32(ALL)), zero
                    tile = kind, (n0, m_block, bh)
                    scoring = scoring_at(where, row_words, m_block, n0, sources, thread)
                    state, next_tile, q = step_full(
                        state, q, now, prior, tile, keep, ending, smem, place, scoring, ids
                    )
                elif FULL_TILES or kind & FIRST:
                    kind, ending = kind & ~FIRST, (m_block, bh, result)
                    keep = keep_of(kind, n0, next_block, next_bh, masking, thread)
                    tile = kind, (n0, next_block, next_bh)
                    where, row_words = row_at(next_block, next_bh, sources, thread)
                    scoring = scoring_at(where, row_words, next_block, n0, sources, thread)
                    state, next_tile, q = step_first(
                        state, q, now, prior, tile, keep, ending, smem, place, scoring, ids
                    )
                    m_block, bh = next_block, next_bh
                else:
                    keep, ending = keep_of(kind, n0, m_block, bh, masking, thread), zero
                    tile = kind, (n0, m_block, bh)
                    scoring = scoring_at(where, row_words, m_block, n0, sources, thread)
                    state, next_tile, q = step_masked(
                        state, q, now, prior, tile, keep, ending, smem, place, scoring, ids
                    )
                kind, n0, next_block, next_bh = next_tile
                prior = v_of(base, now[2]), now[2]
                now = advance(now[0], now[1]) + advance_v(now[2], now[3])
            acc_o, m_i, l_i = last(state, prior[0], warpgroup)
            finish_row(acc_o, m_i, l_i, m_block, bh, result, (q[1], base, warpgroup, thread))
            if STAGED and lead == 0:
                bulk_wait_read()

    return compute_stream
