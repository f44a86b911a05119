"""Forward pass by mma: Algorithm 1 (query-outer order) and Algorithm 5.

A block computes one query tile of one head, each of its warps 16 or 32 rows of it. K and V of the
tiles that the schedule lists come by cp.async, in turn, into a ring of stages:

    copies        K0 V0 K1 V1 …       stages − 1 of them are under way
    for each live tile of the row:
        K is there                     behind the barrier all warps are done with the V before:
                                       its stage takes a copy
        S  = Q Kᵀ                      registers
        V is there                     behind the barrier all warps are done with K: likewise
        S  = score(S)                  if there is one
        S  = −∞                        where the tile's kind hides it
        m' = max(m, rowmax S);  α = 2^(m − m');  P = 2^(S − m');  l = α l + rowsum P
        P  = P ∘ Z                     if there is dropout, packed
        O  = α O + P V;  m = m'        P stays in registers
    O / l → out,  (m + log2 l) ln 2 → lse

A masked tile whose V is not finite poisons the rows that attend what is not, and V is cleaned
(:mod:`nbflash.cuda.tile.mma.poison`). O leaves through the rows of Q that its warp alone has read.
"""

import math

from masks import FULL
from nbflash.backends.sm80.dropout import drop_packed, make_kept, make_random
from nbflash.backends.sm80.score import make_scored
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.cp_async import cp_async_commit, cp_async_wait
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.dropout import dropout_signatures
from nbflash.cuda.tile.mma.copy import make_store_rows
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.gemm import make_gemm_abt, make_gemm_pb
from nbflash.cuda.tile.mma.layout import ALIGNMENT
from nbflash.cuda.tile.mma.mask import make_apply_mask
from nbflash.cuda.tile.mma.poison import make_poison_rows
from nbflash.cuda.tile.mma.rows import make_store_numbers
from nbflash.cuda.tile.mma.softmax import make_softmax
from nbflash.cuda.tile.ring import divmod_int32, make_advance
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.tracing import opaque, unrolled
from nbflash.cuda.tile.wgmma.softmax import log_of_sum


def make_places(cfg):
    """Where a lane's operands and scores are: ``operands, scores, results``.

    ``operands(start, thread)``: the first aligned address behind ``start``; the lane's address in
    Q, and in a stage of K and of V. ``scores(thread)``: the lane's first row and column in a tile.
    ``results(start, thread)``: the warp's first row and its word in Q.
    """
    TILE, ROWS = cfg.tile, 16 * cfg.m_tiles
    RING = cfg.smem.ring

    def aligned(start, thread):
        return thread * 0 + (start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT

    @unrolled
    def operands(start, thread):
        warp, lane, first = thread // 32, thread % 32, aligned(start, thread)
        q = first + warp * (ROWS * TILE.row_bytes) + TILE.by_rows(lane)
        return first, q, first + RING + TILE.by_columns(lane), first + RING + TILE.by_rows(lane)

    @unrolled
    def scores(thread):
        return thread // 32 * ROWS + thread % 32 // 4, thread % 4 * 2

    @unrolled
    def results(start, thread):
        row = thread // 32 * ROWS
        return row, (aligned(start, thread) - start) // 4 + row * (TILE.row_bytes // 4)

    return operands, scores, results


def make_fwd_sm80(cfg):
    """The kernel for a :class:`~.config.Sm80Config`.

    Arguments of the kernel: q, k, v, out (in words), lse; strides (batch, sequence, head) of the
    first four, in elements; dropout's state; nq, nk, heads, group = heads // heads_kv; tiles per
    plane; |scale| · log2 e, or |scale| before a score; the schedule; the score's parameters;
    dropout's threshold, in both halves of a word, and the share of what it keeps.
    """
    M_TILES, TILE_M, TILE_N, TILE = cfg.m_tiles, cfg.tile_m, cfg.tile_n, cfg.tile
    STAGES, STAGE_BYTES, DROPOUT = cfg.stages, cfg.stage_bytes, bool(cfg.dropout)
    FULL_TILES = cfg.full_tiles
    RING = cfg.smem.ring
    # What is sent when K of tile t is there, and when V is: V or K, of the tile t + so many.
    EVEN, AT_K, AT_V = STAGES % 2 == 0, (STAGES - 1) // 2, STAGES // 2
    scores, output = Fragment(M_TILES, TILE_N), Fragment(M_TILES, TILE.width)
    ZERO, NONE = types.float32(0), types.int32(0)
    S_START, O_START, L_START = (ZERO,) * scores.size, (ZERO,) * output.size, (ZERO,) * scores.rows
    M_START = (types.float32(-math.inf),) * scores.rows

    copy_q, copy_kv = cfg.copy(TILE_M), cfg.copy(TILE_N)
    send_q, send_kv, scan = copy_q.send, copy_kv.send, copy_kv.scan
    wait, advance = cp_async_wait(STAGES - 2), make_advance(STAGES)
    operands_of, scores_of, results_of = make_places(cfg)
    gemm_qk = make_gemm_abt(cfg.dtype, M_TILES, TILE_N, TILE, negate=cfg.negate)
    gemm_pv = make_gemm_pb(cfg.dtype, M_TILES, TILE_N, TILE)
    poison_rows, clean = make_poison_rows(cfg.dtype, M_TILES, TILE_N, TILE), copy_kv.clean
    apply_mask = make_apply_mask(M_TILES, TILE_N, TILE_M)
    softmax = make_softmax(M_TILES, TILE_N)
    row_max, has_grown, rescale = softmax.row_max, softmax.has_grown, softmax.rescale
    probabilities, row_sums = softmax.probabilities, softmax.row_sums
    row_total, inverse = softmax.row_total, softmax.inverse
    pack, pack_o = scores.make_pack(cfg.dtype), output.make_pack(cfg.dtype)
    scale_rows, store_rows = output.make_scale_rows(), make_store_rows(TILE, M_TILES, cfg.head_dim)
    store_numbers = make_store_numbers(scores.rows)
    scored, unit_of = make_scored(cfg, scores.places())
    random_of, rows_of = make_random(cfg)
    kept_of = make_kept(cfg.dropout, M_TILES, TILE_N) if DROPOUT else None

    @unrolled
    def staged(address, stage):
        return address + stage * STAGE_BYTES

    @unrolled
    def word_of(start, address):
        return (address - start) // 4

    @unrolled
    def plus(l, sums):
        return tuple(x + y for x, y in zip(l, sums, strict=True))

    @unrolled
    def times(l, alpha):
        return tuple(x * y for x, y in zip(l, alpha, strict=True))

    @unrolled
    def shared_equally(l, share):
        return tuple(x * share for x in l)

    @unrolled
    def log_sum_exp(m, l):
        return tuple(log_of_sum(*pair) for pair in zip(m, l, strict=True))

    @inlined
    def column_of(col_idx, t, end):
        """The first key of a tile; −1 past the row's last."""
        return types.int32(col_idx[t] * TILE_N) if t < end else types.int32(-1)

    @inlined
    def send(operand, n0, nk, first, stage, thread):
        source, (per_batch, stride, per_head), b, h = operand
        if n0 >= 0:
            to = staged(types.int32(first + RING), stage)
            # What follows from the head is made anew, as what does from the thread.
            base = opaque(b) * per_batch + opaque(h) * per_head + n0 * stride
            send_kv(to, source, base, stride, types.int32(nk - n0), thread)
        cp_async_commit()

    def fwd_sm80(
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
        smem = cuda.shared.array(0, types.int32)
        thread = types.int32(cuda.threadIdx.x)
        first, _, _, _ = operands_of(shared_address(smem), thread)
        row, bh = work[2 * cuda.blockIdx.x], work[2 * cuda.blockIdx.x + 1]
        b, h = divmod_int32(bh, heads)
        h_kv, _ = divmod_int32(h, group)
        plane, q0 = plane_of[bh], types.int32(row * TILE_M)
        keys, values = (k, k_stride, b, h_kv), (v, v_stride, b, h_kv)
        top, _ = scores_of(thread)
        unit, random = unit_of(params, scale), random_of(state)
        random_rows = rows_of(random, types.int32(q0 + top), h, b)

        begin, end = row_ptr[plane * n_row + row], row_ptr[plane * n_row + row + 1]
        stage, free = NONE, types.int32(STAGES - 1)
        if begin < end:
            q_from = b * q_stride[0] + h * q_stride[2] + q0 * q_stride[1]
            send_q(first, q, q_from, q_stride[1], types.int32(nq - q0), thread)
        for i in range(STAGES - 1):
            n0 = column_of(col_idx, begin + i // 2, end)
            if i % 2 == 0:
                send(keys, n0, nk, first, types.int32(i), thread)
            else:
                send(values, n0, nk, first, types.int32(i), thread)
        m_i, l_i, acc_o = M_START, L_START, O_START
        for t in range(begin, end):
            n0, tile_kind = types.int32(col_idx[t] * TILE_N), kind[t]
            wait()
            cuda.syncthreads()  # K is in place, and everybody is done with the V before
            # What follows from the thread is made anew: registers are few.
            thread = opaque(types.int32(cuda.threadIdx.x))
            first, q_at, k_at, _ = operands_of(shared_address(smem), thread)
            at = column_of(col_idx, t + AT_K, end)
            send(values if EVEN else keys, at, nk, first, free, thread)
            # S = Q Kᵀ
            acc_s = gemm_qk(S_START, q_at, staged(k_at, stage))
            free = stage
            stage, _ = advance(stage, NONE)
            thread = opaque(types.int32(cuda.threadIdx.x))
            first, _, _, v_at = operands_of(shared_address(smem), thread)
            stage_word = types.int32(
                word_of(shared_address(smem), staged(first, stage)) + RING // 4
            )
            careful = NONE
            wait()
            if not FULL_TILES:
                if tile_kind != FULL:
                    careful = scan(smem, stage_word, thread)
                careful = cuda.syncthreads_or(careful)  # V is in place, and all are done with K
            else:
                cuda.syncthreads()
            at = column_of(col_idx, t + AT_V, end)
            send(keys if EVEN else values, at, nk, first, free, thread)
            top, left = scores_of(thread)
            place = b, h, types.int32(q0 + top), types.int32(n0 + left)
            acc_s = scored(acc_s, place, params, scale)
            if not FULL_TILES and tile_kind != FULL:
                acc_s = apply_mask(acc_s, tile_kind, plane, nq, q0, n0, (lo, hi, bits), top, left)
            m_new = row_max(m_i, acc_s, unit)
            p = probabilities(acc_s, m_new, unit)
            sums = row_sums(p)
            p = pack(p)
            if DROPOUT:
                p = drop_packed(p, kept_of(random, random_rows, dropping[0], n0, thread))
            if has_grown(m_i, m_new):
                alpha = rescale(m_i, m_new)
                acc_o, l_i = scale_rows(acc_o, alpha), times(l_i, alpha)
            m_i, l_i = m_new, plus(l_i, sums)
            if not FULL_TILES and careful:
                p = poison_rows(p, staged(v_at, stage))
                cuda.syncthreads()  # all have seen V
                clean(smem, stage_word, opaque(thread))
                cuda.syncthreads()  # V is finite
            # O += P V
            acc_o = gemm_pv(acc_o, p, staged(v_at, stage))
            free = stage
            stage, _ = advance(stage, NONE)

        l_i, thread = row_total(l_i), opaque(types.int32(cuda.threadIdx.x))
        (top, _), (own, word) = scores_of(thread), results_of(shared_address(smem), thread)
        left_rows = types.int32(nq - q0)
        store_numbers(lse, bh * nq + q0, log_sum_exp(m_i, l_i), top, left_rows, thread)
        if DROPOUT:
            l_i = shared_equally(l_i, dropping[1])
        packed = pack_o(scale_rows(acc_o, inverse(l_i)))
        to = b * o_stride[0] + h * o_stride[2] + (q0 + own) * o_stride[1]
        store_rows(out, to, o_stride[1], types.int32(left_rows - own), packed, smem, word, thread)

    return fwd_sm80


def fwd_sm80_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, words = kinds.pointer(kinds.uint16), kinds.pointer(kinds.uint32)
    tensors = (tensor,) * 3 + (words, kinds.pointer(kinds.float32), *(STRIDES,) * 4)
    state, dropping = dropout_signatures(cfg.dropout, kinds.float32)
    sizes, params = (kinds.int32,) * 5, score_signature(cfg.score)
    return KernelSpec(
        "nbflash_fwd_sm80",
        make_fwd_sm80,
        cfg,
        (*tensors, state, *sizes, kinds.float32, *SCHEDULE, params, dropping),
    )
