"""dK and dV without dQ: the second of two passes, over columns, of the Hopper backward.

The block, its loader and its barriers are those of :mod:`nbflash.kernels.bwd_sm90`, but that K goes
to full_k at once, after dO. Nothing is exchanged, so the warpgroups do not wait for each other, and
every sum has one order: the tiles of a column, the heads of a group one after the other.

    for each tile t of the stream, S of which was issued before
        issue dP = dO Vᵀ                     wait for S:    P = 2^(S · scale − LSE · log2 e)
        issue dV += Pᵀ dO                    wait for dP:   dS = P ∘ (dP − δ)
        issue dK += dSᵀ Q
        issue S of tile t + 1
        if t ends a column: dK · scale, dV → out
"""

from nbflash.kernels.bwd_sm90_config import END, RECORD_WORDS
from nbflash.kernels.bwd_sm90_tile import (
    make_gradients_of,
    make_probabilities_of,
    make_record_of,
    make_statistics_of,
)
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.tile.pipeline import divided, make_ring, read_record
from nbflash.tile.unroll import hide, unrolled
from nbflash.tile.warp_math import make_warpgroup_of
from nbflash.tile.wgmma_gemm import ROW_BYTES, lower, make_gemm_pv, make_gemm_qk, settled
from nbflash.tile.wgmma_kept import make_gemm_kept, make_load_kept
from nbflash.tile.wgmma_rows import WARP_BYTES, make_store_rows


@unrolled
def rows_of(thread):
    """The upper one of a thread's two keys and its first query, in 32 bits: registers are few."""
    return thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2


def make_finish(cfg, others=0):
    """``finish(out, acc, factor, n_block, bh, smem, place, result, thread)``: a gradient leaves.

    ``others``: the warps before the thread's first that have rows of the same numbers.
    """
    TILE_N, OUT = cfg.tile_n, cfg.out_offset + WARP_BYTES * others
    store_rows = make_store_rows(cfg.head_dim, cfg.dtype)

    @inlined
    def finish(out, acc, factor, n_block, bh, smem, place, result, thread):
        _, _, stride, nk, heads_kv, _, _ = result
        base, words = place
        warp, (b, h) = types.int32(thread >> 5), divided(bh, heads_kv)
        first = types.int32(n_block * TILE_N + 16 * warp)
        at = b * stride[0] + h * stride[2] + first * stride[1]
        offset = types.int32(OUT + WARP_BYTES * warp)
        source, target = (base + offset, words + offset // 4), (at, stride[1], nk - first)
        store_rows(out, acc, factor, smem, source, target, types.int32(thread & 31))

    return finish


def make_keys(cfg):
    """``keys_of(smem, place, at, turn, thread)``, ``issue(s, keys, queries)``: Sᵀ = K Qᵀ.

    ``at`` is where K, or V, lies. Narrow ones stay in registers, which saves shared memory half of
    what it is read for; of the others ``keys`` is the lower word.
    """
    if cfg.keys_in_registers:
        issue, load_kept = make_gemm_kept(cfg.dtype, cfg.head_dim), make_load_kept(cfg.head_dim)

        @inlined
        def keys_of(smem, place, at, turn, thread):
            _, words = place
            row, pair = rows_of(thread)
            at = words + at // 4 + row * (ROW_BYTES // 4) + pair // 2
            return load_kept(smem, types.int32(at), types.int32(row & 7))

    else:
        issue = make_gemm_qk(cfg.dtype, cfg.head_dim, cfg.tile_n, cfg.tile_m)

        @inlined
        def keys_of(smem, place, at, turn, thread):
            base, _ = place
            return types.uint32(lower(base + at + turn * 64 * ROW_BYTES, 16))

    return keys_of, issue


def make_columns_stream(cfg):
    """``columns_stream(smem, stats, place, result, thread)``, for every thread that computes."""
    TILE_M, Q_BYTES, KV_BYTES = cfg.tile_m, cfg.q_bytes, cfg.kv_bytes
    Q_PANEL = TILE_M * ROW_BYTES
    K, V, DO, _, _, _, _, RECORDS, *_ = cfg.offsets
    _, EMPTY_Q, FULL_DO, EMPTY_DO, FULL_K, EMPTY_K, FULL_V, EMPTY_V, _, _ = cfg.barriers
    S_START = (types.float32(0),) * (TILE_M // 2)
    ACC_START = (types.float32(0),) * (cfg.head_dim // 2)
    keys_of, issue_scores = make_keys(cfg)
    issue_acc = make_gemm_pv(cfg.dtype, TILE_M)
    record_of, probabilities_of = make_record_of(cfg), make_probabilities_of(cfg)
    (gradients_of, pack), (shifts_of, _, less_deltas) = (
        make_gradients_of(cfg),
        make_statistics_of(cfg),
    )
    finish, ONE = make_finish(cfg), types.float32(1)
    wait_all_but_one, wait_all = wgmma_wait(1), wgmma_wait(0)
    EARLY_DV, warpgroup_of = cfg.early_dv, make_warpgroup_of(cfg.consumers)
    (stage_of, phase_of), (k_stage_of, k_phase_of) = make_ring(cfg.stages), make_ring(cfg.k_stages)
    _, v_phase_of = make_ring(1)

    @inlined
    def arrived_keys(smem, place, column, turn, thread):
        """K of a column, once it is there."""
        base, _ = place
        stage = k_stage_of(column)
        mbarrier_wait(base + FULL_K + 8 * stage, k_phase_of(column))
        return keys_of(smem, place, types.int32(K + stage * KV_BYTES), turn, thread)

    @inlined
    def scores(keys, place, at, stage):
        """Issue Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
        base, _ = place
        wgmma_fence()
        queries = types.uint32(lower(base + at, 16) + stage * (Q_BYTES >> 4))
        s = issue_scores(S_START, keys, queries)
        wgmma_commit()
        return s

    @inlined
    def step(state, tile, smem, stats, place, scales, where):
        """One tile, up to the issue of dK."""
        s, acc_dk, acc_dv, kind, v = state
        base, _ = place
        (row, pair), stage = where, stage_of(tile)
        # dPᵀ = V dOᵀ
        mbarrier_wait(base + FULL_DO + 8 * stage, phase_of(tile))
        dp = scores(v, place, DO, stage)
        shifts = shifts_of(stats, place, stage, pair)
        p = probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair)
        # dV += Pᵀ dO
        dout = types.uint32(lower(base + DO, Q_PANEL) + stage * (Q_BYTES >> 4))
        if EARLY_DV:
            packed = pack(p)
            wgmma_fence()
            acc_dv = issue_acc(acc_dv, packed, dout)
            wgmma_commit()
            wait_all_but_one()
        else:
            wait_all()
        dp = less_deltas(settled(dp), stats, place, stage, pair)
        ds = pack(gradients_of(p, dp, kind))
        if not EARLY_DV:
            packed = pack(p)
        wgmma_fence()
        if not EARLY_DV:
            acc_dv = issue_acc(acc_dv, packed, dout)
            wgmma_commit()
        # dK += dSᵀ Q
        q = types.uint32(lower(base, Q_PANEL) + stage * (Q_BYTES >> 4))
        acc_dk = issue_acc(acc_dk, ds, q)
        wgmma_commit()
        return acc_dk, acc_dv

    @inlined
    def columns_stream(smem, stats, place, result, thread):
        base, words = place
        dk, dv, _, _, _, scale_log2, scale = result
        turn = warpgroup_of(thread)
        leader, scales = thread % 128 == 0, (scale_log2, scale_log2)
        where = rows_of(thread)
        tile, column, one = types.int32(0), types.int32(0), types.int32(1)
        kind, _, _, _ = record_of(smem, place, tile)
        if kind != END:
            kind = types.int32(-kind)
            k = arrived_keys(smem, place, column, turn, thread)
            s = scores(k, place, 0, stage_of(tile))
            wait_all()
            s = settled(s)
            while kind != END:
                acc_dk, acc_dv = ACC_START, ACC_START
                mbarrier_wait(base + FULL_V, v_phase_of(column))
                v = keys_of(smem, place, V, turn, thread)
                ends = False
                while not ends:
                    state = s, acc_dk, acc_dv, kind, v
                    acc_dk, acc_dv = step(state, tile, smem, stats, place, scales, where)
                    kind, _, _, _ = record_of(smem, place, types.int32(tile + one))
                    ends = kind <= END
                    if ends:
                        kind = types.int32(-kind)
                        _, n_block, bh, _ = read_record(
                            smem, words + RECORDS // 4 + RECORD_WORDS * stage_of(tile)
                        )
                        if leader:
                            mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(column))
                            mbarrier_arrive(base + EMPTY_V)
                        column += one
                        if kind != END:
                            k = arrived_keys(smem, place, column, turn, thread)
                    wait_all_but_one()
                    acc_dv = settled(acc_dv)
                    s = scores(k, place, 0, stage_of(types.int32(tile + one)))
                    wait_all()
                    acc_dk, s = settled(acc_dk), settled(s)
                    if leader:
                        mbarrier_arrive(base + EMPTY_Q + 8 * stage_of(tile))
                        mbarrier_arrive(base + EMPTY_DO + 8 * stage_of(tile))
                    tile += one
                finish(dk, acc_dk, scale, n_block, bh, smem, place, result, hide(thread))
                finish(dv, acc_dv, ONE, n_block, bh, smem, place, result, hide(thread))

    return columns_stream
