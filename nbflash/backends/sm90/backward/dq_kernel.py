"""dQ on Hopper, row by row: the first of two passes, without atomics.

A block is one warpgroup that loads and one or two that compute, 64 query rows each, on their own.
Blocks are persistent: each takes row tiles off the work list, longest first, in serpentine order.
Consumer warpgroups consume a stream of tile descriptors, row after row: kind, LAST if it ends a
row; first key, row, head. dQ of a row stays in registers and is written once: the same bits every
time. Scores and their gradients are recomputed:

    for each row
        δ = rowsum(dO ∘ O) − dLSE            O was read before the last row left
        issue dP of its first tile           P = 2^(S · scale − LSE · log2 e)
        for each tile t of it, S of which was issued before
            wait for dP:                     dS = P ∘ (dP − δ), an A operand in registers
            issue dQ += dS K
            issue S = Q Kᵀ of t + 1          wait for dQ
            issue dP = dO Vᵀ of t + 1        wait for S:     P of t + 1
        scale · dQ → the place of its Q, or dO → out         (S of the next row is on its way)

    products     … dQ(t) S(t+1) dP(t+1)          dQ(t+1) S(t+2) …
    arithmetic   … dS(t)          P(t+1) dS(t+1)                …

In the gap the other warpgroup's products run.

    barrier        arrives                                     waits
    full_q[w, i]   loader of rows, bytes of Q                  warpgroup w, before a row's first S
    empty_q[w, i]  warpgroup w, its last S is there, or …      loader of rows
    full_do[w, i]  loader of rows, bytes of dO                 warpgroup w, before a row's first dP
    empty_do[w, i] warpgroup w, its last dP is there, or …     loader of rows
                   … dQ has left the place
    full_k[s]      loader of keys, bytes of K; descriptor      consumers, before S
    empty_k[s]     each consumer, dQ is there                  loader of keys
    full_v[s]      loader of keys, bytes of V                  consumers, before dP
    empty_v[s]     each consumer, dP is there                  loader of keys
    raw_k[s]       loader of keys, bytes of a masked K         two warps, which clean it: full_k

Where no tile of the schedule is masked (``full_tiles``), raw_k and two warps have nothing to do.
"""

from nbflash.backends.sm90.backward.dq_consumer import make_compute_stream
from nbflash.backends.sm90.backward.dq_producer import (
    LOOKERS,
    make_load_keys,
    make_load_rows,
    make_write_empty_rows,
)
from nbflash.backends.sm90.backward.producer import rematerialised
from nbflash.backends.sm90.shared.dropout import make_drawing
from nbflash.backends.sm90.shared.nan_watch import make_clean_stream
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
    CONSUMERS, Q_PARTS, DO_PARTS = (
        cfg.consumers,
        cfg.consumers * cfg.q_stages,
        cfg.consumers * cfg.do_stages,
    )
    K_STAGES, V_STAGES = cfg.k_stages, cfg.v_stages
    barriers = cfg.barriers
    FULL_Q, EMPTY_Q, FULL_DO = barriers.full_q, barriers.empty_q, barriers.full_do
    EMPTY_DO, FULL_K, EMPTY_K = barriers.empty_do, barriers.full_k, barriers.empty_k
    FULL_V, EMPTY_V, RAW_K = barriers.full_v, barriers.empty_v, barriers.raw_k

    @inlined
    def init_barriers(base):
        for i in range(Q_PARTS):
            mbarrier_init(base + FULL_Q + 8 * i, 1)
            mbarrier_init(base + EMPTY_Q + 8 * i, 1)
        for i in range(DO_PARTS):
            mbarrier_init(base + FULL_DO + 8 * i, 1)
            mbarrier_init(base + EMPTY_DO + 8 * i, 1)
        for i in range(K_STAGES):
            mbarrier_init(base + FULL_K + 8 * i, 1)
            mbarrier_init(base + EMPTY_K + 8 * i, CONSUMERS)
            mbarrier_init(base + RAW_K + 8 * i, 1)
        for i in range(V_STAGES):
            mbarrier_init(base + FULL_V + 8 * i, 1)
            mbarrier_init(base + EMPTY_V + 8 * i, CONSUMERS)
        fence_mbarrier_init()

    return init_barriers


def make_bwd_sm90_dq(cfg):
    """The kernel for a :class:`~.dq_config.Sm90DqConfig`.

    Arguments of the kernel: tensor maps of q, k, v, dout and dq; dq, out, lse, dlse and the
    statistics of the queries, which it writes; strides in elements: of out (batch, sequence, head)
    and dlse (batch, head, sequence); dropout's state; strides of dq; nq, heads, group = heads //
    heads_kv; tiles per plane, items of the work list and how many of them have tiles; scale · log2
    e, or scale before a score, and what dS K is multiplied with; the schedule; the score's
    parameters; dropout's threshold, in both halves of a word, and the share of what it keeps.
    """
    REGISTERS = bool(cfg.registers)
    fewer, more = (
        setmaxnreg(action, count)
        for action, count in zip(("dec", "inc"), cfg.registers or (24, 240), strict=True)
    )
    init_barriers, write_empty_rows = make_init_barriers(cfg), make_write_empty_rows(cfg)
    load_keys, load_rows = make_load_keys(cfg), make_load_rows(cfg)
    clean_stream, compute_stream = make_clean_stream(cfg, LOOKERS), make_compute_stream(cfg)
    (drawn_of, *_), FULL_TILES = make_drawing(cfg), cfg.full_tiles

    def bwd_sm90_dq(
        q_map,
        k_map,
        v_map,
        do_map,
        dq_map,
        dq,
        out,
        lse,
        dlse,
        stats,
        o_stride,
        l_stride,
        state,
        stride,
        nq,
        heads,
        group,
        n_row,
        items,
        live,
        factor,
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
        start = types.int32(shared_address(smem))
        base = types.int32((start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1))
        place = base, types.int32((base - start) >> 2)
        tid = types.int32(cuda.threadIdx.x)
        if tid == 0:
            init_barriers(base)
        cuda.syncthreads()
        schedule, sizes = (work, plane_of, row_ptr, col_idx, kind), (heads, group, n_row, live)
        if tid < 128:
            if REGISTERS:
                fewer()
            if tid == 0:
                load_keys(smem, place, (k_map, v_map), sizes, schedule)
            elif tid == 32:
                load_rows(place, (q_map, do_map), sizes, work)
            elif tid >= 128 - LOOKERS:
                looker = types.int32(tid - (128 - LOOKERS))
                write_empty_rows(dq, stride, sizes, work, nq, items, looker)
                if not FULL_TILES:
                    clean_stream(smem, rematerialised(place), sizes, schedule, looker)
        else:
            if REGISTERS:
                more()
            result, masking = (dq_map, nq, heads, factor, scale), (plane_of, lo, hi, bits, nq)
            source, thread = (out, lse, dlse, o_stride, l_stride), types.int32(tid - 128)
            besides = params, drawn_of(state), dropping
            compute_stream(smem, place, result, source, stats, masking, besides, thread)

    return bwd_sm90_dq


def bwd_sm90_dq_spec(cfg):
    """How to compile and launch the kernel of ``cfg``; the first five arguments are maps."""
    maps = (kinds.uint64,) * 5
    halves, floats = kinds.pointer(kinds.uint32), kinds.pointer(kinds.float32)
    pointers = halves, halves, floats, floats, floats
    sizes, scales = (kinds.int32,) * 6, (kinds.float32,) * 2
    state, dropping = dropout_signatures(cfg.dropout, kinds.float32)
    schedule = (*(INDEX,) * 7, kinds.pointer(kinds.uint32))
    return KernelSpec(
        "nbflash_bwd_sm90_dq",
        make_bwd_sm90_dq,
        cfg,
        (
            *(*maps, *pointers, STRIDES, STRIDES, state, STRIDES, *sizes, *scales, *schedule),
            *(score_signature(cfg.score), dropping),
        ),
        maps=len(maps),
        whole_program=True,
    )
