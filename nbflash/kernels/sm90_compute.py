"""What a computing warpgroup of the Hopper kernel does: see :mod:`nbflash.kernels.fwd_sm90`."""

import math

from masks import BITS, FULL, INTERVAL
from nbflash.kernels.sm90_config import BAD_WORDS, END, RECORD_WORDS
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import bar_arrive, bar_sync, mbarrier_arrive, mbarrier_wait
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_hold, wgmma_wait
from nbflash.tile.pipeline import make_advance
from nbflash.tile.unroll import equal, load, load4, select, store, unrolled
from nbflash.tile.warp_math import any_lane
from nbflash.tile.wgmma_gemm import (
    ROW_BYTES,
    lower,
    make_gemm_pv,
    make_gemm_qk,
    moved,
    settled,
)
from nbflash.tile.wgmma_softmax import (
    make_finish,
    make_keep,
    make_wgmma_softmax,
    scale_fragment,
)

ALL, NOTHING = types.uint32(0xFFFFFFFF), types.uint32(0)


def make_finish_row(cfg):
    """``finish_row(acc, m, l, row, bh, result, thread)``: O / l → out and LSE → lse."""
    TILE_M, HEAD_DIM = cfg.tile_m, cfg.head_dim
    row_total, normalise, log_sum_exp = make_finish(HEAD_DIM, cfg.dtype)

    def make_store_row(which):
        @unrolled
        def store_row(out, at, packed):
            """A thread's pairs of one row; a quad writes 16 bytes side by side."""
            for j in range(HEAD_DIM // 8):
                store(out, at + 4 * j, packed[2 * j + which])

        return store_row

    store_upper, store_lower = make_store_row(0), make_store_row(1)

    @inlined
    def finish_row(acc, m, l, row, bh, result, thread):
        out, lse, o_stride, nq, heads, scale = result
        l = row_total(l)
        values, packed = log_sum_exp(m, l, scale), normalise(acc, l)
        upper = row * TILE_M + row_of_thread(thread)
        quad = thread % 4
        start = (bh // heads) * o_stride[0] + (bh % heads) * o_stride[2]
        if upper < nq:
            store_upper(out, (start + upper * o_stride[1]) // 2 + quad, packed)
            if quad == 0:
                lse[bh * nq + upper] = values[0]
        if upper + 8 < nq:
            store_lower(out, (start + (upper + 8) * o_stride[1]) // 2 + quad, packed)
            if quad == 0:
                lse[bh * nq + upper + 8] = values[1]

    return finish_row


@inlined
def row_of_thread(thread):
    """The upper one of a thread's two rows; the other is 8 below."""
    return thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4


def make_masking(cfg):
    """``bounds_of(masking, row, bh, thread)`` and ``keep_of(kind, n0, bounds, masking, thread)``.

    The bounds of a thread's two rows stay in registers as long as the row lasts.
    """
    TILE_M = cfg.tile_m
    keep_interval, keep_bits, gather = make_keep(TILE_M, cfg.tile_n)

    @inlined
    def row_bounds(bound, plane, nq, row, thread):
        """Rows past the end repeat the last one's."""
        upper, first = row * TILE_M + row_of_thread(thread), plane * nq
        return bound[first + min(upper, nq - 1)], bound[first + min(upper + 8, nq - 1)]

    @inlined
    def bounds_of(masking, row, bh, thread):
        plane_of, lo, hi, _, nq = masking
        plane = plane_of[bh]
        lows = row_bounds(lo, plane, nq, row, thread)
        return lows, row_bounds(hi, plane, nq, row, thread)

    @inlined
    def keep_of(kind, n0, bounds, masking, thread):
        """Which of a thread's scores count in this tile: a word for each of its rows."""
        quad = 2 * (thread % 4)
        if kind == FULL:
            return ALL, ALL
        if kind == INTERVAL:
            lows, highs = bounds
            upper = keep_interval(lows[0], highs[0], n0, quad)
            below = keep_interval(lows[1], highs[1], n0, quad)
            return types.uint32(upper), types.uint32(below)
        bits, r = masking[3], row_of_thread(thread)
        upper = keep_bits(bits, kind - BITS, r, quad)
        return upper, keep_bits(bits, kind - BITS, r + 8, quad)

    return bounds_of, keep_of, gather


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, masking, thread)``, for every thread."""
    CONSUMERS, STAGES, PING_PONG = cfg.consumers, cfg.stages, cfg.ping_pong
    Q_BYTES, KV_BYTES, KV_PANEL = cfg.q_bytes, cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    K, V, RECORDS, BAD, _ = cfg.offsets
    FULL_Q, EMPTY_Q, FULL_K, EMPTY_K, FULL_V, EMPTY_V, _ = cfg.barriers
    S_START = (types.float32(0),) * (cfg.tile_n // 2)
    O_START = (types.float32(0),) * (cfg.head_dim // 2)
    M_START, L_START = (types.float32(-math.inf),) * 2, (types.float32(0),) * 2
    BAD_USED = cfg.tile_n // 32
    issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, cfg.tile_m, cfg.tile_n, negate=cfg.negate)
    issue_pv = make_gemm_pv(cfg.dtype, cfg.tile_n)
    softmax = make_wgmma_softmax(cfg.tile_n, cfg.dtype)
    row_max, outgrown, rescale, probabilities, row_sum, pack, apply_keep = softmax
    bounds_of, keep_of, gather = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    wait_all_but_one, wait_all = wgmma_wait(1), wgmma_wait(0)
    advance, advance_q = make_advance(STAGES), make_advance(cfg.q_stages)

    @unrolled
    def turn_of(thread):
        """The warpgroup, by votes: the compiler then knows it to be the same across a warp."""
        turn = thread * 0
        for i in range(1, CONSUMERS):
            turn = turn + select(any_lane(thread >= 128 * i), turn * 0 + 1, turn * 0)
        return turn

    @unrolled
    def read_record(smem, at):
        return load4(smem, at)

    @inlined
    def record_of(smem, place, stage, phase):
        """The record of the tile whose K is in ``stage``, once it is there."""
        base, words = place
        mbarrier_wait(base + FULL_K + 8 * stage, phase)
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(BAD_USED))

    @inlined
    def bad_of(smem, words, stage, keep, thread):
        """Which of a thread's scores count and meet a key whose V is not finite."""
        packed = load_bad(smem, words + BAD // 4 + BAD_WORDS * stage)
        mine = types.uint32(gather(packed, types.int32(2 * (thread % 4))))
        return keep[0] & mine, keep[1] & mine

    @unrolled
    def poisoned(l, bad):
        """NaN for the rows that attend such a key."""
        return tuple(select(equal(b, 0), x, math.nan) for x, b in zip(l, bad, strict=True))

    def make_step(masked, first):
        """S of the next tile beside O += P V of the last one; one form per kind of tile.

        ``now`` and ``ago`` are stage and phase of the two tiles, ``mask`` which scores of theirs
        count and whether the last one is masked. Returns O, P, m, l, the record of the tile
        after, and which of the last tile's scores met a key that is not finite.
        """

        @inlined
        def step(state, q, now, ago, mask, smem, place, scale, thread):
            acc, p, m, l = state
            keep, keep_ago, unclean = mask
            base, words = place
            turn = turn_of(thread)
            stage, phase = now
            k = types.uint32(lower(base + K, 16) + stage * (KV_BYTES >> 4))
            v = types.uint32(lower(base + V, KV_PANEL) + ago[0] * (KV_BYTES >> 4))
            if PING_PONG:
                bar_sync(1 + turn, 256)
            # S = Q Kᵀ
            wgmma_fence()
            s = issue_qk(S_START, q, k)
            wgmma_commit()
            mbarrier_wait(base + FULL_V + 8 * ago[0], ago[1])
            bad = NOTHING, NOTHING
            if unclean:  # read before P V is issued: one thread speaks for all when it is done
                bad = bad_of(smem, words, ago[0], keep_ago, thread)
            # O += P V
            wgmma_fence()
            acc = issue_pv(acc, p, v)
            wgmma_commit()
            if PING_PONG:
                bar_arrive(2 - turn, 256)
            wait_all_but_one()
            s = settled(s)
            if thread % 128 == 0:
                mbarrier_arrive(base + EMPTY_K + 8 * stage)
            if masked:
                s = apply_keep(s, keep)
            after = advance(stage, phase)
            following = record_of(smem, place, after[0], after[1])
            grown, alpha = False, (types.float32(1), types.float32(1))
            if first:
                m = row_max(M_START, s)
                weights = probabilities(s, m, scale)
                packed, l = pack(weights), row_sum(L_START, weights)
            else:
                # The last maximum will do, nearly always: nothing waits for this tile's.
                weights = probabilities(s, m, scale)
                packed, more_l = pack(weights), row_sum(L_START, weights)
                grown = outgrown(m, s, scale)
                if grown:
                    m_new = row_max(m, s)
                    alpha = rescale(m, m_new, scale)
                    weights = probabilities(s, m_new, scale)
                    packed, more_l = pack(weights), row_sum(L_START, weights)
                    m, l = m_new, (l[0] * alpha[0], l[1] * alpha[1])
                l = l[0] + more_l[0], l[1] + more_l[1]
            wgmma_hold(l[0])
            wgmma_hold(l[1])
            wait_all()
            acc = settled(acc)
            if thread % 128 == 0:
                mbarrier_arrive(base + EMPTY_V + 8 * ago[0])
            if grown:
                acc = scale_fragment(acc, alpha)
            state = acc, moved(packed, types.uint32(following[3] >> 31)), m, l
            return state, following, bad

        return step

    step_full, step_masked = make_step(False, False), make_step(True, False)
    step_first = make_step(True, True)

    @inlined
    def begin(smem, place, q, keep, turn, scale, thread):
        """The first tile of the stream has no P V beside it."""
        base, _ = place
        mbarrier_wait(base + FULL_Q, 0)
        if PING_PONG:
            bar_sync(1 + turn, 256)
        wgmma_fence()
        s = issue_qk(S_START, q, types.uint32(lower(base + K, 16)))
        wgmma_commit()
        if PING_PONG:
            bar_arrive(2 - turn, 256)
        wait_all()
        s = settled(s)
        if thread % 128 == 0:
            mbarrier_arrive(base + EMPTY_K)
        s = apply_keep(s, keep)
        m = row_max(M_START, s)
        weights = probabilities(s, m, scale)
        return O_START, pack(weights), m, row_sum(L_START, weights)

    @inlined
    def end(smem, place, state, ago, mask, thread):
        """The last tile of the stream has no S beside it."""
        base, words = place
        acc, p, m, l = state
        keep, unclean = mask
        mbarrier_wait(base + FULL_V + 8 * ago[0], ago[1])
        wgmma_fence()
        v = types.uint32(lower(base + V, KV_PANEL) + ago[0] * (KV_BYTES >> 4))
        acc = issue_pv(acc, p, v)
        wgmma_commit()
        wait_all()
        acc = settled(acc)
        if unclean:
            l = poisoned(l, bad_of(smem, words, ago[0], keep, thread))
        return acc, m, l

    @inlined
    def compute_stream(smem, place, result, masking, thread):
        base, _ = place
        scale, turn = result[5], turn_of(thread)
        q_start = types.uint32(lower(base + turn * 64 * ROW_BYTES, 16))
        now = types.int32(0), types.int32(0)
        if PING_PONG and turn == 1:
            bar_arrive(1, 256)
        kind, n0, row, bh = record_of(smem, place, now[0], now[1])
        if kind != END:
            bounds = bounds_of(masking, row, bh, thread)
            keep = keep_of(kind, n0, bounds, masking, thread)
            state = begin(smem, place, q_start, keep, turn, scale, thread)
            unclean = kind != FULL
            q_stage, q_phase = now
            ago, now = now, advance(now[0], now[1])
            kind, n0, next_row, next_bh = record_of(smem, place, now[0], now[1])
            while kind != END:
                keep_ago = keep
                if next_row >= 0:
                    if thread % 128 == 0:
                        mbarrier_arrive(base + EMPTY_Q + 8 * q_stage)
                    q_stage, q_phase = advance_q(q_stage, q_phase)
                    mbarrier_wait(base + FULL_Q + 8 * q_stage, q_phase)
                    bounds = bounds_of(masking, next_row, next_bh, thread)
                    keep = keep_of(kind, n0, bounds, masking, thread)
                    q = q_start + types.uint32(q_stage * (Q_BYTES >> 4))
                    mask = keep, keep_ago, unclean
                    _, _, m, l = state
                    state, following, bad = step_first(
                        state, q, now, ago, mask, smem, place, scale, thread
                    )
                    acc, p, m_next, l_next = state
                    finish_row(acc, m, poisoned(l, bad), row, bh, result, thread)
                    state = O_START, p, m_next, l_next
                    row, bh = next_row, next_bh
                else:
                    q = q_start + types.uint32(q_stage * (Q_BYTES >> 4))
                    if kind == FULL:
                        keep = ALL, ALL
                        mask = keep, keep_ago, unclean
                        state, following, bad = step_full(
                            state, q, now, ago, mask, smem, place, scale, thread
                        )
                    else:
                        keep = keep_of(kind, n0, bounds, masking, thread)
                        mask = keep, keep_ago, unclean
                        state, following, bad = step_masked(
                            state, q, now, ago, mask, smem, place, scale, thread
                        )
                    acc, p, m, l = state
                    state = acc, p, m, poisoned(l, bad)
                unclean = kind != FULL
                kind, n0, next_row, next_bh = following
                ago, now = now, advance(now[0], now[1])
            acc, m, l = end(smem, place, state, ago, (keep, unclean), thread)
            finish_row(acc, m, l, row, bh, result, thread)
        if PING_PONG and turn == 0:
            bar_sync(1, 256)

    return compute_stream
