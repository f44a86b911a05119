"""The Hopper forward's tiles by halves: see :mod:`.kernel`.

The products of one half run under the softmax of the other: at 64 columns the exponentials take as
long as the products, and with softcap longer at any width. Q of 64 columns stays in registers.

    tensor cores    P V(t−1, b)  S(t, b)    P V(t, a)  S(t+1, a)   P V(t, b)  S(t+1, b)
    registers       mask, softmax of t, a   mask, softmax of t, b  mask, softmax of t+1, a

Accumulators lie in registers as :mod:`.mainloop_pingpong` shows.
"""

from masks import FULL
from nbflash.backends.sm90.forward.epilogue import PAST, make_finish_row
from nbflash.backends.sm90.forward.mainloop import Mainloop
from nbflash.backends.sm90.forward.rings import make_rings
from nbflash.backends.sm90.shared.config import FIRST
from nbflash.backends.sm90.shared.dropout import make_dropped
from nbflash.backends.sm90.shared.nan_watch import make_nan_watch
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.backends.sm90.shared.score import make_scored
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import make_advance, make_before
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.gemm import (
    PANEL,
    ROW_BYTES,
    after_wait,
    lower,
    make_gemm_pv,
    make_gemm_qk,
)
from nbflash.cuda.tile.wgmma.gemm_register_a import make_gemm_kept, make_load_kept
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep, make_wgmma_softmax, scale_fragment


def make_halves(cfg):
    """The `Mainloop` of a configuration that works on a tile by halves.

    ``state`` is O, P of the last tile's second half, S of this one's first, m, l, and ``fresh`` of
    the online softmax.
    """
    HALF, Q_BYTES = cfg.tile_n // 2, cfg.q_bytes
    S_START, P_START = (types.float32(0),) * (HALF // 2), (types.uint32(0),) * (HALF // 4)
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    STAGED = cfg.q_stages > 1
    NEXT_HALF = HALF * ROW_BYTES >> 4
    KEPT, tiles = cfg.head_dim <= PANEL, (cfg.tile_m, cfg.tile_n)
    if KEPT:
        load_kept = make_load_kept(cfg.head_dim)
        issue_qk = make_gemm_kept(cfg.dtype, cfg.head_dim, negate=cfg.negate)
    else:
        issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, *tiles, negate=cfg.negate)
    issue_pv = make_gemm_pv(cfg.dtype, HALF)
    pack = make_wgmma_softmax(HALF, cfg.dtype).pack
    softmax = make_online_softmax(HALF, cfg.dtype)
    begin, attempt, careful = softmax.begin, softmax.attempt, softmax.careful
    keep_a, keep_b = make_apply_keep(HALF, 0), make_apply_keep(HALF, 1)
    (scored_a, unit_of), (scored_b, _) = make_scored(cfg, HALF, 0), make_scored(cfg, HALF, 1)
    dropped_a, dropped_b = make_dropped(cfg, HALF, 0), make_dropped(cfg, HALF, 1)
    finish_row = make_finish_row(cfg)
    rings = make_rings(cfg)
    wait_k, wait_q, wait_v = rings.wait_k, rings.wait_q, rings.wait_v
    release_k, release_q, release_v = rings.release_k, rings.release_q, rings.release_v
    k_of, v_of = rings.k_of, rings.v_of
    wait_all = wgmma_wait(0)
    advance, advance_q = map(make_advance, (cfg.k_stages, cfg.q_stages))
    before = make_before(cfg.q_stages)

    @inlined
    def q_of(smem, place, stage, warpgroup, thread):
        """Q of a thread's rows, in registers, or the lower word of its descriptor."""
        base, words = place
        if not KEPT:
            return types.uint32(lower(base + stage * Q_BYTES + warpgroup * 64 * ROW_BYTES, 16))
        row = row_of_thread(thread)
        at = words + stage * (Q_BYTES // 4) + row * (ROW_BYTES // 4) + thread % 4
        return load_kept(smem, types.int32(at), types.int32(row & 7))

    @inlined
    def start(base, q, warpgroup):
        wgmma_fence()
        s = issue_qk(S_START, q, k_of(base, types.int32(0)))
        wgmma_commit()
        wait_all()
        return O_START, P_START, after_wait(s), PAIR, PAIR, types.boolean(1)

    def make_step(masked, first):
        nan_watch = make_nan_watch(cfg, masked)

        @inlined
        def step(state, q, now, prior, tile, keep, ending, smem, place, scoring, ids):
            acc_o, p, s_a, m_i, l_i, fresh = state
            (kind, _), (score, _, drawing) = tile, scoring
            (base, words), scale = place, unit_of(score)
            (q_now, q_stage, q_phase), (stage, phase, v_stage, v_phase) = q, now
            v_prior, prior_stage = prior
            thread, lead, warpgroup = ids
            after = advance(stage, phase)
            # full_k of the next tile: its bytes arrive by TMA, every consumer waits.
            next_tile = wait_k(smem, place, after[0], after[1])

            wgmma_fence()
            # O += P V, of the second half of the tile before
            acc_o = issue_pv(acc_o, p, v_prior + NEXT_HALF)
            # S = Q Kᵀ, of this tile's second half
            s_b = issue_qk(S_START, q_now, k_of(base, stage) + NEXT_HALF)
            wgmma_commit()
            # Meanwhile the first half: S = −∞ where the mask hides it
            s_a = scored_a(s_a, score)
            if masked and (not first or kind != FULL):
                s_a = keep_a(s_a, keep)
            # P = 2^(S · scale − m), Σ P
            if first:
                m_prior, l_prior = m_i, l_i
                weights, m_i, sums, fresh = begin(s_a, scale)
                l_i = PAIR
            else:
                weights, sums, outgrew = attempt(s_a, m_i, scale)

            # full_v: TMA arrives, or the NaN watch once V is clean; every consumer waits.
            wait_v(base, v_stage, v_phase)
            wait_all()
            acc_o, s_b = after_wait(acc_o), after_wait(s_b)
            # empty_k, and empty_v of the tile before: a consumer each arrives, the producer waits.
            if lead == 0:
                release_k(base, stage)
                if not first or prior_stage >= 0:
                    release_v(base, prior_stage)
            # Where a row begins, O / l → out of the one before and O = 0; else O = α O if m rises
            if first:
                m_block, bh, result = ending
                out_stage = before(q_stage)
                if m_block != PAST:
                    out = out_stage, base, warpgroup, thread
                    finish_row(acc_o, m_prior, l_prior, m_block, bh, result, out)
                acc_o = O_START
            elif fresh | outgrew:
                weights, m_i, l_i, sums, fresh, alpha = careful(s_a, m_i, l_i, scale)
                acc_o = scale_fragment(acc_o, alpha)
            # l += Σ P
            l_i = l_i[0] + sums[0], l_i[1] + sums[1]
            l_i = nan_watch(l_i, kind, smem, words, v_stage, keep, thread)

            if next_tile[0] & FIRST:
                # empty_q: a consumer each arrives, the producer waits.
                if lead == 0:
                    if not STAGED:
                        release_q(base, q_stage)
                    elif first and m_block != PAST:  # a row of one tile: its Q is in the way
                        release_q(base, out_stage)
                q_stage, q_phase = advance_q(q_stage, q_phase)
                # full_q: its bytes arrive by TMA, every consumer waits.
                wait_q(base, q_stage, q_phase)
                q_now = q_of(smem, place, q_stage, warpgroup, thread)
            p = dropped_a(pack(weights), drawing)

            wgmma_fence()
            # O += P V, of this tile's first half
            acc_o = issue_pv(acc_o, p, v_of(base, v_stage))
            # S = Q Kᵀ, of the next tile's first half
            s_a = issue_qk(S_START, q_now, k_of(base, after[0]))
            wgmma_commit()
            # Meanwhile the second half, as the first
            s_b = scored_b(s_b, score)
            if masked and (not first or kind != FULL):
                s_b = keep_b(s_b, keep)
            weights, sums, outgrew = attempt(s_b, m_i, scale)
            wait_all()
            acc_o, s_a = after_wait(acc_o), after_wait(s_a)
            if first and STAGED and lead == 0 and m_block != PAST and not next_tile[0] & FIRST:
                release_q(base, out_stage)
            if fresh | outgrew:
                weights, m_i, l_i, sums, fresh, alpha = careful(s_b, m_i, l_i, scale)
                acc_o = scale_fragment(acc_o, alpha)
            l_i = l_i[0] + sums[0], l_i[1] + sums[1]
            p = dropped_b(pack(weights), drawing)
            return (acc_o, p, s_a, m_i, l_i, fresh), next_tile, (q_now, q_stage, q_phase)

        return step

    @inlined
    def last(state, v_prior, warpgroup):
        acc_o, p, _, m_i, l_i, _ = state
        wgmma_fence()
        # O += P V, of the last second half
        acc_o = issue_pv(acc_o, p, v_prior + NEXT_HALF)
        wgmma_commit()
        wait_all()
        return after_wait(acc_o), m_i, l_i

    return Mainloop(q_of, start, make_step, last)
