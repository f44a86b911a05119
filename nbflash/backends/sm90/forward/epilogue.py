"""What a computing warpgroup of the Hopper forward kernel does with a row, whole tiles or halves.

Its masks and its end; and where the stages of the rings are.
"""

import math

from masks import BITS, FULL, INTERVAL
from nbflash.backends.sm90.forward.config import BAD_WORDS, RECORD_WORDS, STORERS
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.ptx.tma import bulk_commit, bulk_wait_read, tma_store_4d
from nbflash.cuda.tile.ring import divmod_int32, read_record
from nbflash.cuda.tile.tracing import equal, load, opaque, select, store, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES, lower
from nbflash.cuda.tile.wgmma.softmax import make_finish, make_keep, row_total
from nbflash.cuda.tile.wgmma.store_shared import make_store_fragment, matrix_row

ALL = types.uint32(0xFFFFFFFF)
PAST = -1  # the row tile before a stream's first


def make_finish_row(cfg):
    """``finish_row(acc, m, l, row, bh, result, stage, turn, thread)``: O / l → out, LSE → lse.

    O goes through the stage that its Q has left, and TMA; with a single stage of Q,
    straight to memory.
    """
    TILE_M, HEAD_DIM, PANELS = cfg.tile_m, cfg.head_dim, cfg.panels
    Q_BYTES, STAGED, DROPOUT = cfg.q_bytes, cfg.q_stages > 1, cfg.dropout
    normalise, log_sum_exp = make_finish(HEAD_DIM, cfg.dtype)
    store_fragment = make_store_fragment(HEAD_DIM, TILE_M)

    def make_store_row(which):
        @unrolled
        def store_row(out, at, packed):
            """A thread's pairs of one row; a quad writes 16 bytes side by side."""
            for j in range(HEAD_DIM // 8):
                store(out, at + 4 * j, packed[2 * j + which])

        return store_row

    store_upper, store_lower = make_store_row(0), make_store_row(1)

    @inlined
    def store_staged(packed, row, b, h, o_map, stage, base, turn, thread):
        start = types.uint32(base + stage * Q_BYTES + turn * 64 * ROW_BYTES)
        store_fragment(matrix_row(start, thread), packed)
        fence_proxy_async()
        bar_sync(STORERS + turn, 128)
        if thread % 128 == 0:
            for panel in range(PANELS):
                source = start + types.uint32(panel * TILE_M * ROW_BYTES)
                tma_store_4d(o_map, panel * PANEL, row * TILE_M + 64 * turn, h, b, source)
            bulk_commit()

    @inlined
    def store_straight(packed, row, b, h, out, o_stride, nq, thread):
        upper, quad = row * TILE_M + row_of_thread(thread), thread % 4
        start = b * o_stride[0] + h * o_stride[2]
        if upper < nq:
            store_upper(out, (start + upper * o_stride[1]) // 2 + quad, packed)
        if upper + 8 < nq:
            store_lower(out, (start + (upper + 8) * o_stride[1]) // 2 + quad, packed)

    @inlined
    def finish_row(acc, m, l, row, bh, result, stage, base, turn, thread):
        o_map, out, lse, o_stride, nq, heads, _, dropping = result
        thread = opaque(thread)  # or what follows from it stays in registers
        l = row_total(l)
        values = log_sum_exp(m, l)
        if DROPOUT:
            _, share = dropping
            l = l[0] * share, l[1] * share
        packed = normalise(acc, l)
        upper, (b, h) = row * TILE_M + row_of_thread(thread), divmod_int32(bh, heads)
        if STAGED:
            store_staged(packed, row, b, h, o_map, stage, base, turn, thread)
        else:
            store_straight(packed, row, b, h, out, o_stride, nq, thread)
        if thread % 4 == 0:
            if upper < nq:
                lse[bh * nq + upper] = values[0]
            if upper + 8 < nq:
                lse[bh * nq + upper + 8] = values[1]

    return finish_row


def make_masking(cfg):
    """What a thread's two rows see.

    ``keep_of(kind, n0, row, bh, masking, thread)`` serves a tile, and
    ``bad_of(smem, words, stage, keep, thread)`` says what of it meets garbage.
    """
    TILE_M, BAD_USED, BAD = cfg.tile_m, -(-cfg.tile_n // 32), cfg.cleaned.bad_keys
    keep_interval, keep_bits, gather = make_keep(TILE_M, cfg.tile_n)
    FULL_TILES = cfg.full_tiles

    @inlined
    def row_bounds(bound, plane, nq, row, thread):
        """Rows past the end repeat the last one's."""
        upper, first = types.int32(row * TILE_M + row_of_thread(thread)), plane * nq
        end = types.int32(nq - 1)
        return bound[first + min(upper, end)], bound[first + min(types.int32(upper + 8), end)]

    @inlined
    def keep_of(kind, n0, row, bh, masking, thread):
        """Which of a thread's scores count in this tile: a word for each of its rows."""
        quad = types.int32(2 * (thread & 3))
        if FULL_TILES or kind == FULL:
            return types.uint32(ALL), types.uint32(ALL)
        if kind == INTERVAL:
            plane_of, lo, hi, _, nq = masking
            plane = plane_of[bh]
            lows = row_bounds(lo, plane, nq, row, thread)
            highs = row_bounds(hi, plane, nq, row, thread)
            upper = keep_interval(lows[0], highs[0], n0, quad)
            below = keep_interval(lows[1], highs[1], n0, quad)
            return types.uint32(upper), types.uint32(below)
        bits, r = masking[3], row_of_thread(thread)
        tile = opaque(kind - BITS)  # or its addresses are computed for every tile
        upper = keep_bits(bits, tile, r, quad)
        return types.uint32(upper), types.uint32(keep_bits(bits, tile, r + 8, quad))

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(BAD_USED))

    @inlined
    def bad_of(smem, words, stage, keep, thread):
        """Which of a thread's scores count and meet a key whose V is not finite."""
        packed = load_bad(smem, words + BAD // 4 + BAD_WORDS * stage)
        mine = types.uint32(gather(packed, types.int32(2 * (thread % 4))))
        return types.uint32(keep[0] & mine), types.uint32(keep[1] & mine)

    return keep_of, bad_of


@unrolled
def poisoned(l, bad):
    """NaN for the rows that attend a key that is not finite."""
    return tuple(select(equal(b, 0), x, math.nan) for x, b in zip(l, bad, strict=True))


def make_stages(cfg):
    """Where the rings' stages are: ``record_of, k_of, v_of, release_q``.

    ``record_of(smem, place, stage, phase)`` is the record of the tile whose K is in ``stage``, once
    it is there; ``k_of(base, stage)`` and ``v_of(base, stage)`` are lower words of descriptors.
    """
    KV_BYTES, KV_PANEL = cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    K, V, RECORDS = cfg.smem.k, cfg.smem.v, cfg.smem.records
    EMPTY_Q, FULL_K = cfg.barriers.empty_q, cfg.barriers.full_k

    @inlined
    def record_of(smem, place, stage, phase):
        base, words = place
        mbarrier_wait(base + FULL_K + 8 * stage, phase)
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    @inlined
    def k_of(base, stage):
        return types.uint32(lower(base + K, 16) + stage * (KV_BYTES >> 4))

    @inlined
    def v_of(base, stage):
        return types.uint32(lower(base + V, KV_PANEL) + stage * (KV_BYTES >> 4))

    @inlined
    def release_q(base, stage):
        """The stage of Q is free once TMA has taken O out of it."""
        bulk_wait_read()
        mbarrier_arrive(base + EMPTY_Q + 8 * stage)

    return record_of, k_of, v_of, release_q
