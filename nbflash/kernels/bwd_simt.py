"""Backward pass without tensor cores: Algorithm 4, and its block-sparse form, in one body.

The two halves of a thread block do the same work on different operands, so that every
product has a large fragment per thread:

                         half 0                       half 1
    X = A Bᵀ             S  = Q Kᵀ                    dP = dO Vᵀ
    shared               P  = 2^(S − lse)             dS = P ∘ (dP − δ)
    acc += Xᵀ C          dV += Pᵀ dO                  dK += dSᵀ Q
    dQ += dS K           left half of the columns     right half of the columns

``walk = "columns"`` keeps K and V and walks the query tiles of a key tile (the transposed
schedule): dK and dV stay in registers, and with ``atomic_dq`` dQ is added to global memory
(one pass, 5 products). ``walk = "rows"`` keeps Q and dO and walks the key tiles of a query
tile: dQ stays in registers. Rows plus columns without atomics is the deterministic form
(two passes, 7 products).

Scores are masked to −∞ before the exponential. A row that attends nothing has lse = −∞,
which is read as +∞, as for rows past the end: P = 2^(S − ∞) = 0.

    shared memory
    K   tile_n × ld       Kᵀ, Vᵀ  width × ld_n       P, dS  tile_m × ld_n
    Q   tile_m × ld       dO  tile_m × ld            lse, δ  tile_m each
"""

import math

from masks import FULL
from nbflash.constants import LN2, LOG2_E
from nbflash.kernels.spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.ptx._asm import cuda, inlined, types
from nbflash.tile.copy import STORAGE, TileCopy, make_finite
from nbflash.tile.gemm import make_gemm_nn, make_gemm_tn
from nbflash.tile.mask import make_apply_mask
from nbflash.tile.unroll import (
    atomic_add,
    atomic_add4,
    both,
    equal,
    exp2,
    hide,
    load4,
    select,
    store4,
    unrolled,
)


def make_bwd_simt(cfg):
    """The kernel for a :class:`~nbflash.kernels.simt_config.SimtBackwardConfig`.

    Arguments of the kernel: q, k, v, dout, lse, delta, dq, dk, dv; strides (batch,
    sequence, head) of q, k, v, dout, dq, dk, dv, in elements; nq, nk, heads, group =
    heads // heads_kv; tiles per plane; scale and scale · log2 e; then the schedule. dq is
    an accumulator-typed array that holds zeros if it is added to atomically.
    """
    TX, TY, RM, RN = cfg.tx, cfg.ty, cfg.rm, cfg.rn
    TILE_M, TILE_N, LD, LDN = cfg.tile_m, cfg.tile_n, cfg.ld, cfg.ld_n
    HEAD_DIM, THREADS, ACC = cfg.head_dim, cfg.threads, cfg.accumulator
    COLUMNS_WALK, ATOMIC_DQ = cfg.walk == "columns", cfg.atomic_dq
    HALF = THREADS // 2
    RD, RK, RQ = cfg.width // TX, TILE_N // TY, cfg.width // 2 // TX
    DEPTH = -(-HEAD_DIM // 4) * 4
    K, KT, VT, Q, DO, P, DS, STATS, _ = cfg.offsets
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

    def row_stats(smem, at):
        return [x for i in range(0, RM, 4) for x in load4(smem, at + ROWS[i])]

    def store_x(smem, at, x):
        for i in range(RM):
            for j in range(0, RN, 4):
                quad = x[i * RN + j : i * RN + j + 4]
                store4(smem, at + (ROWS[i] * LDN + COLUMNS[j]), quad)

    @unrolled
    def store_p(smem, at, s, lse):
        row_lse = row_stats(smem, lse)
        store_x(smem, at, [exp2(x - row_lse[n // RN]) for n, x in enumerate(s)])

    @unrolled
    def store_ds(smem, at, p_at, dp, delta):
        row_delta, ds = row_stats(smem, delta), []
        for i in range(RM):
            for j in range(0, RN, 4):
                p = load4(smem, p_at + (ROWS[i] * LDN + COLUMNS[j]))
                for x, y in zip(p, dp[i * RN + j : i * RN + j + 4], strict=True):
                    ds.append(select(equal(x, 0.0), 0.0, x * (y - row_delta[i])))
        store_x(smem, at, ds)

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

    @inlined
    def fill_stats(smem, lse, delta, at, valid, tid):
        for i in range(tid, TILE_M, THREADS):
            row_lse, row_delta = ACC(math.inf), ZERO
            if i < valid:
                natural = ACC(lse[at + i])
                row_delta = ACC(delta[at + i])
                if natural != ACC(-math.inf):
                    row_lse = natural * ACC(LOG2_E)
            smem[STATS + i] = row_lse
            smem[STATS + TILE_M + i] = row_delta

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
        nq,
        nk,
        heads,
        group,
        n_row,
        scale,
        scale_log2,
        work,
        plane_of,
        row_ptr,
        col_idx,
        kind,
        lo,
        hi,
        bits,
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
        in_place = False  # K and V of a column walk, which a dead head may not bring
        for h in range(first_head, first_head + n_heads):
            plane = plane_of[b * heads + h]
            q_base = b * q_stride[0] + h * q_stride[2]
            do_base = b * do_stride[0] + h * do_stride[2]
            row_base = (b * heads + h) * nq
            begin, end = row_ptr[plane * n_row + tile], row_ptr[plane * n_row + tile + 1]
            for t in range(begin, end):
                tid = hide(cuda.threadIdx.x)
                if COLUMNS_WALK:
                    m0 = col_idx[t] * TILE_M
                else:
                    n0 = col_idx[t] * TILE_N
                cuda.syncthreads()  # every thread has read the last tiles
                if COLUMNS_WALK or t == begin:
                    at = q_base + m0 * q_stride[1]
                    fill_q(smem, Q, q, at, q_stride[1], nq - m0, scale_log2, tid)
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
                careful = False
                if kind[t] != FULL:
                    if half == 0:
                        first, last = plane * nq, plane * nq + nq - 1
                        x = apply_mask(
                            x, kind[t], lo, hi, first, last, m0, n0, bits, 4 * ty, 4 * tx
                        )
                    careful = not (
                        finite_m(smem, Q, tid)
                        and finite_m(smem, DO, tid)
                        and finite_n(smem, K, tid)
                    )
                own = 4 * ty * LDN + 4 * tx
                if half == 0:
                    # P = 2^(S − lse)
                    store_p(smem, P + own, x, STATS + 4 * ty)
                cuda.syncthreads()  # P is in place
                if half == 1:
                    # dS = P ∘ (dP − δ)
                    store_ds(smem, DS + own, P + own, x, STATS + TILE_M + 4 * ty)
                cuda.syncthreads()  # dS is in place
                if COLUMNS_WALK:
                    # dV += Pᵀ dO in half 0, dK += dSᵀ Q in half 1
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
            drain_n(smem, K, dk, k_at, dk_stride[1], nk - n0, ACC(LN2), tid)
        else:
            cuda.syncthreads()  # Q is free
            store_dq(smem, Q + 4 * ty * LD + q_column, dq_acc)
            cuda.syncthreads()  # dQ is in place
            at = b * dq_stride[0] + bh % heads * dq_stride[2] + m0 * dq_stride[1]
            drain_m(smem, Q, dq, at, dq_stride[1], nq - m0, scale, tid)

    return bwd_simt


def bwd_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, wide = types.CPointer(STORAGE[cfg.dtype]), types.CPointer(cfg.accumulator)
    dq = wide if cfg.atomic_dq else tensor
    tensors = (*(tensor,) * 4, wide, wide, dq, tensor, tensor, *(STRIDES,) * 7)
    sizes = (types.int32,) * 5
    return KernelSpec(
        f"nbflash_bwd_simt_{cfg.walk}",
        make_bwd_simt,
        cfg,
        (*tensors, *sizes, cfg.accumulator, cfg.accumulator, *SCHEDULE),
    )
