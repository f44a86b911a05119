"""Backward pass without tensor cores: Algorithm 4, and its block-sparse form, in one body.

The two halves of a thread block do the same work on different operands, so that every
product has a large fragment per thread:

                         half 0                       half 1
    X = A Bᵀ             S  = Q Kᵀ                    dP = dO Vᵀ
    shared               P  = 2^(S − lse)             dS = P ∘ (dP − δ), ∘ ∂score/∂S
    acc += Xᵀ C          dV += Pᵀ dO                  dK += dSᵀ Q
    dQ += dS K           left half of the columns     right half of the columns

``walk = "columns"`` keeps K and V and walks the query tiles of a key tile (the transposed
schedule): dK and dV stay in registers, and with ``atomic_dq`` dQ is added to global memory
(one pass, 5 products). ``walk = "rows"`` keeps Q and dO and walks the key tiles of a query
tile: dQ stays in registers. Rows plus columns without atomics is the deterministic form
(two passes, 7 products).

A score function (:mod:`nbflash.cuda.tile.score`) takes scale · Q Kᵀ in half 0, which leaves its
derivative where half 1 puts dS. With dropout (:mod:`nbflash.cuda.tile.dropout`) dP = dO Vᵀ ∘ Z in
half 1, which puts P ∘ Z in the place of P once it has read it.

Exponents S − lse are masked to −∞: an lse that is NaN stays with what its row attends. A row
that attends nothing has lse = −∞, which is read as +∞, as for rows past the end:
P = 2^(S − ∞) = 0.

    shared memory
    K   tile_n × ld       Kᵀ, Vᵀ  width × ld_n       P, dS  tile_m × ld_n
    Q   tile_m × ld       dO  tile_m × ld            lse, δ  tile_m each
"""

from masks import FULL
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.tile.convert import TileCopy, make_finite
from nbflash.cuda.tile.dropout import dropout_signatures, make_dropout, times_kept
from nbflash.cuda.tile.score import make_score, scaled, score_signature, slope_at
from nbflash.cuda.tile.simt.atomic import atomic_add, atomic_add4
from nbflash.cuda.tile.simt.gemm import make_gemm_nn, make_gemm_tn
from nbflash.cuda.tile.simt.gradient import make_fill_stats, make_store_x
from nbflash.cuda.tile.simt.mask import make_apply_mask
from nbflash.cuda.tile.tracing import both, equal, exp2, load4, opaque, select, store4, unrolled
from nbflash.definitions.constants import LN2, LOG2_E


def make_bwd_simt(cfg):
    """The kernel for a :class:`~.configs.SimtBackwardConfig`.

    Arguments of the kernel: q, k, v, dout, lse, delta, dq, dk, dv; strides (batch,
    sequence, head) of q, k, v, dout, dq, dk, dv, in elements; dropout's state; nq, nk, heads,
    group = heads // heads_kv; tiles per plane; scale, and what Q is multiplied with (scale ·
    log2 e, or scale before a score); the schedule; the score's parameters; dropout's threshold
    and factor. dq is an accumulator-typed array that holds zeros if it is added to atomically.
    """
    TX, TY, RM, RN = cfg.tx, cfg.ty, cfg.rm, cfg.rn
    TILE_M, TILE_N, LD, LDN = cfg.tile_m, cfg.tile_n, cfg.ld, cfg.ld_n
    HEAD_DIM, THREADS, ACC = cfg.head_dim, cfg.threads, cfg.accumulator.numba
    COLUMNS_WALK, ATOMIC_DQ = cfg.walk == "columns", cfg.atomic_dq
    HALF = THREADS // 2
    RD, RK, RQ = cfg.width // TX, TILE_N // TY, cfg.width // 2 // TX
    DEPTH = -(-HEAD_DIM // 4) * 4
    layout = cfg.smem
    K, KT, VT = layout.k, layout.kt, layout.vt
    Q, DO, P = layout.q, layout.do, layout.p
    DS, STATS = layout.ds, layout.statistics
    WIDTH = cfg.width
    ZERO, ONE = ACC(0), ACC(1)
    X_START, ACC_START, DQ_START = (ZERO,) * (RM * RN), (ZERO,) * (RK * RD), (ZERO,) * (RM * RQ)
    ROWS = [4 * TY * (i // 4) + i % 4 for i in range(max(RM, RK))]
    COLUMNS = [4 * TX * (j // 4) + j % 4 for j in range(max(RN, RD))]

    fill_k = TileCopy(cfg, TILE_N, chunks=cfg.chunks).fill
    fill_kt = TileCopy(cfg, TILE_N, transposed=True, chunks=cfg.chunks).fill
    fill_q = TileCopy(cfg, TILE_M, chunks=cfg.chunks).fill
    drain_n, drain_m = TileCopy(cfg, TILE_N).drain, TileCopy(cfg, TILE_M).drain
    finite_m, finite_n = make_finite(cfg, TILE_M), make_finite(cfg, TILE_N)
    unroll = cfg.unroll
    gemm_x = make_gemm_nn(RM, RN, ROWS, LD, LDN, 4 * TX, DEPTH, unroll=unroll)
    gemm_acc, gemm_acc_careful = (
        make_gemm_tn(RK, RD, LDN, 4 * TY, LD, 4 * TX, TILE_M, unroll=unroll, skip_zeros=careful)
        for careful in (False, True)
    )
    gemm_dq, gemm_dq_careful = (
        make_gemm_nn(RM, RQ, ROWS, LDN, LD, 4 * TX, TILE_N, unroll=unroll, skip_zeros=careful)
        for careful in (False, True)
    )
    apply_mask = make_apply_mask(ROWS[:RM], COLUMNS[:RN], TILE_M, TILE_N)
    SCORED, UNIT = cfg.score is not None, ACC(LOG2_E)
    SLOPED, FROM_Q = SCORED and cfg.score.has_slope, ACC(1 if SCORED else LN2)
    places = [(i, j) for i in ROWS[:RM] for j in COLUMNS[:RN]]
    score = make_score(cfg.score, places)
    hold, apply_score, apply_with_slope = score.hold, score.apply, score.apply_with_slope
    rest = score.rest
    DROPOUT, steps = bool(cfg.dropout), (RM, RN, 4 * TY, 4 * TX)
    draws_of, kept, drop = make_dropout(cfg.dropout, *steps)

    store_x = make_store_x(ROWS[:RM], COLUMNS[:RN], LDN)
    fill_stats = make_fill_stats(cfg, STATS)

    def row_stats(smem, at):
        return [x for i in range(0, RM, 4) for x in load4(smem, at + ROWS[i])]

    @unrolled
    def store_slopes(smem, at, s):
        """∂S'/∂S of every score; the scores are returned."""
        store_x(smem, at, [slope_at(cfg.score, s, i) for i in range(RM * RN)])
        return tuple(s[: RM * RN])

    @unrolled
    def exponents(smem, s, lse):
        row_lse = row_stats(smem, lse)
        return tuple(x - row_lse[n // RN] for n, x in enumerate(s))

    @unrolled
    def store_p(smem, at, x):
        store_x(smem, at, [exp2(y) for y in x])

    @unrolled
    def store_ds(smem, at, p_at, dp, delta):
        row_delta, ds = row_stats(smem, delta), []
        for i in range(RM):
            for j in range(0, RN, 4):
                place = ROWS[i] * LDN + COLUMNS[j]
                p, gradients = load4(smem, p_at + place), dp[i * RN + j : i * RN + j + 4]
                values = [x * (y - row_delta[i]) for x, y in zip(p, gradients, strict=True)]
                if SLOPED:
                    slopes = load4(smem, at + place)
                    values = [x * y for x, y in zip(values, slopes, strict=True)]
                ds += [select(equal(x, 0.0), 0.0, y) for x, y in zip(p, values, strict=True)]
        store_x(smem, at, ds)

    @unrolled
    def drop_p(smem, at, z, factor):
        for i in range(RM):
            for j in range(0, RN, 4):
                place = at + (ROWS[i] * LDN + COLUMNS[j])
                p = load4(smem, place)
                store4(smem, place, times_kept(p, z, i * RN + j, factor))

    @unrolled
    def store_acc(smem, at, acc):
        for i in range(RK):
            for c in range(0, RD, 4):
                store4(smem, at + (ROWS[i] * LD + COLUMNS[c]), acc[i * RD + c : i * RD + c + 4])

    @unrolled
    def store_dq(smem, at, dq):
        for i in range(RM):
            for c in range(0, RQ, 4):
                store4(smem, at + (ROWS[i] * LD + COLUMNS[c]), dq[i * RQ + c : i * RQ + c + 4])

    @unrolled
    def scatter_dq(target, base, stride, valid, row, column, dq, scale):
        width = 4 if cfg.vector_red else 1
        for i in range(RM):
            m = row + ROWS[i]
            for j in range(0, RQ, width):
                d = column + COLUMNS[j]
                inside = m < valid
                if cfg.width > HEAD_DIM:
                    inside = both(inside, d < HEAD_DIM)
                at = select(inside, base + stride * m + d, base)
                values = [select(inside, x * scale, 0.0) for x in dq[i * RQ + j :][:width]]
                if width == 4:
                    atomic_add4(target, at, values)
                else:
                    atomic_add(target, at, values[0])

    def bwd_simt(
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dq,
        dk,
        dv,
        q_stride,
        k_stride,
        v_stride,
        do_stride,
        dq_stride,
        dk_stride,
        dv_stride,
        state,
        nq,
        nk,
        heads,
        group,
        n_row,
        scale,
        q_factor,
        work,
        plane_of,
        row_ptr,
        col_idx,
        kind,
        lo,
        hi,
        bits,
        params,
        dropping,
    ):
        smem = cuda.shared.array(0, ACC)
        tid = cuda.threadIdx.x
        half, ty, tx = tid // HALF, tid % HALF // TX, tid % TX
        tile, bh = work[2 * cuda.blockIdx.x], work[2 * cuda.blockIdx.x + 1]
        if COLUMNS_WALK:
            b, h_kv = bh // (heads // group), bh % (heads // group)
            first_head, n_heads = h_kv * group, group
        else:
            b, h_kv = bh // heads, bh % heads // group
            first_head, n_heads = bh % heads, 1
        m0, n0 = tile * TILE_M, tile * TILE_N
        q_column = half * (WIDTH // 2) + 4 * tx
        acc, dq_acc = ACC_START, DQ_START
        if DROPOUT:
            draws, (threshold, factor) = draws_of(state), dropping
        in_place = False  # K and V of a column walk, which a dead head may not bring
        for h in range(first_head, first_head + n_heads):
            plane = plane_of[b * heads + h]
            q_base = b * q_stride[0] + h * q_stride[2]
            do_base = b * do_stride[0] + h * do_stride[2]
            row_base = (b * heads + h) * nq
            begin, end = row_ptr[plane * n_row + tile], row_ptr[plane * n_row + tile + 1]
            for t in range(begin, end):
                tid = opaque(cuda.threadIdx.x)
                if COLUMNS_WALK:
                    m0 = col_idx[t] * TILE_M
                else:
                    n0 = col_idx[t] * TILE_N
                cuda.syncthreads()  # every thread has read the last tiles
                if COLUMNS_WALK or t == begin:
                    at = q_base + m0 * q_stride[1]
                    fill_q(smem, Q, q, at, q_stride[1], nq - m0, q_factor, tid)
                    at = do_base + m0 * do_stride[1]
                    fill_q(smem, DO, dout, at, do_stride[1], nq - m0, ONE, tid)
                    fill_stats(smem, lse, delta, row_base + m0, nq - m0, tid)
                if not COLUMNS_WALK or not in_place:
                    in_place = True
                    at = b * k_stride[0] + h_kv * k_stride[2] + n0 * k_stride[1]
                    fill_kt(smem, KT, k, at, k_stride[1], nk - n0, ONE, tid)
                    fill_k(smem, K, k, at, k_stride[1], nk - n0, ONE, tid)
                    at = b * v_stride[0] + h_kv * v_stride[2] + n0 * v_stride[1]
                    fill_kt(smem, VT, v, at, v_stride[1], nk - n0, ONE, tid)
                cuda.syncthreads()  # all operands are in place
                # S = Q Kᵀ in half 0, dP = dO Vᵀ in half 1
                a_at, b_at = (Q, KT) if half == 0 else (DO, VT)
                x = gemm_x(X_START, smem, a_at + 4 * ty * LD, b_at + 4 * tx)
                own = 4 * ty * LDN + 4 * tx
                if SCORED and half == 0:
                    place, held = (b, h, m0 + 4 * ty, n0 + 4 * tx), hold(h, params, ONE)
                    if SLOPED:
                        x = apply_with_slope(x, held, place, params, ONE)
                        x = store_slopes(smem, DS + own, x)
                    else:
                        x = apply_score(x, held, place, params, ONE)
                    x = scaled(x, rest(params, ONE, UNIT))
                if DROPOUT and half == 1:
                    z = kept(draws, threshold, b, h, m0 + 4 * ty, n0 + 4 * tx)
                    x = drop(x, z, factor)
                careful = False
                if kind[t] != FULL:
                    careful = not (
                        finite_m(smem, Q, tid)
                        and finite_m(smem, DO, tid)
                        and finite_n(smem, K, tid)
                    )
                if half == 0:
                    # P = 2^(S − lse)
                    x = exponents(smem, x, STATS + 4 * ty)
                    if kind[t] != FULL:
                        first, last = plane * nq, plane * nq + nq - 1
                        x = apply_mask(
                            x, kind[t], lo, hi, first, last, m0, n0, bits, 4 * ty, 4 * tx
                        )
                    store_p(smem, P + own, x)
                cuda.syncthreads()  # P is in place
                if half == 1:
                    # dS = P ∘ (dP − δ)
                    store_ds(smem, DS + own, P + own, x, STATS + TILE_M + 4 * ty)
                    if DROPOUT:
                        drop_p(smem, P + own, z, factor)
                cuda.syncthreads()  # dS is in place
                if COLUMNS_WALK:
                    # dV += (P ∘ Z)ᵀ dO in half 0, dK += dSᵀ Q in half 1
                    a_at, b_at = (P, DO) if half == 0 else (DS, Q)
                    if careful:
                        acc = gemm_acc_careful(acc, smem, a_at + 4 * ty, b_at + 4 * tx)
                    else:
                        acc = gemm_acc(acc, smem, a_at + 4 * ty, b_at + 4 * tx)
                if ATOMIC_DQ or not COLUMNS_WALK:
                    # dQ += dS K, each half its half of the columns
                    a_at, b_at = DS + 4 * ty * LDN, K + q_column
                    start = DQ_START if COLUMNS_WALK else dq_acc
                    if careful:
                        dq_acc = gemm_dq_careful(start, smem, a_at, b_at)
                    else:
                        dq_acc = gemm_dq(start, smem, a_at, b_at)
                if ATOMIC_DQ:
                    at = b * dq_stride[0] + h * dq_stride[2] + m0 * dq_stride[1]
                    scatter_dq(dq, at, dq_stride[1], nq - m0, 4 * ty, q_column, dq_acc, scale)

        if COLUMNS_WALK:
            place = 4 * ty * LD + 4 * tx
            k_at = b * dk_stride[0] + h_kv * dk_stride[2] + n0 * dk_stride[1]
            v_at = b * dv_stride[0] + h_kv * dv_stride[2] + n0 * dv_stride[1]
            cuda.syncthreads()  # K is free
            if half == 0:
                store_acc(smem, K + place, acc)
            cuda.syncthreads()  # dV is in place
            drain_n(smem, K, dv, v_at, dv_stride[1], nk - n0, ONE, tid)
            cuda.syncthreads()  # dV is stored
            if half == 1:
                store_acc(smem, K + place, acc)
            cuda.syncthreads()  # dK is in place
            drain_n(smem, K, dk, k_at, dk_stride[1], nk - n0, FROM_Q, tid)
        else:
            cuda.syncthreads()  # Q is free
            store_dq(smem, Q + 4 * ty * LD + q_column, dq_acc)
            cuda.syncthreads()  # dQ is in place
            at = b * dq_stride[0] + bh % heads * dq_stride[2] + m0 * dq_stride[1]
            drain_m(smem, Q, dq, at, dq_stride[1], nq - m0, scale, tid)

    return bwd_simt


def bwd_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, wide = kinds.pointer(STORAGE[cfg.dtype]), kinds.pointer(cfg.accumulator)
    dq = wide if cfg.atomic_dq else tensor
    tensors = (*(tensor,) * 4, wide, wide, dq, tensor, tensor, *(STRIDES,) * 7)
    sizes = (kinds.int32,) * 5
    state, dropping = dropout_signatures(cfg.dropout, cfg.accumulator)
    params = score_signature(cfg.score)
    return KernelSpec(
        f"nbflash_bwd_simt_{cfg.walk}",
        make_bwd_simt,
        cfg,
        (*tensors, state, *sizes, *(cfg.accumulator,) * 2, *SCHEDULE, params, dropping),
    )
