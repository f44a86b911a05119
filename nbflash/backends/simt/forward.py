"""Forward pass without tensor cores: Algorithm 1 (query-outer order) and Algorithm 5.

One thread block computes one query tile of one head. It walks the tiles that the
schedule lists for its row, which is all that block sparsity means here:

    O = 0, m = −∞, l = 0
    for each live tile (K, V) of the row:
        S  = Q Kᵀ                                    (Q carries scale · log2 e)
        S  = score(S) · log2 e                       (Q carries scale), if there is a score
        S  = −∞ where the tile's kind hides it
        m' = max(m, rowmax S);  α = 2^(m − m')
        P  = 2^(S − m');  l = α l + rowsum P
        P  = P ∘ Z                                   if there is dropout
        O  = α O + P V;   m = m'
    O / l → out,  (m + log2 l) ln 2 → lse

All four products of operands run over rows that are contiguous in the *other* index, so
every operand is loaded four wide and lands in registers whose banks alternate:

    shared memory                     thread (ty, tx) of a TY × TX block owns
    Qᵀ  width  × ld_m                 rows     4 ty + 4 TY c + {0 … 3}   of the tile
    Kᵀ  width  × ld_n                 columns  4 tx + 4 TX c + {0 … 3}   of S and of O
    V   tile_n × ld
    Pᵀ  tile_n × ld_m, skewed         A row's scores and outputs belong to lanes of one warp,
                                      so P is passed on behind a warp barrier.
"""

import math

from masks import FULL
from nbflash.backends.simt.configs import SKEW
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.tile.convert import TileCopy, make_finite
from nbflash.cuda.tile.cp_async import make_wait
from nbflash.cuda.tile.dropout import dropout_signatures, make_dropout
from nbflash.cuda.tile.score import make_score, scaled, score_signature
from nbflash.cuda.tile.simt.gemm import make_gemm_tn
from nbflash.cuda.tile.simt.mask import make_apply_mask
from nbflash.cuda.tile.simt.softmax import make_scale_rows, make_softmax
from nbflash.cuda.tile.tracing import store, store4, unrolled
from nbflash.definitions.constants import LN2, LOG2_E


def make_fwd_simt(cfg):
    """The kernel for a :class:`~.configs.SimtConfig`.

    Arguments of the kernel: q, k, v, out, lse; strides (batch, sequence, head) of the
    first four, in elements; dropout's state; nq, nk, heads, group = heads // heads_kv; tiles
    per plane; what Q is multiplied with (scale · log2 e, or scale before a score); the schedule;
    the score's parameters; dropout's threshold and factor.
    """
    TX, TY, RM, RN = cfg.tx, cfg.ty, cfg.rm, cfg.rn
    TILE_M, TILE_N, LD, LDM, LDN = cfg.tile_m, cfg.tile_n, cfg.ld, cfg.ld_m, cfg.ld_n
    HEAD_DIM, THREADS, ACC = cfg.head_dim, cfg.threads, cfg.accumulator.numba
    P_OVER_K = cfg.p_over_k
    RD = cfg.width // TX
    K, V, P = cfg.smem.k, cfg.smem.v, cfg.p_at
    ZERO, ONE, NEG_INF = ACC(0), ACC(1), ACC(-math.inf)
    M_START, L_START = (NEG_INF,) * RM, (ZERO,) * RM
    S_START, O_START = (ZERO,) * (RM * RN), (ZERO,) * (RM * RD)
    ROWS = [4 * TY * (i // 4) + i % 4 for i in range(RM)]
    COLUMNS = [4 * TX * (j // 4) + j % 4 for j in range(max(RN, RD))]

    copy_q = TileCopy(cfg, TILE_M, transposed=True, chunks=cfg.chunks)
    copy_k = TileCopy(cfg, TILE_N, transposed=True, chunks=cfg.chunks)
    copy_v, copy_o = TileCopy(cfg, TILE_N, chunks=cfg.chunks), TileCopy(cfg, TILE_M)
    SEND_V, send_v, wait = cfg.send_v, copy_v.send, make_wait()
    fill_q, fill_k, fill_v, drain_o = copy_q.fill, copy_k.fill, copy_v.fill, copy_o.drain
    finite = make_finite(cfg, TILE_N)
    gemm_qk = make_gemm_tn(RM, RN, LDM, 4 * TY, LDN, 4 * TX, HEAD_DIM, unroll=cfg.unroll)
    gemm_pv, gemm_pv_careful = (
        make_gemm_tn(
            RM,
            RD,
            LDM,
            4 * TY,
            LD,
            4 * TX,
            TILE_N,
            unroll=cfg.unroll,
            skew=SKEW,
            skip_zeros=careful,
        )
        for careful in (False, True)
    )
    apply_mask = make_apply_mask(ROWS, COLUMNS[:RN], TILE_M, TILE_N)
    SCORED, UNIT = cfg.score is not None, ACC(LOG2_E)
    places = [(i, j) for i in ROWS for j in COLUMNS[:RN]]
    score = make_score(cfg.score, places)
    hold, apply_score, rest = score.hold, score.apply, score.rest
    DROPOUT, steps = bool(cfg.dropout), (RM, RN, 4 * TY, 4 * TX)
    draws_of, kept, drop = make_dropout(cfg.dropout, *steps)
    scale_rows = make_scale_rows(RM, RD)
    softmax = make_softmax(RM, RN, TX)
    row_max, rescale, probabilities = softmax.row_max, softmax.rescale, softmax.probabilities
    row_sum, row_total, inverse = softmax.row_sum, softmax.row_total, softmax.inverse

    @unrolled
    def store_p(smem, at, p):
        for j in range(RN):
            for i in range(0, RM, 4):
                quad = [p[(i + r) * RN + j] for r in range(4)]
                store4(smem, at + (COLUMNS[j] * LDM + COLUMNS[j] // 4 * SKEW + ROWS[i]), quad)

    @unrolled
    def store_o(smem, at, o):
        for i in range(RM):
            for c in range(0, RD, 4):
                store4(smem, at + (ROWS[i] * LD + COLUMNS[c]), o[i * RD + c : i * RD + c + 4])

    @unrolled
    def store_stats(smem, at, l, m):
        for i in range(RM):
            store(smem, at + ROWS[i], l[i])
            store(smem, at + (TILE_M + ROWS[i]), m[i])

    def fwd_simt(
        q,
        k,
        v,
        out,
        lse,
        q_stride,
        k_stride,
        v_stride,
        o_stride,
        state,
        nq,
        nk,
        heads,
        group,
        n_row,
        scale,
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
        ty, tx = tid // TX, tid % TX
        row, bh = work[2 * cuda.blockIdx.x], work[2 * cuda.blockIdx.x + 1]
        b, h = bh // heads, bh % heads
        plane = plane_of[bh]
        q0 = row * TILE_M
        k_base = b * k_stride[0] + (h // group) * k_stride[2]
        v_base = b * v_stride[0] + (h // group) * v_stride[2]
        q_base = b * q_stride[0] + h * q_stride[2] + q0 * q_stride[1]
        fill_q(smem, 0, q, q_base, q_stride[1], nq - q0, scale, tid)

        if DROPOUT:
            draws, (threshold, factor) = draws_of(state), dropping
        m, l, acc = M_START, L_START, O_START
        begin, end = row_ptr[plane * n_row + row], row_ptr[plane * n_row + row + 1]
        for t in range(begin, end):
            n0 = col_idx[t] * TILE_N
            cuda.syncthreads()  # every thread has read the last K, V and P
            k_at, v_at = k_base + n0 * k_stride[1], v_base + n0 * v_stride[1]
            if SEND_V:
                send_v(smem, V, v, v_at, v_stride[1], nk - n0, tid)
            else:
                fill_v(smem, V, v, v_at, v_stride[1], nk - n0, ONE, tid)
            fill_k(smem, K, k, k_at, k_stride[1], nk - n0, ONE, tid)
            cuda.syncthreads()  # K is in place (and V), and Q at the first tile
            # S = Q Kᵀ
            s = gemm_qk(S_START, smem, 4 * ty, K + 4 * tx)
            if SCORED:
                at = b, h, q0 + 4 * ty, n0 + 4 * tx
                s = apply_score(s, hold(h, params, ONE), at, params, ONE)
                s = scaled(s, rest(params, ONE, UNIT))
            if kind[t] != FULL:
                first, last = plane * nq, plane * nq + nq - 1
                s = apply_mask(s, kind[t], lo, hi, first, last, q0, n0, bits, 4 * ty, 4 * tx)
            m_new = row_max(m, s)
            alpha = rescale(m, m_new)
            p = probabilities(s, m_new)
            l = row_sum(l, alpha, p)
            m = m_new
            if DROPOUT:
                z = kept(draws, threshold, b, h, q0 + 4 * ty, n0 + 4 * tx)
                p = drop(p, z, factor)
            if P_OVER_K:
                cuda.syncthreads()  # every thread has read K
            store_p(smem, P + tx * (4 * LDM + SKEW) + 4 * ty, p)
            if SEND_V:
                wait(smem)
                cuda.syncthreads()  # V is in place, and P
            else:
                cuda.syncwarp()  # the lanes of a row have written their P
            acc = scale_rows(acc, alpha)
            # O += P V
            if kind[t] != FULL and not finite(smem, V, tid):
                acc = gemm_pv_careful(acc, smem, P + 4 * ty, V + 4 * tx)
            else:
                acc = gemm_pv(acc, smem, P + 4 * ty, V + 4 * tx)

        l = row_total(l)
        cuda.syncthreads()  # sQ is free: it takes O
        store_o(smem, 4 * ty * LD + 4 * tx, scale_rows(acc, inverse(l)))
        if tx == 0:
            store_stats(smem, P + 4 * ty, l, m)
        cuda.syncthreads()  # O and the row statistics are in shared memory
        o_base = b * o_stride[0] + h * o_stride[2] + q0 * o_stride[1]
        drain_o(smem, 0, out, o_base, o_stride[1], nq - q0, ONE, tid)
        for i in range(tid, min(TILE_M, nq - q0), THREADS):
            total = smem[P + i]
            value = NEG_INF
            if total != ZERO:
                value = (smem[P + TILE_M + i] + ACC(math.log2(total))) * ACC(LN2)
            lse[bh * nq + q0 + i] = value

    return fwd_simt


def fwd_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, stats = kinds.pointer(STORAGE[cfg.dtype]), kinds.pointer(cfg.accumulator)
    tensors = (*(tensor,) * 4, stats, *(STRIDES,) * 4)
    sizes = (kinds.int32,) * 5
    state, dropping = dropout_signatures(cfg.dropout, cfg.accumulator)
    params = score_signature(cfg.score)
    return KernelSpec(
        "nbflash_fwd_simt",
        make_fwd_simt,
        cfg,
        (*tensors, state, *sizes, cfg.accumulator, *SCHEDULE, params, dropping),
    )
