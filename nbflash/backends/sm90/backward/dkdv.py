"""dK and dV without dQ: the second of two passes, over columns, of the Hopper backward.

The block and its barriers are those of :mod:`.kernel`, but that dO arrives with Q,
to full_q, K goes to full_k at once, and K and V are fed by a thread of their own. Nothing is
exchanged, so the warpgroups do not wait for each other, and every sum has one order: the tiles of a
column, the heads of a group one after the other. Dropout is in :mod:`.dropout`.

    for each column
        issue dP of its first tile           P = 2^(S · scale − LSE · log2 e)
        for each tile t of it, S of which was issued before
            wait for dP, which began at −δ
            issue dV += Pᵀ dO                dS = P ∘ dP
            issue dK += dSᵀ Q                wait for dV
            issue S of t + 1                 read its statistics, wait for dK
            issue dP = dO Vᵀ of t + 1        wait for S:     P of t + 1
        dK · scale, dV → out                 (S of the next column is on its way)
"""

from nbflash.backends.sm90.backward.config import COLUMN_DESCRIPTOR_WORDS
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
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.ring import divmod_int32, make_ring, read_descriptor
from nbflash.cuda.tile.tracing import equal, opaque, unrolled
from nbflash.cuda.tile.warp_math import make_warpgroup_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.gemm_register_a import make_gemm_kept, make_load_kept
from nbflash.cuda.tile.wgmma.store_rows import make_store_rows, warp_bytes


@unrolled
def is_leader(thread):
    """Whether this thread speaks for its warpgroup; in 32 bits."""
    return equal(thread % 128, 0)


@unrolled
def rows_of(thread):
    """The upper one of a thread's two keys and its first query, in 32 bits: registers are few."""
    return thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2


def make_finish(cfg, others=0):
    """``finish(out, acc, factor, n_block, bh, smem, place, result, thread)``: a gradient leaves.

    ``others``: the warps before the thread's first that have rows of the same numbers.
    """
    TILE_N, WARP_BYTES = cfg.tile_n, warp_bytes(cfg.out_columns)
    OUT = cfg.out_offset + WARP_BYTES * others
    store_rows = make_store_rows(cfg.head_dim, cfg.dtype, cfg.out_columns)

    @inlined
    def finish(out, acc, factor, n_block, bh, smem, place, result, thread):
        _, _, stride, nk, heads_kv, _, _ = result
        base, words = place
        warp, (b, h) = types.int32(thread >> 5), divmod_int32(bh, heads_kv)
        first = types.int32(n_block * TILE_N + 16 * warp)
        at = b * stride[0] + h * stride[2] + first * stride[1]
        offset = types.int32(OUT + WARP_BYTES * warp)
        source, target = (base + offset, words + offset // 4), (at, stride[1], nk - first)
        store_rows(out, acc, factor, smem, source, target, types.int32(thread & 31))

    return finish


def make_keys(cfg):
    """``keys_of(smem, place, at, warpgroup, thread)``, and two functions of ``(x, keys, …)``.

    ``issue_scores``: Sᵀ = K Qᵀ. ``issue_dp``: dPᵀ − δ = V dOᵀ − δ. The last argument
    is the lower word of Q, or dO.

    ``at`` is where K, or V, lies. Narrow ones stay in registers, which saves shared memory half of
    what it is read for; of the others ``keys`` is the lower word.
    """
    if cfg.keys_in_registers:
        load_kept = make_load_kept(cfg.head_dim)
        issue_scores, issue_dp = (
            make_gemm_kept(cfg.dtype, cfg.head_dim, accumulate=more) for more in (False, True)
        )

        @inlined
        def keys_of(smem, place, at, warpgroup, thread):
            _, words = place
            row, pair = rows_of(thread)
            at = words + at // 4 + row * (ROW_BYTES // 4) + pair // 2
            return load_kept(smem, types.int32(at), types.int32(row & 7))

    else:
        sizes = cfg.dtype, cfg.head_dim, cfg.tile_n, cfg.tile_m
        issue_scores, issue_dp = (make_gemm_qk(*sizes, accumulate=more) for more in (False, True))

        @inlined
        def keys_of(smem, place, at, warpgroup, thread):
            base, _ = place
            return types.uint32(lower(base + at + warpgroup * 64 * ROW_BYTES, 16))

    return keys_of, issue_scores, issue_dp


def make_columns_stream(cfg):
    """``columns_stream(smem, stats, place, result, params, drawing, thread)``, for a consumer.

    ``drawing``: what dropout has drawn and drops by.
    """
    TILE_M, Q_BYTES, KV_BYTES = cfg.tile_m, cfg.q_bytes, cfg.kv_bytes
    Q_PANEL = TILE_M * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DO, DESCRIPTORS = layout.k, layout.v, layout.do, layout.descriptors
    EMPTY_Q, FULL_K, EMPTY_K = barriers.empty_q, barriers.full_k, barriers.empty_k
    FULL_V, EMPTY_V = barriers.full_v, barriers.empty_v
    S_START = (types.float32(0),) * (TILE_M // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    keys_of, issue_scores, issue_dp = make_keys(cfg)
    issue_acc = make_gemm_pv(cfg.dtype, TILE_M)
    descriptor_of, probabilities_of = make_descriptor_of(cfg), make_probabilities_of(cfg)
    gradients_of, pack = make_gradients_of(cfg)
    (_, unit_of), scoring_of = make_scored(cfg), make_scoring(cfg)
    packed_of, w_of = make_weights_of(cfg, pack)
    statistics, dropping = make_statistics_of(cfg), make_dropping(cfg)
    shifts_of, minus_deltas_of = statistics.shifts_of, statistics.minus_deltas_of
    by_keys, factor_of = statistics.by_keys, dropping.factor_of
    draw, dropped, dropped_dp = dropping.draw, dropping.dropped, dropping.dropped_dp
    DROPOUT, finish = bool(cfg.dropout), make_finish(cfg)
    ZEROS = (types.float32(0),) * (TILE_M // 4)
    warpgroup_of, wait_all_but_one, wait_all = (
        make_warpgroup_of(cfg.consumers),
        *map(wgmma_wait, (1, 0)),
    )
    (stage_of, _), (k_stage_of, k_phase_of) = make_ring(cfg.stages), make_ring(cfg.k_stages)
    (_, v_phase_of), KEPT = make_ring(1), cfg.keys_in_registers

    @inlined
    def arrived_keys(smem, place, column, warpgroup, thread):
        """K of a column, once it is there."""
        base, _ = place
        stage = k_stage_of(column)
        mbarrier_wait(base + FULL_K + 8 * stage, k_phase_of(column))
        return keys_of(smem, place, types.int32(K + stage * KV_BYTES), warpgroup, thread)

    @inlined
    def scores(keys, place, tile):
        """Issue Sᵀ = K Qᵀ; of END's tile, which is none, nobody uses it."""
        base, _ = place
        wgmma_fence()
        q = types.uint32(lower(base, 16) + stage_of(tile) * (Q_BYTES >> 4))
        s = issue_scores(S_START, keys, q)
        wgmma_commit()
        return s

    @inlined
    def statistics_of(stats, place, tile, thread):
        """−δ and shifts of a tile: shared memory answers late while products read it."""
        (_, pair), stage = rows_of(thread), stage_of(tile)
        return minus_deltas_of(stats, place, stage, pair), shifts_of(stats, place, stage, pair)

    @inlined
    def score_gradients(minus_deltas, values, place, tile):
        """Issue dPᵀ − δ = V dOᵀ − δ."""
        base, _ = place
        wgmma_fence()
        dout = types.uint32(lower(base + DO, 16) + stage_of(tile) * (Q_BYTES >> 4))
        dp = issue_dp(by_keys(minus_deltas), values, dout)
        wgmma_commit()
        return dp

    @inlined
    def under_dp(s, dp, kind, scaling, shifts, smem, place, tile, thread):
        """P of a tile while dP is computed; both, and what follows the tile."""
        (factor, params), (row, pair), stage = scaling, rows_of(thread), stage_of(tile)
        scoring, unit = (
            scoring_of(smem, place, stage, row, pair, factor, params),
            unit_of(factor, params),
        )
        if KEPT:
            following, _, _, _ = descriptor_of(smem, place, types.int32(tile + 1))
        p = probabilities_of(s, kind, (unit, unit), shifts, smem, place, stage, row, pair, scoring)
        if not KEPT:  # shared memory, which K and V are read from, answers late
            following, _, _, _ = descriptor_of(smem, place, types.int32(tile + 1))
        wait_all()
        return p, after_wait(dp), following

    @inlined
    def accumulate(acc_dk, acc_dv, p, dp, kind, smem, stats, place, tile, drawing, thread):
        """Issue dV += Pᵀ dO and dK += dSᵀ Q; wait for the first."""
        (base, _), (row, pair), stage, minus_deltas = place, rows_of(thread), stage_of(tile), ZEROS
        drawn = draw(smem, place, stage, row, pair, *drawing)
        if DROPOUT:  # before a product that shared memory is read for
            minus_deltas = minus_deltas_of(stats, place, stage, pair)
        dout = types.uint32(lower(base + DO, Q_PANEL) + stage_of(tile) * (Q_BYTES >> 4))
        packed = dropped(packed_of(p), drawn)
        wgmma_fence()
        acc_dv = issue_acc(acc_dv, packed, dout)
        wgmma_commit()
        dp = dropped_dp(dp, minus_deltas, drawn)
        ds = pack(gradients_of(w_of(p), dp, kind))
        wgmma_fence()
        q = types.uint32(lower(base, Q_PANEL) + stage_of(tile) * (Q_BYTES >> 4))
        acc_dk = issue_acc(acc_dk, ds, q)
        wgmma_commit()
        wait_all_but_one()
        return acc_dk, after_wait(acc_dv)

    @inlined
    def behind_dk(acc_dk, place, tile, thread):
        """Wait for dK of a tile while the next one's S is computed: its stage is free."""
        base, _ = place
        wait_all_but_one()
        if is_leader(thread):
            mbarrier_arrive(base + EMPTY_Q + 8 * stage_of(tile))
        return after_wait(acc_dk)

    @inlined
    def columns_stream(smem, stats, place, result, params, drawing, thread):
        base, words = place
        dk, dv, _, _, _, factor, scale = result
        share = factor_of(drawing[1])
        warpgroup, scaling = warpgroup_of(thread), (factor, params)
        tile, column, one = types.int64(0), types.int64(0), types.int32(1)
        kind, _, _, _ = descriptor_of(smem, place, tile)
        if kind != END:
            k = arrived_keys(smem, place, column, warpgroup, thread)
            s = scores(k, place, tile)
            minus_deltas, shifts = statistics_of(stats, place, tile, thread)
            wait_all()
            s = after_wait(s)
            while kind != END:
                acc_dk, acc_dv, kind = ACC_START, ACC_START, types.int32(-kind)
                mbarrier_wait(base + FULL_V, v_phase_of(column))
                v = keys_of(smem, place, V, warpgroup, thread)
                dp = score_gradients(minus_deltas, v, place, tile)
                p, dp, following = under_dp(s, dp, kind, scaling, shifts, smem, place, tile, thread)
                while following > END:
                    acc_dk, acc_dv = accumulate(
                        acc_dk, acc_dv, p, dp, kind, smem, stats, place, tile, drawing, thread
                    )
                    tile += one
                    s = scores(k, place, tile)
                    minus_deltas, shifts = statistics_of(stats, place, tile, thread)
                    acc_dk = behind_dk(acc_dk, place, types.int32(tile - one), thread)
                    dp = score_gradients(minus_deltas, v, place, tile)
                    kind = following
                    wait_all_but_one()
                    p, dp, following = under_dp(
                        after_wait(s), dp, kind, scaling, shifts, smem, place, tile, thread
                    )
                # Read before a product that all warps issue: its wait may release the descriptor.
                _, n_block, bh, _ = read_descriptor(
                    smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage_of(tile)
                )
                if is_leader(thread):
                    mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(column))
                    mbarrier_arrive(base + EMPTY_V)
                acc_dk, acc_dv = accumulate(
                    acc_dk, acc_dv, p, dp, kind, smem, stats, place, tile, drawing, thread
                )
                tile += one
                column += one
                kind = following
                if kind != END:
                    k = arrived_keys(smem, place, column, warpgroup, thread)
                s = scores(k, place, tile)
                acc_dk = behind_dk(acc_dk, place, types.int32(tile - one), thread)
                finish(dk, acc_dk, scale, n_block, bh, smem, place, result, opaque(thread))
                finish(dv, acc_dv, share, n_block, bh, smem, place, result, opaque(thread))
                minus_deltas, shifts = statistics_of(stats, place, tile, thread)
                wait_all()
                s = after_wait(s)

    return columns_stream
