"""What a consumer warpgroup of the Hopper backward does in one pass: see :mod:`.kernel`.

Shared memory is laid out by ``smem`` of the configuration in :mod:`.config`.
"""

import math

from nbflash.backends.sm90.backward.config import COLUMN_DESCRIPTOR_WORDS
from nbflash.backends.sm90.backward.dkdv import is_leader, make_finish, rows_of
from nbflash.backends.sm90.backward.producer import DQ_EMPTY, DQ_FULL, DQ_THREADS, WORK_WORDS
from nbflash.backends.sm90.backward.score import make_scored, make_scoring, make_weights_of
from nbflash.backends.sm90.backward.tile_math import (
    make_descriptor_of,
    make_gradients_of,
    make_probabilities_of,
    make_statistics_of,
)
from nbflash.backends.sm90.shared.config import BAD_WORDS, END
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import (
    bar_arrive,
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_wait,
)
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import make_ring, read_descriptor
from nbflash.cuda.tile.tracing import equal, select, unrolled
from nbflash.cuda.tile.warp_math import make_warpgroup_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.gradient import PART, make_gemm_dq, store_part
from nbflash.cuda.tile.wgmma.store_shared import make_store_fragment, matrix_row

DS_FREE, DS_FULL = 1, 3  # named barriers of each warpgroup


def make_write_empty_columns(cfg):
    """``write_empty_columns(result, work, items, live, thread)``: dK = dV = 0, for every thread.

    The columns that no query attends are the end of the work list.
    """
    TILE_N, PAIRS, THREADS = cfg.tile_n, cfg.head_dim // 2, 128 * cfg.consumers

    @inlined
    def write_empty_columns(result, work, items, live, thread):
        dk, dv, stride, nk, _, _, _ = result
        zero = types.uint32(0)
        item, step = types.int32(live + cuda.blockIdx.x), types.int32(cuda.gridDim.x)
        while item < items:
            at = WORK_WORDS * item
            n_block, b, h_kv = work[at], work[at + 1], work[at + 2]
            start = b * stride[0] + h_kv * stride[2]
            for i in range(thread, min(TILE_N, nk - n_block * TILE_N) * PAIRS, THREADS):
                at = (start + (n_block * TILE_N + i // PAIRS) * stride[1]) // 2 + i % PAIRS
                dk[at] = zero
                dv[at] = zero
            item = types.int32(item + step)

    return write_empty_columns


def make_ending(cfg):
    """``left_of(n_block, nk, thread)``: how many keys there are from a thread's upper one on;
    ``ended(ds, left)``: packed dS, 0 of keys past the last one.

    K and V are zeros there, so that P is 2^shift, which may overflow: dQ would get ∞ · 0.
    """
    TILE_N, EDGE = cfg.tile_n, cfg.edge

    @inlined
    def left_of(n_block, nk, thread):
        if EDGE:
            row, _ = rows_of(thread)
            return types.int32(nk - n_block * TILE_N - row)
        return types.int32(0)

    @unrolled
    def ended(ds, left):
        if not EDGE:
            return ds
        return tuple(select(left > i % 2 * 8, x, types.uint32(0)) for i, x in enumerate(ds))

    return left_of, ended


def make_compute_stream(cfg):
    """``compute_stream(smem, stats, place, result, params, drawing, thread)``, for every thread.

    There is no dropout here.
    """
    TILE_M, TILE_N, CONSUMERS = cfg.tile_m, cfg.tile_n, cfg.consumers
    Q_BYTES, KV_BYTES, K_STAGES = cfg.q_bytes, cfg.kv_bytes, cfg.k_stages
    Q_PANEL, KV_PANEL = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DO = layout.k, layout.v, layout.do
    DS, DQ, DESCRIPTORS = layout.exchange, layout.leaving, layout.descriptors
    BAD, SLOTS = layout.bad_keys, layout.slots
    FULL_DO, EMPTY_Q, FULL_K = barriers.full_do, barriers.empty_q, barriers.full_k
    EMPTY_K, FULL_V, EMPTY_V = barriers.empty_k, barriers.full_v, barriers.empty_v
    # A part of dQ: 64 queries of a tile of several 64, or one panel of columns of one.
    PART_DS = KV_PANEL if TILE_M > 64 else 0
    PART_K = 0 if TILE_M > 64 else KV_PANEL
    S_START = (types.float32(0),) * (TILE_M // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    DQ_START = (types.float32(0),) * (PART // 128)
    issue_scores = make_gemm_qk(cfg.dtype, cfg.head_dim, TILE_N, TILE_M)
    issue_dp = make_gemm_qk(cfg.dtype, cfg.head_dim, TILE_N, TILE_M, accumulate=True)
    issue_acc, issue_dq = make_gemm_pv(cfg.dtype, TILE_M), make_gemm_dq(cfg.dtype, TILE_N)
    descriptor_of, probabilities_of = make_descriptor_of(cfg), make_probabilities_of(cfg)
    (gradients_of, pack), statistics = make_gradients_of(cfg), make_statistics_of(cfg)
    (_, unit_of), scoring_of = make_scored(cfg), make_scoring(cfg)
    packed_of, w_of = make_weights_of(cfg, pack)
    shifts_of, minus_deltas_of = statistics.shifts_of, statistics.minus_deltas_of
    by_keys, less_deltas = statistics.by_keys, statistics.less_deltas
    left_of, ended = make_ending(cfg)
    store_scores = make_store_fragment(TILE_M, TILE_N)
    finish, ONE = make_finish(cfg), types.float32(1)
    wait_all_but_one, wait_all, wait_all_but_two = wgmma_wait(1), wgmma_wait(0), wgmma_wait(2)
    EARLY, FULL_TILES, warpgroup_of = cfg.early_dv, cfg.full_tiles, make_warpgroup_of(CONSUMERS)
    LATER = (types.float32(0),) * (TILE_M // 4)
    (stage_of, phase_of), (k_stage_of, k_phase_of) = make_ring(cfg.stages), make_ring(K_STAGES)
    _, v_phase_of = make_ring(1)

    @unrolled
    def scales_if(bad, scale):
        return tuple(select(equal(bad & (1 << i), 0), scale, math.nan) for i in (0, 8))

    @inlined
    def first_scales(smem, place, column, scale, thread):
        """Wait for K of a column; the scale of its keys, NaN if they hold one."""
        base, words = place
        k_stage, (key, _) = k_stage_of(column), rows_of(thread)
        mbarrier_wait(base + FULL_K + 8 * k_stage, k_phase_of(column))
        if FULL_TILES:
            return scale, scale
        bad = smem[types.int32(words + BAD // 4 + BAD_WORDS * k_stage + (key >> 5))] >> (key & 31)
        return scales_if(types.int32(bad), scale)

    @inlined
    def scores(warpgroup, place, stage, k_stage):
        """Issue Sᵀ = K Qᵀ."""
        base, _ = place
        k = types.uint32(
            lower(base + K + warpgroup * 64 * ROW_BYTES, 16) + k_stage * (KV_BYTES >> 4)
        )
        q = types.uint32(lower(base, 16) + stage * (Q_BYTES >> 4))
        return issue_scores(S_START, k, q)

    @inlined
    def share_scores(packed, warpgroup, place, thread):
        """dSᵀ to shared memory, when everybody has read the last one."""
        base, _ = place
        row = matrix_row(types.uint32(base + DS + warpgroup * 64 * ROW_BYTES), thread)
        bar_sync(DS_FREE + warpgroup, 128 * CONSUMERS)
        store_scores(row, packed)
        fence_proxy_async()
        if CONSUMERS == 2:
            bar_arrive(DS_FULL + 1 - warpgroup, 256)

    @inlined
    def share_part(dq, slot, warpgroup, smem, stats, place, thread):
        """A part of dQ to shared memory, for the warp that adds it to the others."""
        _, words = place
        store_part(stats, words + DQ // 4 + warpgroup * PART + (thread & 127) * 4, dq)
        if is_leader(thread):
            smem[words + SLOTS // 4 + warpgroup] = slot
        fence_proxy_async()
        bar_arrive(DQ_FULL + warpgroup, DQ_THREADS)

    @inlined
    def ahead(stats, place, tile, thread):
        """What the next tile begins with, while the tensor cores are busy with this one."""
        _, pair = rows_of(thread)
        if EARLY:
            at = stage_of(tile)
            return minus_deltas_of(stats, place, at, pair), shifts_of(stats, place, at, pair)
        return LATER, LATER

    @inlined
    def step(state, tile, k_stage, smem, stats, place, scaling, thread):
        """One tile, up to the issue of dQ."""
        s, minus_deltas, shifts, acc_dk, acc_dv, kind, left = state
        scales, factor, params = scaling
        base, _ = place
        warpgroup, stage = warpgroup_of(thread), stage_of(tile)
        k_part = lower(base + K + warpgroup * PART_K, KV_PANEL) + k_stage * (KV_BYTES >> 4)
        v = types.uint32(lower(base + V + warpgroup * 64 * ROW_BYTES, 16))
        ds_part = types.uint32(lower(base + DS + warpgroup * PART_DS, KV_PANEL))
        # dPᵀ = V dOᵀ, or dPᵀ − δ
        mbarrier_wait(base + FULL_DO + 8 * stage, phase_of(tile))
        wgmma_fence()
        dout = types.uint32(lower(base + DO, 16) + stage * (Q_BYTES >> 4))
        dp = issue_dp(by_keys(minus_deltas), v, dout) if EARLY else issue_scores(S_START, v, dout)
        wgmma_commit()
        row, pair = rows_of(thread)
        if not EARLY:
            shifts = shifts_of(stats, place, stage, pair)
        scoring = scoring_of(smem, place, stage, row, pair, factor, params)
        p = probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair, scoring)
        # dV += Pᵀ dO
        dout = types.uint32(lower(base + DO, Q_PANEL) + stage * (Q_BYTES >> 4))
        if EARLY:
            packed = packed_of(p)
            wgmma_fence()
            acc_dv = issue_acc(acc_dv, packed, dout)
            wgmma_commit()
            wait_all_but_one()
        else:
            wait_all()
        dp = after_wait(dp)
        if not EARLY:
            dp = less_deltas(dp, stats, place, stage, pair)
        ds = ended(pack(gradients_of(w_of(p), dp, kind)), left)
        share_scores(ds, warpgroup, place, thread)
        if not EARLY:
            packed = packed_of(p)
        wgmma_fence()
        if not EARLY:
            acc_dv = issue_acc(acc_dv, packed, dout)
            wgmma_commit()
        # dK += dSᵀ Q
        q = types.uint32(lower(base, Q_PANEL) + stage * (Q_BYTES >> 4))
        acc_dk = issue_acc(acc_dk, ds, q)
        wgmma_commit()
        # dQ = dS K
        bar_sync(DS_FULL + warpgroup, 128 * CONSUMERS)
        wgmma_fence()
        dq = issue_dq(DQ_START, ds_part, types.uint32(k_part))
        wgmma_commit()
        return acc_dk, acc_dv, dq

    @inlined
    def compute_stream(smem, stats, place, result, params, drawing, thread):
        base, words = place
        dk, dv, _, nk, _, factor, scale = result
        warpgroup, unit = warpgroup_of(thread), unit_of(factor, params)
        leader = is_leader(thread)
        tile, column, one = types.int64(0), types.int64(0), types.int32(1)
        if CONSUMERS == 2:
            bar_arrive(DS_FREE + 1 - warpgroup, 256)
        kind, n_block, _, _ = descriptor_of(smem, place, tile)
        if kind != END:
            kind, left = types.int32(-kind), left_of(n_block, nk, thread)
            scales = first_scales(smem, place, column, unit, thread)
            wgmma_fence()
            s = scores(warpgroup, place, stage_of(tile), k_stage_of(column))
            wgmma_commit()
            minus_deltas, shifts = ahead(stats, place, tile, thread)
            wait_all()
            s = after_wait(s)
            while kind != END:
                acc_dk, acc_dv = ACC_START, ACC_START
                mbarrier_wait(base + FULL_V, v_phase_of(column))
                ends = False
                while not ends:
                    state = s, minus_deltas, shifts, acc_dk, acc_dv, kind, left
                    scaling = scales, factor, params
                    acc_dk, acc_dv, dq = step(
                        state, tile, k_stage_of(column), smem, stats, place, scaling, thread
                    )
                    # S of the next tile
                    kind, following, _, _ = descriptor_of(smem, place, types.int32(tile + one))
                    ends = kind <= END
                    if ends:
                        kind, left = types.int32(-kind), left_of(following, nk, thread)
                        if leader:
                            mbarrier_arrive(base + EMPTY_V)
                        column += one
                        if kind != END:
                            scales = first_scales(smem, place, column, unit, thread)
                    wait_all_but_two()
                    acc_dv = after_wait(acc_dv)
                    wgmma_fence()
                    s = scores(
                        warpgroup, place, stage_of(types.int32(tile + one)), k_stage_of(column)
                    )
                    wgmma_commit()
                    wait_all_but_one()
                    acc_dk, dq = after_wait(acc_dk), after_wait(dq)
                    if CONSUMERS == 2:
                        bar_arrive(DS_FREE + 1 - warpgroup, 256)
                    _, n_block, bh, slot = read_descriptor(
                        smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage_of(tile)
                    )
                    bar_sync(DQ_EMPTY + warpgroup, DQ_THREADS)
                    if leader:
                        mbarrier_arrive(base + EMPTY_Q + 8 * stage_of(tile))
                    share_part(dq, slot, warpgroup, smem, stats, place, thread)
                    tile += one
                    minus_deltas, shifts = ahead(stats, place, tile, thread)
                    wait_all()
                    s = after_wait(s)
                if leader:
                    mbarrier_arrive(base + EMPTY_K + 8 * (k_stage_of(types.int32(column - one))))
                finish(dk, acc_dk, scale, n_block, bh, smem, place, result, thread)
                finish(dv, acc_dv, ONE, n_block, bh, smem, place, result, thread)
        if CONSUMERS == 2:
            bar_sync(DS_FREE + warpgroup, 256)
        bar_sync(DQ_EMPTY + warpgroup, DQ_THREADS)
        if leader:
            smem[words + SLOTS // 4 + warpgroup] = -1
        bar_arrive(DQ_FULL + warpgroup, DQ_THREADS)

    return compute_stream
