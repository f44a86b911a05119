"""What the loading warpgroup of the Hopper kernel does: see :mod:`.kernel`.

Warp 0, one thread, walks the schedule and feeds the rings. Warps 1 to 3 write the rows that attend
nothing, and then look at V of every masked tile before the consumers do: P is 0 where a score is
hidden, but 0 · NaN would reach O.
"""

import math

from masks import FULL
from nbflash.backends.sm90.forward.config import BAD_WORDS, CLEANERS, END, FIRST, RECORD_WORDS
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import (
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from nbflash.cuda.ptx.tma import tma_load_4d
from nbflash.cuda.tile.finite import make_clean_row
from nbflash.cuda.tile.ring import divmod_int32, item_of, make_advance, rounds_of
from nbflash.cuda.tile.tracing import FULL_WARP
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES

THREADS = 96


@inlined
def write_record(smem, at, kind, n0, row, bh):
    """What a consumer knows of a tile."""
    smem[at] = kind
    smem[at + 1] = n0
    smem[at + 2] = row
    smem[at + 3] = bh


def make_send(cfg):
    """``send(to, panel_bytes, tensor_map, row, head, batch, bar, nbytes)``: a tile's panels."""
    PANELS = cfg.panels

    @inlined
    def send(to, panel_bytes, tensor_map, row, head, batch, bar, nbytes):
        mbarrier_arrive_expect_tx(bar, nbytes)
        for panel in range(PANELS):
            tma_load_4d(to + panel * panel_bytes, tensor_map, panel * PANEL, row, head, batch, bar)

    return send


@inlined
def tiles_of_round(round_, sizes, schedule):
    """Row tile, batch and head, and the tiles from where to where of a round; none past the end."""
    _, _, n_row, live = sizes
    work, plane_of, row_ptr, _, _ = schedule
    item = types.int32(item_of(round_, types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)))
    row, bh, begin, end = types.int32(0), types.int32(0), types.int32(0), types.int32(0)
    if item < live:
        row, bh = work[2 * item], work[2 * item + 1]
        at = types.int32(plane_of[bh] * n_row + row)
        begin, end = types.int32(row_ptr[at]), types.int32(row_ptr[at + 1])
    return row, bh, begin, end


def make_load_stream(cfg):
    """``load_stream(smem, place, maps, sizes, schedule)``, for one thread.

    A row is looked up while the one before is fed.
    """
    TILE_M, TILE_N, Q_BYTES, KV_BYTES = cfg.tile_m, cfg.tile_n, cfg.q_bytes, cfg.kv_bytes
    Q_PANEL, KV_PANEL = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, RECORDS = layout.k, layout.v, layout.records
    FULL_Q, EMPTY_Q, FULL_K = barriers.full_q, barriers.empty_q, barriers.full_k
    EMPTY_K, FULL_V, EMPTY_V = barriers.empty_k, barriers.full_v, barriers.empty_v
    RAW_V = barriers.raw_v
    advance, advance_q, advance_v = map(make_advance, (cfg.k_stages, cfg.q_stages, cfg.v_stages))

    send, FULL_TILES = make_send(cfg), cfg.full_tiles

    @inlined
    def load_stream(smem, place, maps, sizes, schedule):
        """V follows K one tile behind, as it is needed."""
        base, words = place
        q_map, k_map, v_map = maps
        heads, group, _, live = sizes
        _, _, _, col_idx, kind = schedule
        zero, one = types.int32(0), types.int32(1)
        stage, phase, q_stage, q_phase = zero, one, zero, one
        v_stage, v_phase, v_n0, v_head, v_batch, v_full = zero, one, -one, zero, zero, zero
        following = tiles_of_round(zero, sizes, schedule)
        for round_ in range(rounds_of(live, types.int32(cuda.gridDim.x))):
            row, bh, begin, end = following
            following = tiles_of_round(types.int32(round_ + 1), sizes, schedule)
            if begin < end:
                b, h = divmod_int32(types.int32(bh), heads)
                h_kv, _ = divmod_int32(h, group)
                for t in range(begin, end):
                    n0 = types.int32(col_idx[t] * TILE_N)
                    mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
                    record = words + RECORDS // 4 + RECORD_WORDS * stage
                    first = FIRST if t == begin else 0
                    write_record(smem, record, kind[t] + first, n0, row, bh)
                    bar = base + FULL_K + 8 * stage
                    send(base + K + stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar, KV_BYTES)
                    if v_n0 >= 0:
                        mbarrier_wait(base + EMPTY_V + 8 * v_stage, v_phase)
                        to = base + V + v_stage * KV_BYTES
                        bar = base + v_full + 8 * v_stage
                        send(to, KV_PANEL, v_map, v_n0, v_head, v_batch, bar, KV_BYTES)
                        v_stage, v_phase = advance_v(v_stage, v_phase)
                    if t == begin:
                        mbarrier_wait(base + EMPTY_Q + 8 * q_stage, q_phase)
                        to, bar = base + q_stage * Q_BYTES, base + FULL_Q + 8 * q_stage
                        send(to, Q_PANEL, q_map, row * TILE_M, h, b, bar, Q_BYTES)
                        q_stage, q_phase = advance_q(q_stage, q_phase)
                    v_n0, v_head, v_batch = n0, h_kv, b
                    v_full = types.int32(FULL_V if FULL_TILES or kind[t] == FULL else RAW_V)
                    stage, phase = advance(stage, phase)
        if v_n0 >= 0:
            mbarrier_wait(base + EMPTY_V + 8 * v_stage, v_phase)
            to, bar = base + V + v_stage * KV_BYTES, base + v_full + 8 * v_stage
            send(to, KV_PANEL, v_map, v_n0, v_head, v_batch, bar, KV_BYTES)
            # The last record brings keys too: S of a tile that is none spares a case.
            mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
            write_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage, END, 0, 0, 0)
            to, bar = base + K + stage * KV_BYTES, base + FULL_K + 8 * stage
            send(to, KV_PANEL, k_map, v_n0, v_head, v_batch, bar, KV_BYTES)
        else:
            write_record(smem, words + RECORDS // 4, END, 0, 0, 0)
            mbarrier_arrive(base + FULL_K)

    return load_stream


def make_clean_key(cfg):
    """``clean_key(smem, at, key)``: whether row ``key`` of the V at word ``at`` holds anything but
    numbers; it becomes a row of zeros then.
    """
    clean_row = make_clean_row(cfg.dtype, cfg.panels, cfg.tile_n * ROW_BYTES // 4)

    @inlined
    def clean_key(smem, at, key):
        return clean_row(smem, types.int32(at + key * 32), types.int32(key))

    return clean_key


def make_clean_stream(cfg, threads=THREADS):
    """``clean_stream(smem, place, sizes, schedule, thread)``, for the last ``threads``.

    A key whose V is not finite becomes one of zeros, and a bit that the consumers look at. The
    configuration says which operand plays V, and how many stages it has. Consumers wait for this,
    so that nothing here may wait long: global memory is asked for 32 rows at once, and for 32 kinds
    of a row's tiles, a lane each.
    """
    TILE_N, KV_BYTES, WORDS, THREADS = cfg.tile_n, cfg.kv_bytes, -(-cfg.tile_n // 32), threads
    V, BAD, STAGES = cfg.cleaned.at, cfg.cleaned.bad_keys, cfg.cleaned.stages
    FULL_V, RAW_V = cfg.cleaned.full, cfg.cleaned.raw
    clean_key = make_clean_key(cfg)

    @inlined
    def clean_tile(smem, place, stage, phase, thread):
        base, words = place
        v, word = types.int32(words + (V + stage * KV_BYTES) // 4), types.int32(thread >> 5)
        mbarrier_wait(base + RAW_V + 8 * stage, phase)
        while word < WORDS:
            key = types.int32(32 * word + (thread & 31))
            bad = key < TILE_N and clean_key(smem, v, key)
            found = lanes_of(bad)
            if thread & 31 == 0:
                smem[words + BAD // 4 + BAD_WORDS * stage + word] = found
            word = types.int32(word + THREADS // 32)
        fence_proxy_async()
        bar_sync(CLEANERS, THREADS)
        if thread == 0:
            mbarrier_arrive(base + FULL_V + 8 * stage)

    @inlined
    def clean_stream(smem, place, sizes, schedule, thread):
        lane, stage, phases = types.int32(thread & 31), types.int32(0), types.int32(0)
        rounds, kind = rounds_of(sizes[3], types.int32(cuda.gridDim.x)), schedule[4]
        round_, begins, ends = types.int32(0), types.int32(0), types.int32(0)
        while round_ < rounds:
            nth = types.int32(round_ & 31)
            if nth == 0:
                _, _, begins, ends = tiles_of_round(types.int32(round_ + lane), sizes, schedule)
            t, end = cuda.shfl_sync(FULL_WARP, begins, nth), cuda.shfl_sync(FULL_WARP, ends, nth)
            while t < end:
                masked = lanes_of(t + lane < end and kind[t + lane] != FULL)
                while masked != 0:
                    _, at = divmod_int32(types.int32(stage + cuda.ffs(masked) - 1), STAGES)
                    masked = types.int32(masked & (masked - 1))
                    clean_tile(smem, place, at, phases >> at & 1, thread)
                    phases = types.int32(phases ^ (1 << at))
                _, stage = divmod_int32(types.int32(stage + min(end - t, 32)), STAGES)
                t = types.int32(t + 32)
            round_ = types.int32(round_ + 1)

    return clean_stream


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
            row, bh = work[2 * item], work[2 * item + 1]
            rows = min(TILE_M, nq - row * TILE_M)
            start = (bh // heads) * o_stride[0] + (bh % heads) * o_stride[2]
            for i in range(thread, rows * PAIRS, THREADS):
                r, pair = row * TILE_M + i // PAIRS, i % PAIRS
                out[(start + r * o_stride[1]) // 2 + pair] = zero
            for i in range(thread, rows, THREADS):
                lse[bh * nq + row * TILE_M + i] = types.float32(-math.inf)

    return write_empty_rows
