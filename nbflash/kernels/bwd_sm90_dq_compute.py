"""What a computing warpgroup of the pass for dQ does: see :mod:`nbflash.kernels.bwd_sm90_dq`."""

from masks import FULL
from nbflash.kernels.bwd_sm90_dq_config import LAST, ROWS
from nbflash.kernels.sm90_compute import make_masking, poisoned
from nbflash.kernels.sm90_config import END, RECORD_WORDS
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.ptx.tma import bulk_commit, bulk_wait_read, tma_store_4d
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.tile.pipeline import divided, make_advance, read_record
from nbflash.tile.warp_math import make_warpgroup_of, row_of_thread
from nbflash.tile.wgmma_gemm import PANEL, ROW_BYTES, lower, make_gemm_pv, make_gemm_qk, settled
from nbflash.tile.wgmma_gradient import make_row_gradients
from nbflash.tile.wgmma_softmax import make_apply_keep, make_wgmma_softmax, scale_fragment
from nbflash.tile.wgmma_store import make_store_fragment, matrix_row

STORERS = 9  # named barrier of the first warpgroup's threads that store dQ; then the next one's


def make_finish_row(cfg):
    """``finish_row(acc, start, row, bh, result, turn, thread)``: scale · dQ → its dO's place → out.

    The copy engine is still reading when this returns.
    """
    TILE_M, PANELS, PANEL_BYTES = cfg.tile_m, cfg.panels, ROWS * ROW_BYTES
    store_fragment = make_store_fragment(cfg.head_dim, ROWS)
    *_, pack = make_wgmma_softmax(cfg.head_dim, cfg.dtype)

    @inlined
    def finish_row(acc, start, row, bh, result, turn, thread):
        dq_map, _, heads, _, scale = result
        b, h = divided(bh, heads)
        packed = pack(scale_fragment(acc, (scale, scale)))
        store_fragment(matrix_row(start, thread), packed)
        fence_proxy_async()
        bar_sync(STORERS + turn, 128)
        if thread % 128 == 0:
            for panel in range(PANELS):
                source = start + types.uint32(panel * PANEL_BYTES)
                q0 = row * TILE_M + turn * ROWS
                tma_store_4d(dq_map, panel * PANEL, q0, h, b, source)
            bulk_commit()

    return finish_row


def make_statistics_of(cfg):
    """``statistics_of(result, row, bh, nq, thread)``: LSE · log2 e and δ of a thread's rows."""
    TILE_M, STATS_M = cfg.tile_m, cfg.stats_m

    @inlined
    def of_query(stats, first, q):
        tile, inside = divided(types.int32(q), types.int32(STATS_M))
        at = (first + tile) * types.int64(2 * STATS_M) + inside
        return -stats[at], stats[at + STATS_M]

    @inlined
    def statistics_of(stats, row, bh, nq, thread):
        """Rows past the end repeat the last one's."""
        upper = row * TILE_M + row_of_thread(thread)
        tiles, _ = divided(types.int32(nq + STATS_M - 1), types.int32(STATS_M))
        first = types.int64(bh) * tiles
        m0, delta0 = of_query(stats, first, min(upper, nq - 1))
        m1, delta1 = of_query(stats, first, min(upper + 8, nq - 1))
        return (m0, m1), (delta0, delta1)

    return statistics_of


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, masking, thread)``, for every thread."""
    TILE_N, Q_STAGES, DO_STAGES = cfg.tile_n, cfg.q_stages, cfg.do_stages
    PART_BYTES, KV_BYTES, KV_PANEL = cfg.part_bytes, cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    DO, K, V, RECORDS, *_ = cfg.offsets
    FULL_Q, EMPTY_Q, FULL_DO, EMPTY_DO, FULL_K, EMPTY_K, FULL_V, EMPTY_V, _ = cfg.barriers
    S_START = (types.float32(0),) * (TILE_N // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    issue_scores = make_gemm_qk(cfg.dtype, cfg.head_dim, ROWS, TILE_N)
    issue_dq = make_gemm_pv(cfg.dtype, TILE_N)
    _, _, exponents, _, _, _, _, exponentials, _, pack = make_wgmma_softmax(TILE_N, cfg.dtype)
    ds_full, ds_masked = make_row_gradients(TILE_N)
    apply_keep = make_apply_keep(TILE_N, 0)
    bounds_of, keep_of, bad_of = make_masking(cfg)
    statistics_of, finish_row = make_statistics_of(cfg), make_finish_row(cfg)
    warpgroup_of, wait_all, wait_all_but_one = (
        make_warpgroup_of(cfg.consumers),
        *map(wgmma_wait, (0, 1)),
    )
    advance, advance_v = make_advance(cfg.k_stages), make_advance(cfg.v_stages)
    advance_q, advance_do = make_advance(Q_STAGES), make_advance(DO_STAGES)

    @inlined
    def record_of(smem, place, stage, phase):
        """The record of the tile whose K is in ``stage``, once it is there."""
        base, words = place
        mbarrier_wait(base + FULL_K + 8 * stage, phase)
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    @inlined
    def scores(place, part, stage):
        """Issue S = Q Kᵀ."""
        base, _ = place
        q = types.uint32(lower(base, 16) + part * (PART_BYTES >> 4))
        k = types.uint32(lower(base + K, 16) + stage * (KV_BYTES >> 4))
        return issue_scores(S_START, q, k)

    @inlined
    def probabilities_of(s, tile, rows, smem, words, stage, masking, scale, thread):
        """P of a tile, with what is hidden masked to −∞ before the exponential."""
        kind, n0 = tile
        m, _, bounds = rows
        if kind == FULL:
            return exponentials(exponents(s, m, scale))
        keep = keep_of(kind, n0, bounds, masking, thread)
        m = poisoned(m, bad_of(smem, words, stage, keep, thread))
        return exponentials(apply_keep(exponents(s, m, scale), keep))

    @inlined
    def gradients_of(p, dp, kind, delta):
        """dS of a tile."""
        if kind == FULL:
            return ds_full(p, dp, delta)
        return ds_masked(p, dp, delta)

    @inlined
    def step(s, acc, tile, rows, now, smem, place, dout, masking, scale, thread):
        """One tile, up to the issue of dQ."""
        base, words = place
        stage, v_stage, v_phase = now
        # dP = dO Vᵀ
        mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)
        wgmma_fence()
        v = types.uint32(lower(base + V, 16) + v_stage * (KV_BYTES >> 4))
        dp = issue_scores(S_START, dout, v)
        wgmma_commit()
        p = probabilities_of(s, tile, rows, smem, words, stage, masking, scale, thread)
        wait_all()
        dp = settled(dp)
        if thread % 128 == 0:
            mbarrier_arrive(base + EMPTY_V + 8 * v_stage)
        # dS = P ∘ (dP − δ)
        ds = pack(gradients_of(p, dp, tile[0], rows[1]))
        # dQ += dS K
        wgmma_fence()
        k = types.uint32(lower(base + K, KV_PANEL) + stage * (KV_BYTES >> 4))
        acc = issue_dq(acc, ds, k)
        wgmma_commit()
        return acc

    @inlined
    def compute_stream(smem, place, result, stats, masking, thread):
        base, _ = place
        turn, leader, nq = warpgroup_of(thread), thread % 128 == 0, masking[4]
        q_first, do_first = types.int32(turn * Q_STAGES), types.int32(turn * DO_STAGES)
        zero = types.int32(0)
        stage, phase, v_stage, v_phase = zero, zero, zero, zero
        q, q_phase, do, do_phase = zero, zero, zero, zero
        kind, n0, row, bh = record_of(smem, place, stage, phase)
        if kind != END:
            mbarrier_wait(base + FULL_Q + 8 * q_first, q_phase)
            wgmma_fence()
            s = scores(place, q_first, stage)
            wgmma_commit()
            wait_all()
            s = settled(s)
            if kind >= LAST and leader:
                mbarrier_arrive(base + EMPTY_Q + 8 * q_first)
            while kind != END:
                m, delta = statistics_of(stats, row, bh, nq, thread)
                rows = m, delta, bounds_of(masking, row, bh, thread)
                part = types.int32(do_first + do)
                mbarrier_wait(base + FULL_DO + 8 * part, do_phase)
                dout = types.uint32(lower(base + DO, 16) + part * (PART_BYTES >> 4))
                acc, this_row, this_bh, ends = ACC_START, row, bh, False
                while not ends:
                    ends = kind >= LAST
                    tile, now = (kind & (LAST - 1), n0), (stage, v_stage, v_phase)
                    acc = step(
                        s, acc, tile, rows, now, smem, place, dout, masking, result[3], thread
                    )
                    # S of the next tile
                    after, phase = advance(stage, phase)
                    v_stage, v_phase = advance_v(v_stage, v_phase)
                    kind, n0, row, bh = record_of(smem, place, after, phase)
                    if ends:
                        q, q_phase = advance_q(q, q_phase)
                        if kind != END:
                            mbarrier_wait(base + FULL_Q + 8 * (q_first + q), q_phase)
                    wgmma_fence()
                    s = scores(place, types.int32(q_first + q), after)
                    wgmma_commit()
                    wait_all_but_one()
                    acc = settled(acc)
                    if leader:
                        mbarrier_arrive(base + EMPTY_K + 8 * stage)
                    wait_all()
                    s = settled(s)
                    if kind >= LAST and leader:
                        mbarrier_arrive(base + EMPTY_Q + 8 * (q_first + q))
                    stage = after
                start = types.uint32(base + DO + part * PART_BYTES)
                finish_row(acc, start, this_row, this_bh, result, turn, thread)
                if leader:
                    bulk_wait_read()
                    mbarrier_arrive(base + EMPTY_DO + 8 * part)
                do, do_phase = advance_do(do, do_phase)

    return compute_stream
