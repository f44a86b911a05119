"""dK and dV of more than 128 columns: two warpgroups share 64 keys, one gradient each.

The block, its loader and its barriers are those of :mod:`.dkdv`. A
warpgroup computes scores, makes weights of them and multiplies; P goes from one to the other as
float32, in fragments, through shared memory:

    for each tile t of the stream, the scores of which were issued before
        warpgroup 0, S = Q Kᵀ                          warpgroup 1, dP = dO Vᵀ
        P = 2^(S · scale − LSE · log2 e)
        P → shared memory                              → dS = P ∘ (dP − δ)
        issue dV += Pᵀ dO                              issue dK += dSᵀ Q
        issue S of tile t + 1                          issue dP of tile t + 1
        if t ends a column: dV → out                   dK · scale → out

    barrier        arrives                             waits
    p_full         warpgroup 0 has stored P            warpgroup 1, before it loads P
    p_free         warpgroup 1 has loaded P            warpgroup 0, before it stores the next
    empty_k        warpgroup 0                         loader
    empty_v        warpgroup 1                         loader
"""

from nbflash.backends.sm90.backward.config import COLUMN_DESCRIPTOR_WORDS
from nbflash.backends.sm90.backward.dkdv import make_finish, rows_of
from nbflash.backends.sm90.backward.dropout import make_dropping
from nbflash.backends.sm90.backward.score import make_scored, make_scoring, make_weights_of
from nbflash.backends.sm90.backward.tile_math import (
    make_descriptor_of,
    make_gradients_of,
    make_probabilities_of,
    make_statistics_of,
)
from nbflash.backends.sm90.shared.config import END
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_arrive, bar_sync, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import make_ring, read_descriptor
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import make_warpgroup_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.gradient import load_part, store_part

P_FULL, P_FREE, THREADS = 1, 2, 256  # named barriers


def make_weights(cfg):
    """P of warpgroup 0 and dS of warpgroup 1, packed.

    ``weights[i](x, kind, smem, stats, place, stage, scaling, drawing, thread)`` of the scores of a
    tile.
    """
    P = cfg.smem.exchange
    probabilities_of, (gradients_of, pack) = make_probabilities_of(cfg), make_gradients_of(cfg)
    statistics, dropping, DROPOUT = make_statistics_of(cfg), make_dropping(cfg), bool(cfg.dropout)
    shifts_of, minus_deltas_of = statistics.shifts_of, statistics.minus_deltas_of
    less_deltas, draw = statistics.less_deltas, dropping.draw
    dropped, dropped_dp = dropping.dropped, dropping.dropped_dp
    (packed_of, w_of), scoring_of = make_weights_of(cfg, pack), make_scoring(cfg)

    @inlined
    def probabilities(s, kind, smem, stats, place, stage, scaling, drawing, thread):
        (scales, factor, params), (row, pair) = scaling, rows_of(thread)
        shifts = shifts_of(stats, place, stage, pair)
        scoring = scoring_of(smem, place, stage, row, pair, factor, params)
        p = probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair, scoring)
        bar_sync(P_FREE, THREADS)
        store_part(stats, place[1] + P // 4 + 4 * thread, w_of(p))
        bar_arrive(P_FULL, THREADS)
        return dropped(packed_of(p), draw(smem, place, stage, row, pair, *drawing))

    @inlined
    def gradients(dp, kind, smem, stats, place, stage, scaling, drawing, thread):
        row, pair = rows_of(thread)
        drawn = draw(smem, place, stage, row, pair, *drawing)
        bar_sync(P_FULL, THREADS)
        p = load_part(stats, place[1] + P // 4 + 4 * thread)
        bar_arrive(P_FREE, THREADS)
        dp = less_deltas(dp, stats, place, stage, pair)
        if DROPOUT:
            dp = dropped_dp(dp, minus_deltas_of(stats, place, stage, pair), drawn)
        return pack(gradients_of(p, dp, kind))

    return probabilities, gradients


def make_role(cfg, of_keys):
    """``role(smem, stats, place, out, factor, result, params, drawing, thread)``: one of the two
    warpgroups.

    K and Q give S, whose weights go to dO; or V and dO give dP, whose weights go to Q.
    """
    TILE_M, Q_BYTES, KV_BYTES = cfg.tile_m, cfg.q_bytes, cfg.kv_bytes
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DO, DESCRIPTORS = layout.k, layout.v, layout.do, layout.descriptors
    EMPTY_Q, FULL_K, EMPTY_K = barriers.empty_q, barriers.full_k, barriers.empty_k
    FULL_V, EMPTY_V = barriers.full_v, barriers.empty_v
    KEYS, FULL, EMPTY, STAGES = (
        (K, FULL_K, EMPTY_K, cfg.k_stages) if of_keys else (V, FULL_V, EMPTY_V, 1)
    )
    QUERIES, VALUES = (0, DO) if of_keys else (DO, 0)
    S_START = (types.float32(0),) * (TILE_M // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    issue_scores = make_gemm_qk(cfg.dtype, cfg.head_dim, cfg.tile_n, TILE_M)
    issue_acc = make_gemm_pv(cfg.dtype, TILE_M)
    descriptor_of, weights_of = make_descriptor_of(cfg), make_weights(cfg)[0 if of_keys else 1]
    finish, wait_all = make_finish(cfg, 0 if of_keys else 4), wgmma_wait(0)
    _, unit_of = make_scored(cfg)
    (stage_of, _), (k_stage_of, k_phase_of) = make_ring(cfg.stages), make_ring(STAGES)

    @inlined
    def scores(place, tile, column):
        """Issue Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
        base, _ = place
        keys = types.uint32(lower(base + KEYS, 16) + k_stage_of(column) * (KV_BYTES >> 4))
        queries = types.uint32(lower(base + QUERIES, 16) + stage_of(tile) * (Q_BYTES >> 4))
        wgmma_fence()
        x = issue_scores(S_START, keys, queries)
        wgmma_commit()
        return x

    @inlined
    def role(smem, stats, place, out, factor, result, params, drawing, thread):
        base, words = place
        unit, leader = unit_of(result[5], params), thread == 0
        scaling = (unit, unit), result[5], params
        tile, column, one = types.int64(0), types.int64(0), types.int32(1)
        kind, _, _, _ = descriptor_of(smem, place, tile)
        if kind != END:
            kind = types.int32(-kind)
            mbarrier_wait(base + FULL + 8 * k_stage_of(column), k_phase_of(column))
            x = scores(place, tile, column)
            wait_all()
            x = after_wait(x)
            while kind != END:
                acc, ends = ACC_START, False
                while not ends:
                    stage = stage_of(tile)
                    weights = weights_of(
                        x, kind, smem, stats, place, stage, scaling, drawing, thread
                    )
                    # dV += Pᵀ dO, or dK += dSᵀ Q
                    wgmma_fence()
                    values = lower(base + VALUES, TILE_M * ROW_BYTES) + stage * (Q_BYTES >> 4)
                    acc = issue_acc(acc, weights, types.uint32(values))
                    wgmma_commit()
                    kind, _, _, _ = descriptor_of(smem, place, types.int32(tile + one))
                    ends = kind <= END
                    if ends:
                        kind = types.int32(-kind)
                        _, n_block, bh, _ = read_descriptor(
                            smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage
                        )
                        if leader:
                            mbarrier_arrive(base + EMPTY + 8 * k_stage_of(column))
                        column += one
                        if kind != END:
                            mbarrier_wait(base + FULL + 8 * k_stage_of(column), k_phase_of(column))
                    x = scores(place, types.int32(tile + one), column)
                    wait_all()
                    acc, x = after_wait(acc), after_wait(x)
                    if leader:
                        mbarrier_arrive(base + EMPTY_Q + 8 * stage)
                    tile += one
                finish(out, acc, factor, n_block, bh, smem, place, result, opaque(thread))

    return role


def make_wide_stream(cfg):
    """``wide_stream(smem, stats, place, result, params, drawing, thread)``, for a consumer."""
    warpgroup_of, factor_of = make_warpgroup_of(2), make_dropping(cfg).factor_of
    of_keys, of_values = make_role(cfg, True), make_role(cfg, False)

    @inlined
    def wide_stream(smem, stats, place, result, params, drawing, thread):
        dk, dv, _, _, _, _, scale = result
        factor = factor_of(drawing[1])
        if warpgroup_of(thread) == 0:
            of_keys(smem, stats, place, dv, factor, result, params, drawing, thread)
            bar_sync(P_FREE, THREADS)
        else:
            bar_arrive(P_FREE, THREADS)
            thread = types.int32(thread - 128)
            of_values(smem, stats, place, dk, scale, result, params, drawing, thread)

    return wide_stream
