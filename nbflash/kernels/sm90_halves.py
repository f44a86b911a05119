"""The Hopper forward's tiles by halves: narrow heads, two warpgroups; see :mod:`.fwd_sm90`.

The products of one half run under the softmax of the other, and Q stays in registers: at 64
columns the exponentials take as long as the products.
"""

from masks import FULL
from nbflash.kernels.sm90_config import FIRST
from nbflash.kernels.sm90_row import (
    PAST,
    make_begin,
    make_finish_row,
    make_masking,
    make_stages,
    poisoned,
    seen_of,
)
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_hold, wgmma_wait
from nbflash.tile.pipeline import make_advance
from nbflash.tile.warp_math import row_of_thread
from nbflash.tile.wgmma_gemm import ROW_BYTES, make_gemm_pv, settled
from nbflash.tile.wgmma_kept import make_gemm_kept, make_load_kept
from nbflash.tile.wgmma_softmax import (
    make_apply_keep,
    make_wgmma_softmax,
    row_total,
    scale_fragment,
)


def make_halves(cfg):
    """``q_of, start, make_step, last``: see :func:`~.sm90_compute.make_compute_stream`.

    ``state`` is O, P of the last tile's second half, S of this one's first, m, l and whether both
    rows have met a key.
    """
    HALF, Q_BYTES = cfg.tile_n // 2, cfg.q_bytes
    FULL_Q, EMPTY_Q, _, EMPTY_K, FULL_V, EMPTY_V, _ = cfg.barriers
    S_START, P_START = (types.float32(0),) * (HALF // 2), (types.uint32(0),) * (HALF // 4)
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    STAGED = cfg.q_stages > 1
    NEXT_HALF = HALF * ROW_BYTES >> 4
    load_kept = make_load_kept(cfg.head_dim)
    issue_qk = make_gemm_kept(cfg.dtype, cfg.head_dim, negate=cfg.negate)
    issue_pv = make_gemm_pv(cfg.dtype, HALF)
    softmax = make_wgmma_softmax(HALF, cfg.dtype)
    row_max, _, exponents, outgrown, rise, rescale, lowered, *softmax = softmax
    exponentials, row_sum, pack = softmax
    begin = make_begin(HALF, cfg.dtype)
    keep_a, keep_b = make_apply_keep(HALF, 0), make_apply_keep(HALF, 1)
    _, _, bad_of = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    record_of, k_of, v_of, release_q = make_stages(cfg)
    wait_all = wgmma_wait(0)
    advance, advance_q = map(make_advance, (cfg.k_stages, cfg.q_stages))

    @inlined
    def q_of(smem, place, stage, turn, thread):
        """Q of a thread's rows, in registers."""
        _, words = place
        row = row_of_thread(thread)
        at = words + stage * (Q_BYTES // 4) + row * (ROW_BYTES // 4) + thread % 4
        return load_kept(smem, types.int32(at), types.int32(row & 7))

    @inlined
    def go_on(s, m, l, seen, scale):
        """P and the statistics of a row that goes on; whether O must be multiplied by α."""
        e = exponents(s, m, scale)
        weights = exponentials(e)  # for nothing if m has to rise, which is rare
        alpha, grown = (types.float32(1), types.float32(1)), outgrown(e, seen)
        if grown:
            best, total = row_max(e), row_total(l)
            risen = rise(best, total)
            e, alpha, seen = lowered(e, risen), rescale(risen), seen_of(best, total)
            m = m[0] + risen[0], m[1] + risen[1]
            l = l[0] * alpha[0], l[1] * alpha[1]
            weights = exponentials(e)
        return weights, m, row_sum(l, weights), seen, grown, alpha

    @inlined
    def start(base, q, turn):
        wgmma_fence()
        s = issue_qk(S_START, q, k_of(base, types.int32(0)))
        wgmma_commit()
        wait_all()
        return O_START, P_START, settled(s), PAIR, PAIR, types.uint32(0)

    def make_step(masked, first):
        @inlined
        def step(state, q, now, ago, kind, keep, ending, smem, place, scale, who):
            acc, p, s_a, m, l, seen = state
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
            if masked:
                s_a = keep_a(s_a, keep)
            if first:
                m_ago, l_ago = m, l
                weights, m, l, seen = begin(s_a, scale)
            else:
                weights, m, l, seen, grown, alpha = go_on(s_a, m, l, seen, scale)
            mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)
            wgmma_hold(l[0] + l[1])
            wait_all()
            acc, s_b = settled(acc), settled(s_b)
            if lead == 0:
                mbarrier_arrive(base + EMPTY_K + 8 * stage)
                if not first or is_there >= 0:
                    mbarrier_arrive(base + EMPTY_V + 8 * is_there)
            if masked and kind != FULL:
                l = poisoned(l, bad_of(smem, words, v_stage, keep, thread))
            if first:
                row, bh, result, q_ago = ending
                if row != PAST:
                    finish_row(acc, m_ago, l_ago, row, bh, result, q_ago, base, turn, thread)
                acc = O_START
            elif grown:
                acc = scale_fragment(acc, alpha)
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
            p = pack(weights)
            wgmma_fence()
            acc = issue_pv(acc, p, v_of(base, v_stage))
            s_a = issue_qk(S_START, q_now, k_of(base, after[0]))
            wgmma_commit()
            if masked:
                s_b = keep_b(s_b, keep)
            weights, m, l, seen, grown, alpha = go_on(s_b, m, l, seen, scale)
            wgmma_hold(l[0] + l[1])
            wait_all()
            acc, s_a = settled(acc), settled(s_a)
            if first and STAGED and lead == 0 and row != PAST and not following[0] & FIRST:
                release_q(base, q_ago)
            if grown:
                acc = scale_fragment(acc, alpha)
            return (acc, pack(weights), s_a, m, l, seen), following, (q_now, q_stage, q_phase)

        return step

    @inlined
    def last(state, v_ago, turn):
        acc, p, _, m, l, _ = state
        wgmma_fence()
        acc = issue_pv(acc, p, v_ago + NEXT_HALF)
        wgmma_commit()
        wait_all()
        return settled(acc), m, l

    return q_of, start, make_step, last
