"""Backward pass by mma: Algorithm 4, and its block-sparse form, in one body for both walks.

A block keeps the rows of one tile, each of its warps 16 or 32 of them, and walks the tiles that the
schedule lists; what a warp multiplies with stays in registers:

    walk = "columns": keys are kept               walk = "rows": queries are kept
    Sᵀ  = K Qᵀ                                    S  = Q Kᵀ
    dPᵀ = V dOᵀ                                   dP = dO Vᵀ
    P   = 2^(S · unit − lse), masked to 0;  dS = P ∘ (dP − δ), ∘ ∂score/∂S
    dV += Pᵀ dO
    dK += dSᵀ Q                                   dQ += dS K
    dSᵀ → shared;  dQ = dS K → global, added

Columns with ``atomic_dq`` are one pass of five products; rows plus columns without are the
deterministic form, two passes of seven. Where the registers do not hold both, dV and dK are sums
of passes of their own (``sums``), with S once more. dQ's accumulator has fragments
(:mod:`.row_kernels`).

    copies, ``stages`` − 1 tiles ahead            Q and dO, with shifts and δ; or K and V

Exponents are masked to −∞, so that a row of NaN stays with what it attends. What is not finite in a
masked tile becomes zeros when S and dP have met it (:mod:`nbflash.cuda.tile.mma.poison`); so does K
at the beginning of a column, of which S is made NaN then.
"""

from masks import FULL
from nbflash.backends.sm80.dq_part import make_dq_part
from nbflash.backends.sm80.dropout import (
    drop_packed,
    drop_values,
    make_kept,
    make_kept_across,
    make_random,
)
from nbflash.backends.sm80.score import make_scored
from nbflash.backends.sm80.walk import first_tile, make_copies, make_places, next_tile
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.ptx.cp_async import cp_async_wait
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.dropout import dropout_signatures
from nbflash.cuda.tile.mma.copy import make_store_rows
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.gemm import make_gemm_abt, make_gemm_pb
from nbflash.cuda.tile.mma.gradient import make_gradients, make_query_numbers
from nbflash.cuda.tile.mma.mask import make_apply_mask, make_apply_mask_transposed
from nbflash.cuda.tile.mma.poison import make_poison_rows, make_poison_units
from nbflash.cuda.tile.ring import divmod_int32, make_advance
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.tracing import opaque, unrolled


def make_bwd_sm80(cfg):
    """The kernel for a :class:`~.config.Sm80BackwardConfig`.

    Arguments of the kernel: q, k, v, dout, shift, delta, dq, dk, dv (in words); strides (batch,
    sequence, head) of q, k, v, dout, dq, dk, dv, in elements; dropout's state; nq, nk, heads, group
    = heads // heads_kv; tiles per plane, and rows of shift and delta of a head; the scale, and the
    scale · log2 e, or the scale before a score; the schedule; the score's parameters; dropout's
    threshold and factor. If dq is added to it is its accumulator.
    """
    M_TILES, LENGTH, TILE, KEPT = cfg.m_tiles, cfg.length, cfg.tile, cfg.kept
    TILE_M, TILE_N, STAGES, FULL_TILES = cfg.tile_m, cfg.tile_n, cfg.stages, cfg.full_tiles
    COLUMNS, ATOMIC, WIDTH = cfg.walk == "columns", cfg.atomic_dq, TILE.width
    layout = cfg.smem
    SECOND, RING, DS, NUMBERS = layout.second, layout.ring, layout.ds, layout.numbers
    STAGE_BYTES, OTHER = 2 * LENGTH * TILE.row_bytes, LENGTH * TILE.row_bytes
    scores, output = Fragment(M_TILES, LENGTH), Fragment(M_TILES, WIDTH)
    ZERO, NONE = types.float32(0), types.int32(0)
    S_START, ACC_START = (ZERO,) * scores.size, (ZERO,) * output.size
    WITH_DV, WITH_DS = COLUMNS and cfg.sums != "dk", cfg.sums != "dv"
    V_START, K_START = (ACC_START if on else (ZERO,) for on in (WITH_DV, WITH_DS))

    copy_kept, copy_walked = cfg.copy(KEPT), cfg.copy(LENGTH)
    send_kept, send_tile = make_copies(cfg)
    (scan_kept, clean_kept), (scan, clean) = (
        (copy.scan, copy.clean) for copy in (copy_kept, copy_walked)
    )
    wait, advance = cp_async_wait(max(STAGES - 2, 0)), make_advance(STAGES)
    operands_of, own_of, words_of = make_places(cfg)
    gemm_s = make_gemm_abt(cfg.dtype, M_TILES, LENGTH, TILE, negate=cfg.negate)
    gemm_dp = make_gemm_abt(cfg.dtype, M_TILES, LENGTH, TILE)
    gemm = make_gemm_pb(cfg.dtype, M_TILES, LENGTH, TILE)
    poison_rows = make_poison_rows(cfg.dtype, M_TILES, LENGTH, TILE)
    poison_units = make_poison_units(cfg.dtype, M_TILES, TILE)
    if COLUMNS:
        apply_mask = make_apply_mask_transposed(M_TILES, LENGTH, TILE_M, TILE_N)
        places = [(column, row) for row, column in scores.places()]
    else:
        apply_mask, places = make_apply_mask(M_TILES, LENGTH, TILE_M), scores.places()
    numbers_of = make_query_numbers(scores, transposed=COLUMNS)
    slopes_of = cfg.score if cfg.score is not None and cfg.score.has_slope else None
    steps = make_gradients(M_TILES, LENGTH, slopes_of, transposed=COLUMNS)
    exponents, weights = steps.exponents, steps.weights
    gradients, gradients_masked = steps.full, steps.masked
    scored, unit_of = make_scored(cfg, places, with_slope=True)
    pack, pack_acc = scores.make_pack(cfg.dtype), output.make_pack(cfg.dtype)
    store_rows = make_store_rows(TILE, M_TILES, cfg.head_dim)
    if ATOMIC:
        share, add_part = make_dq_part(cfg)
    DROPOUT, (random_of, rows_of) = bool(cfg.dropout), make_random(cfg)
    if DROPOUT:
        kept_of = (make_kept_across if COLUMNS else make_kept)(cfg.dropout, M_TILES, LENGTH)

    @unrolled
    def staged(address, stage):
        return address + stage * STAGE_BYTES

    @unrolled
    def word_of(start, address):
        return (address - start) // 4

    @unrolled
    def units_of(unit):
        return (unit,) * scores.rows

    @unrolled
    def times(x, factor):
        return tuple(v * factor for v in x)

    def bwd_sm80(
        q,
        k,
        v,
        dout,
        shift,
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
        padded,
        scale,
        factor,
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
        smem, stats = cuda.shared.array(0, types.int32), cuda.shared.array(0, types.float32)
        thread = types.int32(cuda.threadIdx.x)
        first, _, _, _ = operands_of(shared_address(smem), thread)
        tile, bh = work[2 * cuda.blockIdx.x], work[2 * cuda.blockIdx.x + 1]
        kept_row = types.int32(tile * KEPT)
        if COLUMNS:
            b, h_kv = divmod_int32(bh, types.int32(heads // group))
            h, last = types.int32(h_kv * group), types.int32((h_kv + 1) * group)
            kept_length, length = nk, nq
        else:
            b, h = divmod_int32(bh, heads)
            h_kv, _ = divmod_int32(h, group)
            last = types.int32(h + 1)
            kept_length, length = nq, nk
        queries, gradients_out = (q, q_stride), (dout, do_stride)
        keys, values = (k, k_stride), (v, v_stride)
        kept, walked = (queries, gradients_out), (keys, values)
        kept_head = h
        if COLUMNS:
            kept, walked = (keys, values), (queries, gradients_out)
            kept_head = h_kv
        numbers = shift, delta, heads, padded
        unit, (top, _) = unit_of(params, factor), own_of(thread)
        random = random_of(state)

        h, t, end = first_tile(h, last, b, heads, plane_of, row_ptr, n_row, tile)
        if h < last:
            valid = types.int32(kept_length - kept_row)
            send_kept(kept, b, kept_head, kept_row, valid, first, thread)
        ahead = h, t, end
        for i in range(STAGES - 1):
            there = ahead[0] < last
            start = types.int32(col_idx[ahead[1]] * LENGTH) if there else NONE
            valid, stage = types.int32(length - start), types.int32(i)
            send_tile(
                walked, numbers, there, b, ahead[0], group, start, valid, first, stage, thread
            )
            ahead = next_tile(*ahead, last, b, heads, plane_of, row_ptr, n_row, tile)
        if not COLUMNS:
            at = types.int64(bh) * padded + kept_row
            own_shifts, own_deltas = numbers_of(shift, at, top), numbers_of(delta, at, top)
            random_rows = rows_of(random, types.int32(kept_row + top), h, b)
        stage, free, met, units = NONE, types.int32(STAGES - 1), False, units_of(unit)
        acc_1, acc_2 = V_START, K_START
        while h < last:
            tile_kind, start = kind[t], types.int32(col_idx[t] * LENGTH)
            # What follows from the thread is made anew: registers are few.
            thread = opaque(types.int32(cuda.threadIdx.x))
            first, kept_at, by_columns, _ = operands_of(shared_address(smem), thread)
            if STAGES == 1:
                cuda.syncthreads()  # everybody is done with the last tile
                valid = types.int32(length - start)
                send_tile(walked, numbers, True, b, h, group, start, valid, first, stage, thread)
            wait()
            ring = types.int32(staged(types.int32(first + RING), stage))
            careful = NONE
            if not FULL_TILES:
                at = word_of(shared_address(smem), ring)
                if tile_kind != FULL:
                    careful = scan(smem, at, thread)
                    if COLUMNS:
                        careful = types.int32(careful | scan(smem, at + OTHER // 4, thread))
                careful = cuda.syncthreads_or(careful)  # the tile is in place, the last one done
                if ATOMIC and not met:
                    met, at = True, word_of(shared_address(smem), first)
                    if cuda.syncthreads_or(scan_kept(smem, at, thread)):
                        units = poison_units(units, kept_at)
                        cuda.syncthreads()  # all have seen K
                        clean_kept(smem, at, thread)
                        cuda.syncthreads()  # K is finite
            else:
                cuda.syncthreads()
            if STAGES > 1:
                there = ahead[0] < last
                begin = types.int32(col_idx[ahead[1]] * LENGTH) if there else NONE
                valid = types.int32(length - begin)
                send_tile(
                    walked, numbers, there, b, ahead[0], group, begin, valid, first, free, thread
                )
                ahead = next_tile(*ahead, last, b, heads, plane_of, row_ptr, n_row, tile)
            top, left = own_of(thread)
            if COLUMNS:
                q0, n0 = start, kept_row
                place = b, h, types.int32(q0 + left), types.int32(n0 + top)
                at = types.int32(word_of(shared_address(smem), first) + NUMBERS // 4)
                at = types.int32(at + stage * (2 * LENGTH) + left)
            else:
                q0, n0 = kept_row, start
                place = b, h, types.int32(q0 + top), types.int32(n0 + left)
            # S = Q Kᵀ, or its transpose
            acc_s = gemm_s(S_START, kept_at, staged(by_columns, stage))
            acc_s = scored(acc_s, place, params, factor)
            if COLUMNS:
                p = exponents(acc_s, units, numbers_of(stats, at))
            else:
                p = exponents(acc_s, units, own_shifts)
            if not FULL_TILES and tile_kind != FULL:
                plane = plane_of[b * heads + h]
                p = apply_mask(p, tile_kind, plane, nq, q0, n0, (lo, hi, bits), top, left)
            p = weights(p)
            if COLUMNS:
                deltas = numbers_of(stats, types.int32(at + LENGTH))
            else:
                deltas = own_deltas
            if DROPOUT:
                if COLUMNS:
                    kept_words = kept_of(random, dropping[0], n0 + top, q0 + left, h, b)
                else:
                    kept_words = kept_of(random, random_rows, dropping[0], n0, thread)
            if WITH_DV:
                packed = pack(p)
                if DROPOUT:
                    packed = drop_packed(packed, kept_words)
            if WITH_DS:
                # dP = dO Vᵀ, or its transpose; dS = P ∘ ∂S'/∂S ∘ (dP − δ)
                second = types.int32(staged(by_columns, stage) + OTHER)
                acc_dp = gemm_dp(S_START, types.int32(kept_at + SECOND), second)
                if DROPOUT:
                    acc_dp = drop_values(acc_dp, kept_words)
                if not FULL_TILES and tile_kind != FULL:
                    ds = pack(gradients_masked(p, acc_s, acc_dp, deltas))
                else:
                    ds = pack(gradients(p, acc_s, acc_dp, deltas))
            if ATOMIC:
                to = types.int32(word_of(shared_address(smem), first) + DS // 4)
                share(smem, to, ds, opaque(thread))
            thread = opaque(types.int32(cuda.threadIdx.x))
            first, _, _, by_rows = operands_of(shared_address(smem), thread)
            one = staged(by_rows, stage)
            if not FULL_TILES and careful:
                if WITH_DV:
                    packed = poison_rows(packed, types.int32(one + OTHER))
                cuda.syncthreads()  # all have seen the tile
                to = word_of(shared_address(smem), ring)
                clean(smem, to, opaque(thread))
                if COLUMNS:
                    clean(smem, to + OTHER // 4, opaque(thread))
                cuda.syncthreads()  # it is finite
            # dV += Pᵀ dO;  dK += dSᵀ Q, or dQ += dS K
            if WITH_DV:
                acc_1 = gemm(acc_1, packed, types.int32(one + OTHER))
            if WITH_DS:
                acc_2 = gemm(acc_2, ds, one)
            if ATOMIC:
                cuda.syncthreads()  # dSᵀ is in place
                to = (types.int64(b * heads + h) * padded + start) * WIDTH
                add_part(dq, to, first, thread)
            free = stage
            stage, _ = advance(stage, NONE)
            h, t, end = next_tile(h, t, end, last, b, heads, plane_of, row_ptr, n_row, tile)

        cuda.syncthreads()  # the kept tiles are free
        thread = opaque(types.int32(cuda.threadIdx.x))
        own, word, second = words_of(shared_address(smem), thread)
        valid, row = types.int32(kept_length - kept_row - own), types.int64(kept_row + own)
        if DROPOUT:
            scale *= dropping[1]
        if WITH_DV:
            if DROPOUT:
                acc_1 = times(acc_1, dropping[1])
            to = b * dv_stride[0] + h_kv * dv_stride[2] + row * dv_stride[1]
            store_rows(dv, to, dv_stride[1], valid, pack_acc(acc_1), smem, second, thread)
        if COLUMNS and WITH_DS:
            to = b * dk_stride[0] + h_kv * dk_stride[2] + row * dk_stride[1]
            packed = pack_acc(times(acc_2, scale))
            store_rows(dk, to, dk_stride[1], valid, packed, smem, word, thread)
        if not COLUMNS:
            to = b * dq_stride[0] + (last - 1) * dq_stride[2] + row * dq_stride[1]
            packed = pack_acc(times(acc_2, scale))
            store_rows(dq, to, dq_stride[1], valid, packed, smem, word, thread)

    return bwd_sm80


def bwd_sm80_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, words = kinds.pointer(kinds.uint16), kinds.pointer(kinds.uint32)
    real = kinds.pointer(kinds.float32)
    gradients = real if cfg.atomic_dq else words, words, words
    state, dropping = dropout_signatures(cfg.dropout, kinds.float32)
    sizes, params = (kinds.int32,) * 6, score_signature(cfg.score)
    tensors = (*(tensor,) * 4, real, real, *gradients, *(STRIDES,) * 7)
    return KernelSpec(
        f"nbflash_bwd_sm80_{cfg.walk}",
        make_bwd_sm80,
        cfg,
        (*tensors, state, *sizes, *(kinds.float32,) * 2, *SCHEDULE, params, dropping),
    )
