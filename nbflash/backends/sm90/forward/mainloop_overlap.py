"""The Hopper forward's tiles by halves: see :mod:`.kernel`.

The products of one half run under the softmax of the other: at 64 columns the exponentials take as
long as the products, and with softcap longer at any width. Q of 64 columns stays in registers.
"""

from masks import FULL
from nbflash.backends.sm90.forward.config import FIRST
from nbflash.backends.sm90.forward.epilogue import (
    PAST,
    make_finish_row,
    make_masking,
    make_stages,
    poisoned,
)
from nbflash.backends.sm90.shared.dropout import make_dropped
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.backends.sm90.shared.score import make_scored
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
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
    """``q_of, start, make_step, last``: see :func:`~.consumer.make_compute_stream`.

    ``state`` is O, P of the last tile's second half, S of this one's first, m, l and whether
    a row of the warp has met no key.
    """
    HALF, Q_BYTES = cfg.tile_n // 2, cfg.q_bytes
    barriers = cfg.barriers
    FULL_Q, EMPTY_Q, EMPTY_K = barriers.full_q, barriers.empty_q, barriers.empty_k
    FULL_V, EMPTY_V = barriers.full_v, barriers.empty_v
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
    _, bad_of = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    record_of, k_of, v_of, release_q = make_stages(cfg)
    wait_all = wgmma_wait(0)
    advance, advance_q = map(make_advance, (cfg.k_stages, cfg.q_stages))
    before = make_before(cfg.q_stages)

    @inlined
    def q_of(smem, place, stage, turn, thread):
        """Q of a thread's rows, in registers, or the lower word of its descriptor."""
        base, words = place
        if not KEPT:
            return types.uint32(lower(base + stage * Q_BYTES + turn * 64 * ROW_BYTES, 16))
        row = row_of_thread(thread)
        at = words + stage * (Q_BYTES // 4) + row * (ROW_BYTES // 4) + thread % 4
        return load_kept(smem, types.int32(at), types.int32(row & 7))

    @inlined
    def start(base, q, turn):
        wgmma_fence()
        s = issue_qk(S_START, q, k_of(base, types.int32(0)))
        wgmma_commit()
        wait_all()
        return O_START, P_START, after_wait(s), PAIR, PAIR, types.boolean(1)

    def make_step(masked, first):
        @inlined
        def step(state, q, now, ago, tile, keep, ending, smem, place, scoring, who):
            acc, p, s_a, m, l, fresh = state
            (kind, _), scale = tile, unit_of(scoring[0])
            base, words = place
            (q_now, q_stage, q_phase), (stage, phase, v_stage, v_phase) = q, now
            v_ago, is_there = ago
            thread, lead, turn = who
            after = advance(stage, phase)
            following = record_of(smem, place, after[0], after[1])
            # O += P V of the last second half;  S = Q Kᵀ of this one
            wgmma_fence()
            acc = issue_pv(acc, p, v_ago + NEXT_HALF)
            s_b = issue_qk(S_START, q_now, k_of(base, stage) + NEXT_HALF)
            wgmma_commit()
            s_a = scored_a(s_a, scoring[0])
            if masked and (not first or kind != FULL):
                s_a = keep_a(s_a, keep)
            if first:
                m_ago, l_ago = m, l
                weights, m, sums, fresh = begin(s_a, scale)
                l = PAIR
            else:
                weights, sums, outgrew = attempt(s_a, m, scale)
            mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)
            wait_all()
            acc, s_b = after_wait(acc), after_wait(s_b)
            if lead == 0:
                mbarrier_arrive(base + EMPTY_K + 8 * stage)
                if not first or is_there >= 0:
                    mbarrier_arrive(base + EMPTY_V + 8 * is_there)
            if first:
                row, bh, result = ending
                q_ago = before(q_stage)
                if row != PAST:
                    finish_row(acc, m_ago, l_ago, row, bh, result, q_ago, base, turn, thread)
                acc = O_START
            elif fresh | outgrew:
                weights, m, l, sums, fresh, alpha = careful(s_a, m, l, scale)
                acc = scale_fragment(acc, alpha)
            l = l[0] + sums[0], l[1] + sums[1]
            if masked and kind != FULL:
                l = poisoned(l, bad_of(smem, words, v_stage, keep, thread))
            if following[0] & FIRST:
                if lead == 0:
                    if not STAGED:
                        mbarrier_arrive(base + EMPTY_Q + 8 * q_stage)
                    elif first and row != PAST:  # a row of one tile: its Q is in the way
                        release_q(base, q_ago)
                q_stage, q_phase = advance_q(q_stage, q_phase)
                mbarrier_wait(base + FULL_Q + 8 * q_stage, q_phase)
                q_now = q_of(smem, place, q_stage, turn, thread)
            # O += P V of this first half;  S = Q Kᵀ of the next
            p = dropped_a(pack(weights), scoring[2])
            wgmma_fence()
            acc = issue_pv(acc, p, v_of(base, v_stage))
            s_a = issue_qk(S_START, q_now, k_of(base, after[0]))
            wgmma_commit()
            s_b = scored_b(s_b, scoring[0])
            if masked and (not first or kind != FULL):
                s_b = keep_b(s_b, keep)
            weights, sums, outgrew = attempt(s_b, m, scale)
            wait_all()
            acc, s_a = after_wait(acc), after_wait(s_a)
            if first and STAGED and lead == 0 and row != PAST and not following[0] & FIRST:
                release_q(base, q_ago)
            if fresh | outgrew:
                weights, m, l, sums, fresh, alpha = careful(s_b, m, l, scale)
                acc = scale_fragment(acc, alpha)
            l = l[0] + sums[0], l[1] + sums[1]
            p = dropped_b(pack(weights), scoring[2])
            return (acc, p, s_a, m, l, fresh), following, (q_now, q_stage, q_phase)

        return step

    @inlined
    def last(state, v_ago, turn):
        acc, p, _, m, l, _ = state
        wgmma_fence()
        acc = issue_pv(acc, p, v_ago + NEXT_HALF)
        wgmma_commit()
        wait_all()
        return after_wait(acc), m, l

    return q_of, start, make_step, last
