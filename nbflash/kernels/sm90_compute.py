"""What a computing warpgroup of the Hopper kernel does: see :mod:`nbflash.kernels.fwd_sm90`."""

import math

from masks import BITS, FULL, INTERVAL
from nbflash.kernels.sm90_config import BAD_WORDS, END, FIRST, RECORD_WORDS
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import (
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_wait,
)
from nbflash.ptx.tma import bulk_commit, bulk_wait_read, tma_store_4d
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_hold, wgmma_wait
from nbflash.tile.pipeline import divided, make_advance, read_record
from nbflash.tile.softmax import NEG_INF
from nbflash.tile.unroll import equal, hide, load, select, store, unrolled
from nbflash.tile.warp_math import make_warpgroup_of, row_of_thread
from nbflash.tile.wgmma_gemm import (
    PANEL,
    ROW_BYTES,
    lower,
    make_gemm_pv,
    make_gemm_qk,
    settled,
)
from nbflash.tile.wgmma_kept import make_gemm_kept, make_load_kept
from nbflash.tile.wgmma_softmax import (
    make_apply_keep,
    make_finish,
    make_keep,
    make_wgmma_softmax,
    row_total,
    scale_fragment,
)
from nbflash.tile.wgmma_store import make_store_fragment, matrix_row

ALL, NOTHING = types.uint32(0xFFFFFFFF), types.uint32(0)
PAST = -1  # the row tile before a stream's first
STORERS = 9  # named barrier of the first warpgroup's threads that store O; then the next one's


def make_finish_row(cfg):
    """``finish_row(acc, m, l, row, bh, result, stage, turn, thread)``: O / l → out, LSE → lse.

    O goes through the stage that its Q has left, and the copy engine; with a single stage of Q,
    straight to memory.
    """
    TILE_M, HEAD_DIM, PANELS = cfg.tile_m, cfg.head_dim, cfg.panels
    Q_BYTES, STAGED = cfg.q_bytes, cfg.q_stages > 1
    normalise, log_sum_exp = make_finish(HEAD_DIM, cfg.dtype)
    store_fragment = make_store_fragment(HEAD_DIM, TILE_M)

    def make_store_row(which):
        @unrolled
        def store_row(out, at, packed):
            """A thread's pairs of one row; a quad writes 16 bytes side by side."""
            for j in range(HEAD_DIM // 8):
                store(out, at + 4 * j, packed[2 * j + which])

        return store_row

    store_upper, store_lower = make_store_row(0), make_store_row(1)

    @inlined
    def store_staged(packed, row, b, h, o_map, stage, base, turn, thread):
        start = types.uint32(base + stage * Q_BYTES + turn * 64 * ROW_BYTES)
        store_fragment(matrix_row(start, thread), packed)
        fence_proxy_async()
        bar_sync(STORERS + turn, 128)
        if thread % 128 == 0:
            for panel in range(PANELS):
                source = start + types.uint32(panel * TILE_M * ROW_BYTES)
                tma_store_4d(o_map, panel * PANEL, row * TILE_M + 64 * turn, h, b, source)
            bulk_commit()

    @inlined
    def store_straight(packed, row, b, h, out, o_stride, nq, thread):
        upper, quad = row * TILE_M + row_of_thread(thread), thread % 4
        start = b * o_stride[0] + h * o_stride[2]
        if upper < nq:
            store_upper(out, (start + upper * o_stride[1]) // 2 + quad, packed)
        if upper + 8 < nq:
            store_lower(out, (start + (upper + 8) * o_stride[1]) // 2 + quad, packed)

    @inlined
    def finish_row(acc, m, l, row, bh, result, stage, base, turn, thread):
        o_map, out, lse, o_stride, nq, heads, _ = result
        l = row_total(l)
        values, packed = log_sum_exp(m, l), normalise(acc, l)
        upper, (b, h) = row * TILE_M + row_of_thread(thread), divided(bh, heads)
        if STAGED:
            store_staged(packed, row, b, h, o_map, stage, base, turn, thread)
        else:
            store_straight(packed, row, b, h, out, o_stride, nq, thread)
        if thread % 4 == 0:
            if upper < nq:
                lse[bh * nq + upper] = values[0]
            if upper + 8 < nq:
                lse[bh * nq + upper + 8] = values[1]

    return finish_row


def make_masking(cfg):
    """What a thread's two rows see.

    ``bounds_of(masking, row, bh, thread)`` stay in registers as long as the row lasts,
    ``keep_of(kind, n0, bounds, masking, thread)`` serves a tile, and
    ``bad_of(smem, words, stage, keep, thread)`` says what of it meets garbage.
    """
    TILE_M, BAD_USED, (_, _, BAD, _, _) = cfg.tile_m, cfg.tile_n // 32, cfg.cleaned
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
            return types.uint32(ALL), types.uint32(ALL)
        if kind == INTERVAL:
            lows, highs = bounds
            upper = keep_interval(lows[0], highs[0], n0, quad)
            below = keep_interval(lows[1], highs[1], n0, quad)
            return types.uint32(upper), types.uint32(below)
        bits, r = masking[3], row_of_thread(thread)
        tile = hide(kind - BITS)  # or its addresses are computed for every tile
        upper = keep_bits(bits, tile, r, quad)
        return types.uint32(upper), types.uint32(keep_bits(bits, tile, r + 8, quad))

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(BAD_USED))

    @inlined
    def bad_of(smem, words, stage, keep, thread):
        """Which of a thread's scores count and meet a key whose V is not finite."""
        packed = load_bad(smem, words + BAD // 4 + BAD_WORDS * stage)
        mine = types.uint32(gather(packed, types.int32(2 * (thread % 4))))
        return types.uint32(keep[0] & mine), types.uint32(keep[1] & mine)

    return bounds_of, keep_of, bad_of


@unrolled
def poisoned(l, bad):
    """NaN for the rows that attend a key that is not finite."""
    return tuple(select(equal(b, 0), x, math.nan) for x, b in zip(l, bad, strict=True))


def make_queries(cfg):
    """``q_of(smem, place, stage, turn, thread)``, ``issue(s, q, k)``: S = Q Kᵀ (or −Q Kᵀ).

    A narrow Q stays in registers, which saves shared memory a third of what it is read for; of
    another ``q`` is the lower word.
    """
    Q_BYTES = cfg.q_bytes
    if cfg.q_in_registers:
        load_kept = make_load_kept(cfg.head_dim)

        @inlined
        def q_of(smem, place, stage, turn, thread):
            _, words = place
            row = row_of_thread(thread)
            at = words + stage * (Q_BYTES // 4) + row * (ROW_BYTES // 4) + thread % 4
            return load_kept(smem, types.int32(at), types.int32(row & 7))

        return q_of, make_gemm_kept(cfg.dtype, cfg.head_dim, negate=cfg.negate)

    @inlined
    def q_of(smem, place, stage, turn, thread):
        base, _ = place
        return types.uint32(lower(base + stage * Q_BYTES + turn * 64 * ROW_BYTES, 16))

    tiles = cfg.tile_m, cfg.tile_n
    return q_of, make_gemm_qk(cfg.dtype, cfg.head_dim, *tiles, negate=cfg.negate)


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, masking, thread)``, for every thread."""
    HALF, warpgroup_of = cfg.tile_n // 2, make_warpgroup_of(cfg.consumers)
    KV_BYTES, KV_PANEL = cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    K, V, RECORDS, _, _ = cfg.offsets
    FULL_Q, EMPTY_Q, FULL_K, EMPTY_K, FULL_V, EMPTY_V, _ = cfg.barriers
    S_START, P_START = (types.float32(0),) * (HALF // 2), (types.uint32(0),) * (HALF // 4)
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    STAGED = cfg.q_stages > 1
    NEXT_HALF = HALF * ROW_BYTES >> 4
    q_of, issue_qk = make_queries(cfg)
    issue_pv = make_gemm_pv(cfg.dtype, HALF)
    softmax = make_wgmma_softmax(HALF, cfg.dtype)
    row_max, reference, exponents, outgrown, rise, rescale, lowered, *softmax = softmax
    exponentials, row_sum, pack = softmax
    keep_a, keep_b = make_apply_keep(HALF, 0), make_apply_keep(HALF, 1)
    bounds_of, keep_of, bad_of = make_masking(cfg)
    finish_row = make_finish_row(cfg)
    wait_all = wgmma_wait(0)
    advance, advance_q, advance_v = map(make_advance, (cfg.k_stages, cfg.q_stages, cfg.v_stages))

    @inlined
    def record_of(smem, place, stage, phase):
        """The record of the tile whose K is in ``stage``, once it is there."""
        base, words = place
        mbarrier_wait(base + FULL_K + 8 * stage, phase)
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    @inlined
    def k_of(base, stage):
        return types.uint32(lower(base + K, 16) + stage * (KV_BYTES >> 4))

    @inlined
    def v_of(base, stage):
        return types.uint32(lower(base + V, KV_PANEL) + stage * (KV_BYTES >> 4))

    @inlined
    def seen_of(best, total):
        """All ones if both of a thread's rows have met a key, else 0."""
        upper = best[0] > NEG_INF or total[0] > 0
        below = best[1] > NEG_INF or total[1] > 0
        return types.uint32(ALL) if upper and below else types.uint32(NOTHING)

    @inlined
    def first_half(s, scale):
        """P and the statistics of a row that begins."""
        best = row_max(s)
        m = reference(best, scale)
        weights = exponentials(exponents(s, m, scale))
        return weights, m, row_sum(PAIR, weights), seen_of(best, PAIR)

    @inlined
    def next_half(s, m, l, seen, scale):
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
    def release_q(base, stage):
        """The stage of Q is free once the copy engine has taken O out of it."""
        bulk_wait_read()
        mbarrier_arrive(base + EMPTY_Q + 8 * stage)

    def make_step(masked, first):
        """One tile; one form per kind of tile.

        ``state`` is O, P of the last tile's second half, S of this one's first, m, l and whether
        both rows have met a key; ``q``, ``now`` and ``ago`` say where Q and the two tiles are.
        Returns the state, the record of the next tile and where its Q is.
        """

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
                weights, m, l, seen = first_half(s_a, scale)
            else:
                weights, m, l, seen, grown, alpha = next_half(s_a, m, l, seen, scale)
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
            weights, m, l, seen, grown, alpha = next_half(s_b, m, l, seen, scale)
            wgmma_hold(l[0] + l[1])
            wait_all()
            acc, s_a = settled(acc), settled(s_a)
            if first and STAGED and lead == 0 and row != PAST and not following[0] & FIRST:
                release_q(base, q_ago)
            if grown:
                acc = scale_fragment(acc, alpha)
            return (acc, pack(weights), s_a, m, l, seen), following, (q_now, q_stage, q_phase)

        return step

    step_full, step_masked = make_step(False, False), make_step(True, False)
    step_first = make_step(True, True)

    @inlined
    def compute_stream(smem, place, result, masking, thread):
        base, _ = place
        turn, scale, zero = warpgroup_of(thread), result[6], types.int32(0)
        thread = hide(types.int32(thread))
        lead = hide(types.int32(thread % 128))
        who = thread, lead, types.int32(turn)
        kind, n0, next_row, next_bh = record_of(smem, place, zero, zero)
        if kind != END:
            row, bh, q_ago, now = types.int32(PAST), zero, zero, (zero, zero, zero, zero)
            mbarrier_wait(base + FULL_Q, 0)
            q = q_of(smem, place, zero, types.int32(turn), thread), zero, zero
            wgmma_fence()
            s = issue_qk(S_START, q[0], k_of(base, zero))
            wgmma_commit()
            wait_all()
            # O of no row, which nobody stores: of no weights, and K instead of V.
            state = O_START, P_START, settled(s), PAIR, PAIR, types.uint32(0)
            ago = k_of(base, zero), types.int32(-1)
            bounds = bounds_of(masking, next_row, next_bh, thread)
            while kind != END:
                if kind == FULL:
                    keep, ending = (types.uint32(ALL), types.uint32(ALL)), zero
                    state, following, q = step_full(
                        state, q, now, ago, kind, keep, ending, smem, place, scale, who
                    )
                elif kind & FIRST:
                    q_stage = q[1]
                    kind, ending = kind & ~FIRST, (row, bh, result, q_ago)
                    bounds = bounds_of(masking, next_row, next_bh, thread)
                    keep = keep_of(kind, n0, bounds, masking, thread)
                    state, following, q = step_first(
                        state, q, now, ago, kind, keep, ending, smem, place, scale, who
                    )
                    row, bh, q_ago = next_row, next_bh, q_stage
                else:
                    keep, ending = keep_of(kind, n0, bounds, masking, thread), zero
                    state, following, q = step_masked(
                        state, q, now, ago, kind, keep, ending, smem, place, scale, who
                    )
                kind, n0, next_row, next_bh = following
                ago = v_of(base, now[2]), now[2]
                now = advance(now[0], now[1]) + advance_v(now[2], now[3])
            acc, p, _, m, l, _ = state
            wgmma_fence()
            acc = issue_pv(acc, p, ago[0] + NEXT_HALF)
            wgmma_commit()
            wait_all()
            finish_row(settled(acc), m, l, row, bh, result, q_ago, base, turn, thread)
            if STAGED and lead == 0:
                bulk_wait_read()

    return compute_stream
