"""The end of a row in the Hopper forward: O / l → out, LSE → lse."""

from nbflash.backends.sm90.shared.config import STORERS
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, fence_proxy_async
from nbflash.cuda.ptx.tma import bulk_commit, tma_store_4d
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import opaque, store, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES
from nbflash.cuda.tile.wgmma.softmax import make_finish, row_total
from nbflash.cuda.tile.wgmma.store_shared import make_store_fragment, matrix_row

PAST = -1  # the row tile before a stream's first


def make_finish_row(cfg):
    """``finish_row(acc, m, l, row, bh, result, place)``; ``place``: stage, base, warpgroup, thread.

    O goes through the stage that its Q has left, and TMA; with a single stage of Q,
    straight to memory.
    """
    TILE_M, HEAD_DIM, PANELS = cfg.tile_m, cfg.head_dim, cfg.panels
    Q_BYTES, STAGED, DROPOUT = cfg.q_bytes, cfg.q_stages > 1, bool(cfg.dropout)
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
    def store_staged(packed, row, b, h, o_map, stage, base, warpgroup, thread):
        start = types.uint32(base + stage * Q_BYTES + warpgroup * 64 * ROW_BYTES)
        store_fragment(matrix_row(start, thread), packed)
        fence_proxy_async()
        bar_sync(STORERS + warpgroup, 128)
        if thread % 128 == 0:
            for panel in range(PANELS):
                source = start + types.uint32(panel * TILE_M * ROW_BYTES)
                tma_store_4d(o_map, panel * PANEL, row * TILE_M + 64 * warpgroup, h, b, source)
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
    def finish_row(acc, m, l, row, bh, result, place):
        stage, base, warpgroup, thread = place
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
            store_staged(packed, row, b, h, o_map, stage, base, warpgroup, thread)
        else:
            store_straight(packed, row, b, h, out, o_stride, nq, thread)
        if thread % 4 == 0:
            if upper < nq:
                lse[bh * nq + upper] = values[0]
            if upper + 8 < nq:
                lse[bh * nq + upper + 8] = values[1]

    return finish_row
