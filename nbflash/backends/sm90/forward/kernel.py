"""Forward pass on Hopper: wgmma, TMA and mbarriers; Algorithms 1 and 5.

A block is one producer warpgroup and one to three consumer warpgroups, 64 query rows each. Blocks
are persistent: each takes row tiles off the work list, longest first, in serpentine order, so that
all end together. The producer walks the schedule; consumers take a stream of tiles, row after row,
each with a descriptor (kind, first key, row, head). To follow one tile: this file,
:mod:`.producer`, :mod:`.consumer` and one of the mainloops.

    producer   TMA: K(t), V(t−1), with a row's first tile Q, into rings of stages (:mod:`.rings`)
                 │ full[stage], phase            ▲ empty[stage], phase ^ 1
                 ▼                               │
    consumers  S = Q Kᵀ → mask → P, m, l → O += P V; where a row ends O / l → out

A tile is worked on as a whole, and the products of one warpgroup run under the softmax of another
(:mod:`.mainloop_pingpong`):

    for each tile t of the stream
        in turn: issue  S = Q Kᵀ of t  and  O += P V of t − 1       (asynchronous)
        wait for S;  m, P, l of t
        wait;  O = α O, or, if t begins a row, O / l → out and O = 0

    warpgroup 0   S(t) PV(t−1) | softmax of t          | S(t+1) PV(t)   …
    warpgroup 1   softmax      | S(t) PV(t−1)          | softmax of t   …

or, where the softmax outlasts the products, in halves a and b of its keys, so that the products of
one run under the softmax of the other (:mod:`.mainloop_overlap`):

    for each tile t of the stream
        issue O += P V of t − 1, b  and  S = Q Kᵀ of t, b           (asynchronous)
            m, P, l of t, a
        wait;  O = α O, or, if t begins a row, O / l → out and O = 0
        issue O += P V of t, a      and  S = Q Kᵀ of t + 1, a       (asynchronous)
            m, P, l of t, b
        wait;  O = α O

    products   … Pb(t−1) Sb(t)     Pa(t) Sa(t+1)     Pb(t) Sb(t+1) …
    softmax    …     a of t             b of t          a of t + 1

A row's last product runs under the next row's first softmax: a short row costs no pipeline of its
own. Score functions take S before the mask does (:mod:`nbflash.backends.sm90.shared.score`), but
for ALiBi, which S begins as, by a product where there is room for its operand (:mod:`.alibi_gemm`);
dropout takes P when it is packed and its sums are known
(:mod:`nbflash.backends.sm90.shared.dropout`). m is a reference that stands a little above the
largest score, and α is seldom anything but 1 (:mod:`nbflash.backends.sm90.shared.online_softmax`).
The compiler moves the wait for products up over arithmetic, but not over the vote on whether m
still serves, behind the exponentials. O leaves through the shared memory of its row's Q.

    barrier        arrives                               waits
    full_q[i]      producer, bytes of Q                  consumers, before S of a row's first tile
    empty_q[i]     each consumer, O has left the stage   producer
    full_k[s]      producer, bytes of K; descriptor      consumers, while the tile before is theirs
    empty_k[s]     each consumer, S of the tile          producer
    full_v[s]      producer, bytes of V                  consumers, before P V of the tile
    empty_v[s]     each consumer, P V of the tile        producer
    raw_v[s]       producer, bytes of a masked V         the NaN watch, which arrives at full_v

Named barriers: the NaN watch's three warps among themselves, each consumer before its O leaves, and
the turns of tiles as a whole, at which the consumer before arrives. Where no tile of the schedule
is masked (``full_tiles``) there is no NaN watch, and raw_v is not used.
"""

from nbflash.backends.sm90.forward.alibi_gemm import make_fill_ramp
from nbflash.backends.sm90.forward.consumer import make_compute_stream
from nbflash.backends.sm90.forward.producer import make_load_stream, make_write_empty_rows
from nbflash.backends.sm90.shared.dropout import make_drawing
from nbflash.backends.sm90.shared.nan_watch import make_clean_stream
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_init, setmaxnreg
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.dropout import dropout_signatures
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT


def make_fwd_sm90(cfg):
    """The kernel for a :class:`~.config.Sm90Config`.

    Arguments of the kernel: tensor maps of q, k, v and out; out, lse; strides (batch, sequence,
    head) of out, in elements; q and k; dropout's state; strides of q and k; nq, nk, heads, group =
    heads // heads_kv; tiles per plane, items of the work list and how many of them have tiles;
    |scale| · log2 e, or |scale| before a score; the schedule; the score's parameters; dropout's
    threshold, in both halves of a word, and the share of what it keeps.
    """
    CONSUMERS, Q_STAGES, K_STAGES, V_STAGES = (
        cfg.consumers,
        cfg.q_stages,
        cfg.k_stages,
        cfg.v_stages,
    )
    barriers = cfg.barriers
    FULL_Q, EMPTY_Q, FULL_K = barriers.full_q, barriers.empty_q, barriers.full_k
    EMPTY_K, FULL_V, EMPTY_V = barriers.empty_k, barriers.full_v, barriers.empty_v
    RAW_V = barriers.raw_v
    REGISTERS = bool(cfg.registers)
    fewer, more = (
        setmaxnreg(action, count)
        for action, count in zip(("dec", "inc"), cfg.registers or (24, 240), strict=True)
    )
    load_stream, clean_stream = make_load_stream(cfg), make_clean_stream(cfg)
    FULL_TILES = cfg.full_tiles
    write_empty_rows, compute_stream = make_write_empty_rows(cfg), make_compute_stream(cfg)
    drawn_of, *_ = make_drawing(cfg)
    fill_ramp = make_fill_ramp(cfg)

    def fwd_sm90(
        q_map,
        k_map,
        v_map,
        o_map,
        out,
        lse,
        o_stride,
        q,
        k,
        state,
        q_stride,
        k_stride,
        nq,
        nk,
        heads,
        group,
        n_row,
        items,
        live,
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
        start = types.int64(shared_address(smem))
        base = (start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1)
        place = base, (base - start) // 4
        tid = cuda.threadIdx.x
        if tid == 0:
            for i in range(Q_STAGES):
                mbarrier_init(base + FULL_Q + 8 * i, 1)
                mbarrier_init(base + EMPTY_Q + 8 * i, CONSUMERS)
            for i in range(K_STAGES):
                mbarrier_init(base + FULL_K + 8 * i, 1)
                mbarrier_init(base + EMPTY_K + 8 * i, CONSUMERS)
            for i in range(V_STAGES):
                mbarrier_init(base + FULL_V + 8 * i, 1)
                mbarrier_init(base + EMPTY_V + 8 * i, CONSUMERS)
                mbarrier_init(base + RAW_V + 8 * i, 1)
            fence_mbarrier_init()
        fill_ramp(smem, place, tid)
        cuda.syncthreads()
        schedule = work, plane_of, row_ptr, col_idx, kind
        sizes = heads, group, n_row, live
        result = o_map, out, lse, o_stride, nq, heads, scale, dropping
        if tid < 128:
            if REGISTERS:
                fewer()
            if tid == 0:
                load_stream(smem, place, (q_map, k_map, v_map), sizes, schedule)
            elif tid >= 32:
                write_empty_rows(result, work, items, live, tid - 32)
                if not FULL_TILES:
                    clean_stream(smem, place, sizes, schedule, tid - 32)
        else:
            if REGISTERS:
                more()
            masking = plane_of, lo, hi, bits, nq
            operands = q, k, q_stride, k_stride, nq, nk, heads, group
            drawn = drawn_of(state)
            compute_stream(smem, place, result, masking, operands, params, drawn, tid - 128)

    return fwd_sm90


def fwd_sm90_spec(cfg):
    """How to compile and launch the kernel of ``cfg``; the first four arguments are maps."""
    maps, pointers = (
        (kinds.uint64,) * 4,
        (kinds.pointer(kinds.uint32), kinds.pointer(kinds.float32)),
    )
    state, dropping = dropout_signatures(cfg.dropout, kinds.float32)
    operands = (*(kinds.pointer(kinds.uint32),) * 2, state, STRIDES, STRIDES)
    sizes = (kinds.int32,) * 7
    schedule, params = (*(INDEX,) * 7, kinds.pointer(kinds.uint32)), score_signature(cfg.score)
    return KernelSpec(
        "nbflash_fwd_sm90",
        make_fwd_sm90,
        cfg,
        (*maps, *pointers, STRIDES, *operands, *sizes, kinds.float32, *schedule, params, dropping),
        maps=len(maps),
        whole_program=True,
    )
