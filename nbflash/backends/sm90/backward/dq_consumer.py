"""What a computing warpgroup of the pass for dQ does: see :mod:`.dq_kernel`."""

from masks import FULL
from nbflash.backends.sm90.backward.dq_config import LAST, ROWS
from nbflash.backends.sm90.backward.dq_statistics import make_load_out, make_statistics_of
from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS, END, STORERS
from nbflash.backends.sm90.shared.dropout import make_drawing, make_gradients
from nbflash.backends.sm90.shared.masking import make_keep_of
from nbflash.backends.sm90.shared.nan_watch import make_bad_of
from nbflash.backends.sm90.shared.score import make_row_weights, make_scored, make_scoring
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.tma import bulk_commit, bulk_wait_read, tma_store_4d
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.finite import poisoned
from nbflash.cuda.tile.ring import divmod_int32, make_ring, read_descriptor
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.warp_math import make_warpgroup_of
from nbflash.cuda.tile.wgmma.gemm import (
    PANEL,
    ROW_BYTES,
    after_wait,
    lower,
    make_gemm_pv,
    make_gemm_qk,
)
from nbflash.cuda.tile.wgmma.softmax import make_wgmma_softmax, scale_fragment
from nbflash.cuda.tile.wgmma.store_shared import make_store_fragment, matrix_row


def make_finish_row(cfg):
    """``finish_row(acc, start, row, bh, result, warpgroup, thread)``: scale · dQ → its place → out.

    TMA is still reading when this returns.
    """
    TILE_M, PANELS, PANEL_BYTES = cfg.tile_m, cfg.panels, ROWS * ROW_BYTES
    store_fragment = make_store_fragment(cfg.head_dim, ROWS)
    pack = make_wgmma_softmax(cfg.head_dim, cfg.dtype).pack

    @inlined
    def finish_row(acc, start, row, bh, result, warpgroup, thread):
        dq_map, _, heads, _, scale = result
        b, h = divmod_int32(bh, heads)
        packed = pack(scale_fragment(acc, (scale, scale)))
        store_fragment(matrix_row(start, thread), packed)
        fence_proxy_async()
        bar_sync(STORERS + warpgroup, 128)
        if thread % 128 == 0:
            for panel in range(PANELS):
                source = start + types.uint32(panel * PANEL_BYTES)
                q0 = row * TILE_M + warpgroup * ROWS
                tma_store_4d(dq_map, panel * PANEL, q0, h, b, source)
            bulk_commit()

    return finish_row


def make_compute_stream(cfg):
    """``compute_stream(smem, place, result, source, stats, masking, besides, thread)``.

    ``besides``: the score's parameters, and what dropout has drawn and drops by.
    """
    TILE_N, Q_STAGES, DO_STAGES = cfg.tile_n, cfg.q_stages, cfg.do_stages
    PART_BYTES, KV_BYTES, KV_PANEL = cfg.part_bytes, cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    DO, K, V, DESCRIPTORS = layout.do, layout.k, layout.v, layout.descriptors
    FULL_Q, EMPTY_Q, FULL_DO = barriers.full_q, barriers.empty_q, barriers.full_do
    EMPTY_DO, FULL_K, EMPTY_K = barriers.empty_do, barriers.full_k, barriers.empty_k
    FULL_V, EMPTY_V = barriers.full_v, barriers.empty_v
    S_START = (types.float32(0),) * (TILE_N // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    issue_scores = make_gemm_qk(cfg.dtype, cfg.head_dim, ROWS, TILE_N)
    issue_dq = make_gemm_pv(cfg.dtype, TILE_N)
    pack = make_wgmma_softmax(TILE_N, cfg.dtype).pack
    dropped_dp, ds_full, ds_masked = make_gradients(cfg, TILE_N)
    _, row_words_of, drawing_of = make_drawing(cfg)
    (where_of, scoring_of), weights = make_scoring(cfg), make_row_weights(cfg, TILE_N)
    scored, unit_of = make_scored(cfg, TILE_N, 0, with_slope=True)
    weights_full, weights_masked = weights
    keep_of, bad_of = make_keep_of(cfg), make_bad_of(cfg)
    load_out, statistics_of = make_load_out(cfg), make_statistics_of(cfg)
    finish_row = make_finish_row(cfg)
    BY_Q, FULL_TILES = cfg.leaves_by_q, cfg.full_tiles
    OUT, OUT_STAGES, EMPTY_OUT = (0, Q_STAGES, EMPTY_Q) if BY_Q else (DO, DO_STAGES, EMPTY_DO)
    # By votes wherever it is used: matrix descriptors stay in uniform registers, and few of them.
    warpgroup_of, wait_all, wait_all_but_one = (
        make_warpgroup_of(cfg.consumers),
        *map(wgmma_wait, (0, 1)),
    )
    (k_stage_of, k_phase_of), (v_stage_of, v_phase_of) = (
        make_ring(cfg.k_stages),
        make_ring(cfg.v_stages),
    )
    (q_stage_of, q_phase_of), (do_stage_of, do_phase_of) = map(make_ring, (Q_STAGES, DO_STAGES))
    out_stage_of, _ = make_ring(OUT_STAGES)

    @inlined
    def descriptor_at(words, tile):
        return words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * k_stage_of(tile)

    @inlined
    def descriptor_of(smem, place, tile):
        """The descriptor of a tile of the stream, once its K is there."""
        base, words = place
        stage = k_stage_of(tile)
        mbarrier_wait(base + FULL_K + 8 * stage, k_phase_of(tile))
        return read_descriptor(smem, descriptor_at(words, tile))

    @inlined
    def issue_s(place, nth_row, tile, thread):
        """Issue S = Q Kᵀ; of END's tile, which is none, nobody uses it."""
        base, _ = place
        wgmma_fence()
        part = warpgroup_of(thread) * Q_STAGES + q_stage_of(nth_row)
        q = types.uint32(lower(base, 16) + part * (PART_BYTES >> 4))
        k = types.uint32(lower(base + K, 16) + k_stage_of(tile) * (KV_BYTES >> 4))
        s = issue_scores(S_START, q, k)
        wgmma_commit()
        return s

    @inlined
    def probabilities_of(s, kind, n0, rows, smem, words, tile, masking, scaling, thread):
        """P of a tile, with what is hidden masked to −∞ before the exponential.

        If score functions have slopes it is P ∘ ∂S'/∂S: there is no dV here.
        """
        (m, row, bh, where), (scale, params) = rows, scaling
        kind = types.int32(kind & (LAST - 1))
        thread = opaque(thread)  # or what follows from it stays in registers
        scoring = scoring_of(where, row, n0, scale, params, thread)
        x, unit = scored(s, scoring), unit_of(scoring)
        if FULL_TILES or kind == FULL:
            return weights_full(x, m, unit)
        keep = keep_of(kind, n0, row, bh, masking, thread)
        m = poisoned(m, bad_of(smem, words, k_stage_of(tile), keep, thread))
        return weights_masked(x, m, unit, keep)

    @inlined
    def gradients_of(p, dp, kind, minus_delta, drawing):
        """dS of a tile."""
        dp = dropped_dp(dp, minus_delta, drawing)
        if FULL_TILES or kind == FULL:
            return ds_full(p, dp, minus_delta)
        return ds_masked(p, dp, minus_delta)

    @inlined
    def issue_dp(place, nth_row, tile, thread):
        """Issue dP = dO Vᵀ."""
        base, _ = place
        stage, part = v_stage_of(tile), warpgroup_of(thread) * DO_STAGES + do_stage_of(nth_row)
        mbarrier_wait(base + FULL_V + 8 * stage, v_phase_of(tile))
        wgmma_fence()
        dout = types.uint32(lower(base + DO, 16) + part * (PART_BYTES >> 4))
        v = types.uint32(lower(base + V, 16) + stage * (KV_BYTES >> 4))
        dp = issue_scores(S_START, dout, v)
        wgmma_commit()
        return dp

    @inlined
    def accumulate(acc, p, dp, kind, minus_delta, drawing, place, tile):
        """dS = P ∘ (dP − δ); issue dQ += dS K."""
        base, _ = place
        ds = pack(gradients_of(p, dp, kind, minus_delta, drawing))
        wgmma_fence()
        k = types.uint32(lower(base + K, KV_PANEL) + k_stage_of(tile) * (KV_BYTES >> 4))
        acc = issue_dq(acc, ds, k)
        wgmma_commit()
        return acc

    @inlined
    def under_dp(s, dp, kind, n0, rows, smem, place, tile, masking, scaling, thread):
        """P of a tile while dP is computed; both."""
        base, words = place
        p = probabilities_of(s, kind, n0, rows, smem, words, tile, masking, scaling, thread)
        wait_all()
        dp = after_wait(dp)
        if thread % 128 == 0:
            mbarrier_arrive(base + EMPTY_V + 8 * v_stage_of(tile))
        return p, dp

    @inlined
    def behind_dq(acc, place, nth_row, tile, thread):
        """Issue S of a tile and wait for dQ of the one before; both."""
        base, _ = place
        s = issue_s(place, nth_row, tile, thread)
        wait_all_but_one()
        acc = after_wait(acc)
        if thread % 128 == 0:
            mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(types.int32(tile - 1)))
        return s, acc

    @inlined
    def compute_stream(smem, place, result, source, stats, masking, besides, thread):
        base, words = place
        params, drawn, dropping = besides
        warpgroup, leader, scale = warpgroup_of(thread), thread % 128 == 0, result[3]
        scaling = scale, params
        sizes = result[1], result[2]
        full_q = base + FULL_Q + 8 * Q_STAGES * warpgroup
        empty_q = base + EMPTY_Q + 8 * Q_STAGES * warpgroup
        full_do = base + FULL_DO + 8 * DO_STAGES * warpgroup
        empty_do = base + EMPTY_DO + 8 * DO_STAGES * warpgroup
        tile, nth_row, one = types.int64(0), types.int64(0), types.int32(1)
        kind, n0, row, bh = descriptor_of(smem, place, tile)
        if kind != END:
            mbarrier_wait(full_q, 0)
            s = issue_s(place, nth_row, tile, thread)
            loaded = load_out(source, row, bh, sizes, opaque(thread))
            wait_all()
            s = after_wait(s)
            while kind != END:
                if not BY_Q and kind >= LAST and leader:
                    mbarrier_arrive(empty_q + 8 * q_stage_of(nth_row))
                stage = do_stage_of(nth_row)
                rematerialised_thread = opaque(thread)  # or addresses stay in registers
                mbarrier_wait(full_do + 8 * stage, do_phase_of(nth_row))
                part = warpgroup * DO_STAGES + stage
                dout = words + DO // 4 + part * (PART_BYTES // 4)
                m, minus_delta = statistics_of(
                    loaded, smem, dout, stats, row, bh, sizes, dropping, rematerialised_thread
                )
                row_words = row_words_of(drawn, row, bh, result[2], rematerialised_thread)
                where = where_of(row, bh, result[2], scale, params, rematerialised_thread)
                rows, acc = (m, row, bh, where), ACC_START
                dp = issue_dp(place, nth_row, tile, thread)
                p, dp = under_dp(s, dp, kind, n0, rows, smem, place, tile, masking, scaling, thread)
                while kind < LAST:
                    drawing = drawing_of(drawn, row_words, dropping, n0, thread)
                    acc = accumulate(acc, p, dp, kind, minus_delta, drawing, place, tile)
                    tile += one
                    kind, n0, _, _ = descriptor_of(smem, place, tile)
                    s, acc = behind_dq(acc, place, nth_row, tile, thread)
                    dp = issue_dp(place, nth_row, tile, thread)
                    wait_all_but_one()
                    s = after_wait(s)
                    if not BY_Q and kind >= LAST and leader:
                        mbarrier_arrive(empty_q + 8 * q_stage_of(nth_row))
                    p, dp = under_dp(
                        s, dp, kind, n0, rows, smem, place, tile, masking, scaling, thread
                    )
                if BY_Q and leader:
                    mbarrier_arrive(empty_do + 8 * do_stage_of(nth_row))
                kind = types.int32(kind - LAST)
                drawing = drawing_of(drawn, row_words, dropping, n0, thread)
                # Read before a product that all warps issue: its wait may release the descriptor.
                _, _, this_row, this_bh = read_descriptor(smem, descriptor_at(words, tile))
                acc = accumulate(acc, p, dp, kind, minus_delta, drawing, place, tile)
                stage = out_stage_of(nth_row)
                start = types.uint32(base + OUT + (warpgroup * OUT_STAGES + stage) * PART_BYTES)
                empty_out = base + EMPTY_OUT + 8 * OUT_STAGES * warpgroup + 8 * stage
                tile += one
                nth_row += one
                kind, n0, row, bh = descriptor_of(smem, place, tile)
                if kind != END:
                    mbarrier_wait(full_q + 8 * q_stage_of(nth_row), q_phase_of(nth_row))
                if BY_Q:
                    loaded = load_out(source, row, bh, sizes, opaque(thread))  # of END's: row 0
                s, acc = behind_dq(acc, place, nth_row, tile, thread)
                finish_row(acc, start, this_row, this_bh, result, warpgroup, thread)
                if not BY_Q:  # registers are few
                    loaded = load_out(source, row, bh, sizes, opaque(thread))
                wait_all()
                s = after_wait(s)
                if leader:
                    bulk_wait_read()
                    mbarrier_arrive(empty_out)

    return compute_stream
