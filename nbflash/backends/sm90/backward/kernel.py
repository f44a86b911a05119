"""Backward pass on Hopper: wgmma, TMA and mbarriers; Algorithm 4, block-sparse.

A block is one warpgroup that loads and two that compute, 64 keys each. Blocks are persistent:
each takes columns (key tiles) off the work list, longest first, in serpentine order. A column walks
its query tiles, of all the heads that share its keys, in one pass of five products; dK and dV stay
in registers. Scores are computed transposed, Sᵀ = K Qᵀ, so that P and dS are A operands in
registers.
Consumer warpgroups consume a stream of tile descriptors, column after column: kind, key tile or
−1, head of K and V, number of the query tile:

    for each tile t of the stream, S of which was issued before
        issue dP = dO Vᵀ                     wait for S:    P = 2^(S · scale − LSE · log2 e)
        issue dV += Pᵀ dO                    wait for dP:   dS = P ∘ (dP − δ) → shared memory
        issue dK += dSᵀ Q                    wait until all warpgroups have stored dS
        issue dQ = dS K                      a 64 × 64 part of the tile for each warpgroup
        issue S of tile t + 1                wait for dQ:   → shared memory, added by warp 1 or 2
        if t ends a column: dK · scale, dV → out

    barrier        arrives                                     waits
    full_q[s]      loader, bytes of Q, statistics; descriptor  consumers, before S
    full_do[s]     loader, bytes of dO                         consumers, before dP
    empty_q[s]     each consumer, dV and dK are there          loader
    raw[s]         loader, bytes of Q and dO of a masked tile  warp 3, then full_q and full_do
    raw_k[i]       loader, bytes of K                          warp 3, then full_k
    full_k[i]      warp 3                                      consumers, before a column's first S
    empty_k[i]     each consumer, its last dQ is there         loader
    full_v         loader, bytes of V                          consumers, before a column's first dP
    empty_v        each consumer, its last dP is there         loader
    ds_free w      the other warpgroup has read dS             warpgroup w, before it stores dS
    ds_full w      the other warpgroup has stored dS           warpgroup w, before dQ
    dq_empty w     warp 1 + w, the part has been read          warpgroup w, before it stores dQ
    dq_full w      warpgroup w has stored its part             warp 1 + w

Where no tile of the schedule is masked (``full_tiles``), the loader tells full_k of K, and warp 3
and the raw barriers have nothing to do.

Without dQ (``with_dq`` of the configuration) other computing warpgroups take their place: see
:mod:`.dkdv` and :mod:`.dkdv_wide`.
"""

from nbflash.backends.sm90.backward.dkdv import make_columns_stream
from nbflash.backends.sm90.backward.dkdv_wide import make_wide_stream
from nbflash.backends.sm90.backward.one_pass import make_compute_stream, make_write_empty_columns
from nbflash.backends.sm90.backward.producer import (
    CLEANER,
    make_clean_stream,
    make_load_keys,
    make_load_stream,
    make_store_stream,
    rematerialised,
)
from nbflash.backends.sm90.shared.dropout import make_drawing
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_init, setmaxnreg
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.dropout import dropout_signatures
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT


def make_init_barriers(cfg):
    """``init_barriers(base)``, for one thread."""
    CONSUMERS, READERS = cfg.consumers, cfg.key_readers
    STAGES, K_STAGES, WITH_DQ, PARTS = cfg.stages, cfg.k_stages, cfg.with_dq, 1 + cfg.with_dq
    barriers = cfg.barriers
    FULL_Q, FULL_DO, EMPTY_Q = barriers.full_q, barriers.full_do, barriers.empty_q
    FULL_K, EMPTY_K, FULL_V = barriers.full_k, barriers.empty_k, barriers.full_v
    EMPTY_V, RAW, RAW_K = barriers.empty_v, barriers.raw, barriers.raw_k

    @inlined
    def init_barriers(base):
        for i in range(STAGES):
            mbarrier_init(base + FULL_Q + 8 * i, 1)
            mbarrier_init(base + EMPTY_Q + 8 * i, CONSUMERS)
            mbarrier_init(base + RAW + 8 * i, PARTS)
            if WITH_DQ:
                mbarrier_init(base + FULL_DO + 8 * i, 1)
        for i in range(K_STAGES):
            mbarrier_init(base + FULL_K + 8 * i, 1)
            mbarrier_init(base + EMPTY_K + 8 * i, READERS)
            mbarrier_init(base + RAW_K + 8 * i, 1)
        mbarrier_init(base + FULL_V, 1)
        mbarrier_init(base + EMPTY_V, READERS)
        fence_mbarrier_init()

    return init_barriers


def make_bwd_sm90(cfg):
    """The kernel for a :class:`~.config.Sm90BackwardConfig`.

    Arguments of the kernel: tensor maps of q, k, v, dout; the sum of dQ by parts, in the order of
    their fragments (not looked at without dQ); the statistics of the query tiles; dk, dv;
    dropout's state; strides of dk and dv (batch, sequence, head) in elements; nk, heads, heads_kv
    and their quotient; key and query tiles per plane, items of the work list and how many of them
    have tiles; scale · log2 e, or scale before a score, and what dSᵀ Q is multiplied with; the
    transposed schedule, with the bounds of every query tile; the score's parameters; dropout's
    threshold, in both halves of a word, and factor.
    """
    REGISTERS, CONSUMERS, WITH_DQ = bool(cfg.registers), cfg.consumers, cfg.with_dq
    FULL_TILES = cfg.full_tiles
    fewer, more = (
        setmaxnreg(action, count)
        for action, count in zip(("dec", "inc"), cfg.registers or (24, 240), strict=True)
    )
    init_barriers, load_stream = make_init_barriers(cfg), make_load_stream(cfg)
    store_stream, clean_stream = make_store_stream(cfg), make_clean_stream(cfg)
    load_keys, (drawn_of, *_) = make_load_keys(cfg), make_drawing(cfg)
    make_alone = make_wide_stream if cfg.split else make_columns_stream
    make_stream = make_compute_stream if WITH_DQ else make_alone
    write_empty_columns, compute_stream = make_write_empty_columns(cfg), make_stream(cfg)

    def bwd_sm90(
        q_map,
        k_map,
        v_map,
        do_map,
        dq,
        stats,
        dk,
        dv,
        state,
        kv_stride,
        nk,
        heads,
        heads_kv,
        group,
        n_row,
        n_col,
        items,
        live,
        factor,
        scale,
        work,
        plane_of,
        row_ptr,
        col_idx,
        kind,
        bounds,
        bits,
        params,
        dropping,
    ):
        smem = cuda.shared.array(0, types.int32)
        floats = cuda.shared.array(0, types.float32)
        start = types.int32(shared_address(smem))
        base = types.int32((start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1))
        place = base, types.int32((base - start) >> 2)
        tid = types.int32(cuda.threadIdx.x)
        if tid == 0:
            init_barriers(base)
        cuda.syncthreads()
        schedule = work, plane_of, row_ptr, col_idx, kind
        sizes = heads, heads_kv, group, n_row, n_col, live
        result = dk, dv, kv_stride, nk, heads_kv, factor, scale
        if tid < 128:
            if REGISTERS:
                fewer()
            if tid == 0:
                maps, tables = (q_map, k_map, v_map, do_map), (stats, bounds, bits)
                load_stream(smem, rematerialised(place), maps, tables, sizes, schedule)
            elif tid >= CLEANER:
                if not FULL_TILES:
                    clean_stream(
                        smem,
                        floats,
                        rematerialised(place),
                        sizes,
                        schedule,
                        types.int32(tid - CLEANER),
                    )
            elif WITH_DQ:
                if 32 <= tid < 32 + 32 * CONSUMERS:
                    store_stream(smem, rematerialised(place), dq, tid)
            elif tid == 32:
                load_keys(rematerialised(place), (k_map, v_map), sizes, work)
        else:
            if REGISTERS:
                more()
            write_empty_columns(result, work, items, live, tid - 128)
            drawing, thread = (drawn_of(state), dropping), types.int32(tid - 128)
            compute_stream(smem, floats, place, result, params, drawing, thread)

    return bwd_sm90


def bwd_sm90_spec(cfg):
    """How to compile and launch the kernel of ``cfg``; the first four arguments are maps."""
    floats, halves = kinds.pointer(kinds.float32), kinds.pointer(kinds.uint32)
    maps, pointers = (kinds.uint64,) * 4, (floats, floats, halves, halves)
    sizes, scales = (kinds.int32,) * 8, (kinds.float32,) * 2
    schedule = (*(INDEX,) * 6, kinds.pointer(kinds.uint32))
    state, dropping = dropout_signatures(cfg.dropout, kinds.float32)
    return KernelSpec(
        "nbflash_bwd_sm90",
        make_bwd_sm90,
        cfg,
        (
            *(*maps, *pointers, state, STRIDES, *sizes, *scales, *schedule),
            *(score_signature(cfg.score), dropping),
        ),
        maps=len(maps),
        whole_program=True,
    )
