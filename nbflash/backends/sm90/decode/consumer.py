"""What the computing warpgroup of the Hopper decode kernel does: see :mod:`.kernel`."""

from masks import FULL
from nbflash.backends.sm90.decode.config import RAGGED, ROWS
from nbflash.backends.sm90.decode.producer import make_load_q
from nbflash.backends.sm90.shared.config import BAD_WORDS, DESCRIPTOR_WORDS, END
from nbflash.backends.sm90.shared.nan_watch import make_clean_key
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.backends.split_kv.combine_in_block import COMPUTING
from nbflash.backends.split_kv.part import make_rows
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.cuda.tile.finite import poisoned
from nbflash.cuda.tile.ring import make_advance, read_descriptor
from nbflash.cuda.tile.tracing import equal, load, opaque, select, store, unrolled
from nbflash.cuda.tile.warp_math import approximate_reciprocal, lanes_of, row_of_thread
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, after_wait, lower, make_gemm_pv, make_gemm_qk
from nbflash.cuda.tile.wgmma.softmax import (
    make_apply_keep,
    make_finish,
    make_keep,
    make_wgmma_softmax,
    row_of,
    row_total,
    scale_fragment,
)


def make_store_part(cfg):
    """``store_part(acc, m, l, part_o, part_lse, places, thread)``: O / l and LSE of two rows."""
    HEAD_DIM = cfg.head_dim
    _, log_sum_exp = make_finish(HEAD_DIM, cfg.dtype)

    @unrolled
    def normalised(acc, l):
        inverse = [select(equal(x, 0.0), 0.0, approximate_reciprocal(x)) for x in l]
        return tuple(x * inverse[row_of(i)] for i, x in enumerate(acc))

    def make_store_row(which):
        @unrolled
        def store_row(out, at, o):
            for j in range(HEAD_DIM // 8):
                for e in range(2):
                    store(out, at + (8 * j + e), o[4 * j + 2 * which + e])

        return store_row

    store_upper, store_below = make_store_row(0), make_store_row(1)

    @inlined
    def store_part(acc, m, l, part_o, part_lse, places, thread):
        (upper, upper_lse), (below, below_lse) = places
        l = row_total(l)
        values, o, column = log_sum_exp(m, l), normalised(acc, l), thread % 4 * 2
        if upper_lse >= 0:
            store_upper(part_o, upper * HEAD_DIM + column, o)
            if column == 0:
                part_lse[upper_lse] = values[0]
        if below_lse >= 0:
            store_below(part_o, below * HEAD_DIM + column, o)
            if column == 0:
                part_lse[below_lse] = values[1]

    return store_part


def make_compute(cfg):
    """``compute(smem, place, rows, bits, scale, thread)``: O, m and l of the part's tiles."""
    TILE_N, KV_BYTES, WORDS = cfg.tile_n, cfg.kv_bytes, -(-cfg.tile_n // 32)
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DESCRIPTORS, BAD = layout.k, layout.v, layout.descriptors, layout.bad_keys
    FULL_K, FULL_V, EMPTY = barriers.full_k, barriers.full_v, barriers.empty
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    S_START = (types.float32(0),) * (TILE_N // 2)
    issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, ROWS, TILE_N, negate=cfg.negate)
    issue_pv, clean_key = make_gemm_pv(cfg.dtype, TILE_N), make_clean_key(cfg)
    careful = make_online_softmax(TILE_N, cfg.dtype).careful
    pack = make_wgmma_softmax(TILE_N, cfg.dtype).pack
    _, _, gather = make_keep(ROWS, TILE_N)
    apply_keep, (_, keep_of) = make_apply_keep(TILE_N, 0), make_rows(cfg)
    advance, wait_all = make_advance(cfg.stages), wgmma_wait(0)

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(WORDS))

    @inlined
    def clean(smem, words, v, stage, thread):
        """Keys whose V is not finite become zeros; which ones, as words of bits."""
        at = words + BAD // 4 + BAD_WORDS * stage
        if thread < TILE_N:
            found = lanes_of(clean_key(smem, words + v // 4, thread))
            if thread % 32 == 0:
                smem[at + thread // 32] = found
        fence_proxy_async()
        bar_sync(COMPUTING, 128)
        return load_bad(smem, types.int32(at))

    @inlined
    def compute(smem, place, rows, bits, scale, thread):
        base, words = place
        acc, m, l = O_START, PAIR, PAIR
        stage, phase = types.int32(0), types.int32(0)
        quad, q = types.int32(thread % 4 * 2), types.uint32(lower(base, 16))
        mbarrier_wait(base + FULL_K, 0)
        kind, n0, _, _ = read_descriptor(smem, words + DESCRIPTORS // 4)
        while kind != END:
            thread = opaque(thread)  # or what follows from it stays in registers
            k, v = K + stage * KV_BYTES, V + stage * KV_BYTES
            # S = Q Kᵀ
            wgmma_fence()
            s = issue_qk(S_START, q, types.uint32(lower(base + k, 16)))
            wgmma_commit()
            wait_all()
            s = after_wait(s)
            mbarrier_wait(base + FULL_V + 8 * stage, phase)
            if kind != FULL:
                known = kind & (RAGGED - 1)
                upper = keep_of(known, n0, rows[0], bits, quad)
                below = keep_of(known, n0, rows[1], bits, quad)
                s = apply_keep(s, (upper, below))
                bad = types.uint32(gather(clean(smem, words, v, stage, thread), quad))
                l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))
            # P = 2^(S · scale − m)
            weights, m, l, sums, _, alpha = careful(s, m, l, scale)
            l = l[0] + sums[0], l[1] + sums[1]
            # O = α O + P V
            p, acc = pack(weights), scale_fragment(acc, alpha)
            wgmma_fence()
            acc = issue_pv(acc, p, types.uint32(lower(base + v, TILE_N * ROW_BYTES)))
            wgmma_commit()
            wait_all()
            acc = after_wait(acc)
            if thread == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
            stage, phase = advance(stage, phase)
            mbarrier_wait(base + FULL_K + 8 * stage, phase)
            kind, n0, _, _ = read_descriptor(
                smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage
            )
        return acc, m, l

    return compute


def make_part(cfg):
    """As :func:`~.consumer_8bit.make_stored_part`, by a warpgroup's wgmma."""
    load_q, compute, store_part = make_load_q(cfg), make_compute(cfg), make_store_part(cfg)
    row_at, _ = make_rows(cfg)

    @inlined
    def run(smem, place, q, q_stride, rows, where, seen, bits, scale, parts, thread):
        plane, length, lo, hi = seen
        load_q(smem, place[1], q, q_stride, rows, thread)
        row = types.int32(rows[0] + row_of_thread(thread))
        upper, upper_at = row_at(row, where, plane, length, lo, hi)
        below, below_at = row_at(row + 8, where, plane, length, lo, hi)
        acc, m, l = compute(smem, place, (upper, below), bits, scale, thread)
        store_part(acc, m, l, *parts, (upper_at, below_at), thread)

    return run
