"""What the producer warpgroup of the Hopper forward does: see :mod:`.kernel`.

Warp 0, one thread, walks the schedule and feeds the rings by TMA. Warps 1 to 3 write the rows that
attend nothing, and are then the NaN watch (:mod:`nbflash.backends.sm90.shared.nan_watch`).
"""

import math

from masks import FULL
from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS, END, FIRST
from nbflash.backends.sm90.shared.nan_watch import THREADS
from nbflash.backends.sm90.shared.tile_stream import make_send, tiles_of_round, write_descriptor
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.cuda.tile.ring import divmod_int32, make_advance, rounds_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES


def make_load_stream(cfg):
    """``load_stream(smem, place, maps, sizes, schedule)``, for one thread.

        K, descriptor   t          t + 1      t + 2      V follows K one tile behind, as it
        V               t − 1      t          t + 1      is needed
        Q               with a row's first tile

    A row is looked up while the one before is fed.
    """
    TILE_M, TILE_N, Q_BYTES, KV_BYTES = cfg.tile_m, cfg.tile_n, cfg.q_bytes, cfg.kv_bytes
    Q_PANEL, KV_PANEL = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DESCRIPTORS = layout.k, layout.v, layout.descriptors
    FULL_Q, EMPTY_Q, FULL_K = barriers.full_q, barriers.empty_q, barriers.full_k
    EMPTY_K, FULL_V, EMPTY_V = barriers.empty_k, barriers.full_v, barriers.empty_v
    RAW_V = barriers.raw_v
    advance, advance_q, advance_v = map(make_advance, (cfg.k_stages, cfg.q_stages, cfg.v_stages))
    send, FULL_TILES = make_send(cfg), cfg.full_tiles

    @inlined
    def load_v(base, v_map, n0, h_kv, b, full, stage, phase):
        """V of the tile before. empty_v: each consumer arrives after its P V, we wait.
        full_v: the bytes arrive, consumers wait; or raw_v, and the NaN watch waits.
        """
        mbarrier_wait(base + EMPTY_V + 8 * stage, phase)
        to, bar = base + V + stage * KV_BYTES, base + full + 8 * stage
        send(to, KV_PANEL, v_map, n0, h_kv, b, bar, KV_BYTES)

    @inlined
    def load_stream(smem, place, maps, sizes, schedule):
        base, words = place
        q_map, k_map, v_map = maps
        heads, group, _, live = sizes
        _, _, _, col_idx, kind = schedule
        zero, one = types.int32(0), types.int32(1)
        stage, phase, q_stage, q_phase = zero, one, zero, one
        v_stage, v_phase, v_n0, v_head, v_batch, v_full = zero, one, -one, zero, zero, zero
        next_row = tiles_of_round(zero, sizes, schedule)
        for round_ in range(rounds_of(live, types.int32(cuda.gridDim.x))):
            m_block, bh, begin, end = next_row
            next_row = tiles_of_round(types.int32(round_ + 1), sizes, schedule)
            if begin < end:
                b, h = divmod_int32(types.int32(bh), heads)
                h_kv, _ = divmod_int32(h, group)
                for t in range(begin, end):
                    n0 = types.int32(col_idx[t] * TILE_N)
                    # empty_k: each consumer arrives after its S, we wait.
                    mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
                    descriptor = words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage
                    first = FIRST if t == begin else 0
                    write_descriptor(smem, descriptor, kind[t] + first, n0, m_block, bh)
                    # full_k: the bytes arrive, consumers wait.
                    bar = base + FULL_K + 8 * stage
                    send(base + K + stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar, KV_BYTES)
                    if v_n0 >= 0:
                        load_v(base, v_map, v_n0, v_head, v_batch, v_full, v_stage, v_phase)
                        v_stage, v_phase = advance_v(v_stage, v_phase)
                    if t == begin:
                        # empty_q: each consumer arrives once O has left the stage, we wait.
                        mbarrier_wait(base + EMPTY_Q + 8 * q_stage, q_phase)
                        # full_q: the bytes arrive, consumers wait.
                        to, bar = base + q_stage * Q_BYTES, base + FULL_Q + 8 * q_stage
                        send(to, Q_PANEL, q_map, m_block * TILE_M, h, b, bar, Q_BYTES)
                        q_stage, q_phase = advance_q(q_stage, q_phase)
                    v_n0, v_head, v_batch = n0, h_kv, b
                    v_full = types.int32(FULL_V if FULL_TILES or kind[t] == FULL else RAW_V)
                    stage, phase = advance(stage, phase)
        if v_n0 >= 0:
            load_v(base, v_map, v_n0, v_head, v_batch, v_full, v_stage, v_phase)
            # The last descriptor brings keys too: S of a tile that is none spares a case.
            mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
            write_descriptor(
                smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, END, 0, 0, 0
            )
            to, bar = base + K + stage * KV_BYTES, base + FULL_K + 8 * stage
            send(to, KV_PANEL, k_map, v_n0, v_head, v_batch, bar, KV_BYTES)
        else:
            write_descriptor(smem, words + DESCRIPTORS // 4, END, 0, 0, 0)
            mbarrier_arrive(base + FULL_K)

    return load_stream


def make_write_empty_rows(cfg):
    """``write_empty_rows(result, work, items, live, thread)``, for warps 1 to 3.

    O = 0 and LSE = −∞ for the row tiles that attend nothing: the end of the work list.
    """
    TILE_M, PAIRS = cfg.tile_m, cfg.head_dim // 2

    @inlined
    def write_empty_rows(result, work, items, live, thread):
        _, out, lse, o_stride, nq, heads, _, _ = result
        zero = types.uint32(0)
        for item in range(live + cuda.blockIdx.x, items, cuda.gridDim.x):
            m_block, bh = work[2 * item], work[2 * item + 1]
            rows = min(TILE_M, nq - m_block * TILE_M)
            start = (bh // heads) * o_stride[0] + (bh % heads) * o_stride[2]
            for i in range(thread, rows * PAIRS, THREADS):
                r, pair = m_block * TILE_M + i // PAIRS, i % PAIRS
                out[(start + r * o_stride[1]) // 2 + pair] = zero
            for i in range(thread, rows, THREADS):
                lse[bh * nq + m_block * TILE_M + i] = types.float32(-math.inf)

    return write_empty_rows
