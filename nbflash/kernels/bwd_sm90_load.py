"""What the loading warpgroup of the Hopper backward does: see :mod:`nbflash.kernels.bwd_sm90`.

Warp 0, one thread, walks the schedule and feeds the rings. Warps 1 and 2 add the parts of dQ that
the computing warpgroups leave in shared memory. Warp 3 looks at K of every column that has masked
tiles, and at the statistics of every masked tile: there P and dS are 0 where a score is hidden, but
0 · NaN would reach the gradients.
"""

from masks import BITS, FULL, INTERVAL
from nbflash.kernels.bwd_sm90_config import BAD_WORDS, END, K_STAGES, RECORD_WORDS
from nbflash.ptx._asm import cuda, inlined, types
from nbflash.ptx.mbarrier import (
    bar_arrive,
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from nbflash.ptx.tma import bulk_add, bulk_commit, bulk_load, bulk_wait, bulk_wait_read, tma_load_4d
from nbflash.tile.pipeline import item_of, make_advance
from nbflash.tile.shared import global_address
from nbflash.tile.unroll import load4, opaque, store4, unrolled
from nbflash.tile.warp_math import ballot
from nbflash.tile.wgmma_gemm import PANEL, ROW_BYTES
from nbflash.tile.wgmma_gradient import PART

WORK_WORDS = 4  # key tile, batch element, head of K and V, whether the column has masked tiles
DQ_EMPTY, DQ_FULL = 5, 7  # named barriers of each warpgroup's part of dQ
DQ_THREADS = 128 + 32  # the warpgroup and the warp that stores
CLEANER = 96  # first thread of warp 3
SIGNS = 0x80008000  # where a carry out of an exponent of ones ends up


@unrolled
def quotient(a, b):
    """``a // b`` of numbers that are not negative, in 32 bits."""
    return a // b


@unrolled
def following(i):
    """``i + 1``, of a loop that the compiler is not to unroll: registers are few."""
    return opaque(i + 1)


def make_load_stream(cfg):
    """``load_stream(smem, place, maps, tables, sizes, schedule)``, for one thread."""
    TILE_M, TILE_N, PANELS = cfg.tile_m, cfg.tile_n, cfg.panels
    Q_BYTES, KV_BYTES = cfg.q_bytes, cfg.kv_bytes
    STAT_BYTES, MASK_BYTES, BIT_BYTES = cfg.stat_bytes, cfg.mask_bytes, cfg.bit_bytes
    STATS_WORDS, BITS_WORDS = STAT_BYTES // 4, BIT_BYTES // 4
    Q_PANEL, KV_PANEL = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES
    K, V, DO, _, _, STATS, MASKS, RECORDS, *_ = cfg.offsets
    FULL_Q, EMPTY_Q, FULL_DO, EMPTY_DO, _, EMPTY_K, FULL_V, EMPTY_V, RAW, RAW_K = cfg.barriers
    advance, advance_k = make_advance(cfg.stages), make_advance(K_STAGES)

    @inlined
    def write_record(smem, at, kind, n_block, bh_kv, slot):
        smem[at] = kind
        smem[at + 1] = n_block
        smem[at + 2] = bh_kv
        smem[at + 3] = slot

    @inlined
    def send(to, panel_bytes, tensor_map, row, head, batch, bar):
        for panel in range(PANELS):
            tma_load_4d(to + panel * panel_bytes, tensor_map, panel * PANEL, row, head, batch, bar)

    @inlined
    def load_mask(base, stage, kind, query_tile, tables, bar):
        """The bounds or the bits of a masked tile."""
        _, bounds, bits = tables
        to = base + MASKS + stage * MASK_BYTES
        if kind == INTERVAL:
            mbarrier_arrive_expect_tx(bar, Q_BYTES + 2 * STAT_BYTES)
            source = global_address(bounds, types.int64(query_tile) * STATS_WORDS)
            bulk_load(to, source, STAT_BYTES, bar)
        else:
            mbarrier_arrive_expect_tx(bar, Q_BYTES + STAT_BYTES + BIT_BYTES)
            source = global_address(bits, types.int64(kind - BITS) * BITS_WORDS)
            bulk_load(to, source, BIT_BYTES, bar)

    @inlined
    def load_stream(smem, place, maps, tables, sizes, schedule):
        base, words = place
        q_map, k_map, v_map, do_map = maps
        stats, bounds, bits = tables
        heads, group, n_row, n_col, live = sizes
        work, plane_of, row_ptr, col_idx, kinds = schedule
        zero, one = types.int32(0), types.int32(1)
        stage, phase, k_stage, k_phase, v_phase = zero, one, zero, one, one
        blocks, block = types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)
        for round_ in range(types.int32(quotient(types.int32(live + blocks - 1), blocks))):
            item = types.int32(item_of(round_, blocks, block))
            if item < live:
                n_block, b = work[WORK_WORDS * item], work[WORK_WORDS * item + 1]
                h_kv, n0 = work[WORK_WORDS * item + 2], types.int32(n_block * TILE_N)
                sign = -one  # of the kind of a column's first tile
                for h in range(types.int32(h_kv * group), types.int32((h_kv + 1) * group)):
                    plane = plane_of[b * heads + h]
                    at = types.int32(plane * n_row + n_block)
                    for t in range(row_ptr[at], row_ptr[at + 1]):
                        m_block, kind = col_idx[t], kinds[t]
                        tile = types.int32((b * heads + h) * n_col + m_block)
                        full_q = types.int32(base + 8 * stage + (FULL_Q if kind == FULL else RAW))
                        mbarrier_wait(base + EMPTY_Q + 8 * stage, phase)
                        record = words + RECORDS // 4 + RECORD_WORDS * stage
                        bh_kv = b * quotient(heads, group) + h_kv
                        write_record(smem, record, sign * kind, n_block, bh_kv, tile)
                        if kind == FULL:
                            mbarrier_arrive_expect_tx(full_q, Q_BYTES + STAT_BYTES)
                        else:
                            load_mask(base, stage, kind, plane * n_col + m_block, tables, full_q)
                        source = global_address(stats, types.int64(tile) * STATS_WORDS)
                        bulk_load(base + STATS + stage * STAT_BYTES, source, STAT_BYTES, full_q)
                        m0 = types.int32(m_block * TILE_M)
                        send(base + stage * Q_BYTES, Q_PANEL, q_map, m0, h, b, full_q)
                        if sign < 0:
                            mbarrier_wait(base + EMPTY_K + 8 * k_stage, k_phase)
                            bar = base + RAW_K + 8 * k_stage
                            mbarrier_arrive_expect_tx(bar, KV_BYTES)
                            send(base + K + k_stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar)
                            k_stage, k_phase = advance_k(k_stage, k_phase)
                        mbarrier_wait(base + EMPTY_DO + 8 * stage, phase)
                        full_do = types.int32(base + 8 * stage + (FULL_DO if kind == FULL else RAW))
                        mbarrier_arrive_expect_tx(full_do, Q_BYTES)
                        send(base + DO + stage * Q_BYTES, Q_PANEL, do_map, m0, h, b, full_do)
                        if sign < 0:
                            mbarrier_wait(base + EMPTY_V, v_phase)
                            v_phase ^= 1
                            mbarrier_arrive_expect_tx(base + FULL_V, KV_BYTES)
                            send(base + V, KV_PANEL, v_map, n0, h_kv, b, base + FULL_V)
                        sign = one
                        stage, phase = advance(stage, phase)
        mbarrier_wait(base + EMPTY_Q + 8 * stage, phase)
        write_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage, END, 0, 0, 0)
        mbarrier_arrive(base + FULL_Q + 8 * stage)

    return load_stream


def make_store_stream(cfg):
    """``store_stream(smem, place, dq, warp, lane)``: parts of dQ to their sum, for one warp."""
    DQ, SLOTS, PART_BYTES, CONSUMERS = cfg.offsets[4], cfg.offsets[9], 4 * PART, cfg.consumers

    @inlined
    def store_stream(smem, place, dq, warp, lane):
        base, words = place
        at = words + SLOTS // 4 + warp
        bar_arrive(DQ_EMPTY + warp, DQ_THREADS)
        bar_sync(DQ_FULL + warp, DQ_THREADS)
        slot = smem[at]
        while slot >= 0:
            if lane == 0:
                part = types.int64(slot) * CONSUMERS + warp
                bulk_add(global_address(dq, part * PART), base + DQ + warp * PART_BYTES, PART_BYTES)
                bulk_commit()
                bulk_wait_read()
            cuda.syncwarp()
            bar_arrive(DQ_EMPTY + warp, DQ_THREADS)
            bar_sync(DQ_FULL + warp, DQ_THREADS)
            slot = smem[at]
        if lane == 0:
            bulk_wait()

    return store_stream


def make_clean_stream(cfg):
    """``clean_stream(smem, stats, place, sizes, schedule, lane)``, for one warp."""
    TILE_M, TILE_N, STAGES, CHUNKS = cfg.tile_m, cfg.tile_n, cfg.stages, 8 * cfg.panels
    Q_BYTES, KV_BYTES, STAT_BYTES = cfg.q_bytes, cfg.kv_bytes, cfg.stat_bytes
    Q_PANEL, KV_PANEL = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES
    K, _, DO, _, _, STATS, _, _, BAD, *_ = cfg.offsets
    FULL_Q, _, FULL_DO, _, FULL_K, _, _, _, RAW, RAW_K = cfg.barriers
    WORDS, HUGE = -(-TILE_N // 32), types.float32(3e38)
    EXPONENTS, LOWEST_EXPONENTS = {
        "float16": (0x7C007C00, 0x04000400),
        "bfloat16": (0x7F807F80, 0x00800080),
    }[cfg.dtype]
    advance, advance_k = make_advance(STAGES), make_advance(K_STAGES)

    @unrolled
    def not_finite(smem, at):
        """Not 0 if 16 bytes hold an infinity or a NaN: an exponent of ones, in either half."""
        found = None
        for x in load4(smem, at):
            carried = (x & EXPONENTS) + LOWEST_EXPONENTS
            found = carried if found is None else found | carried
        return found & (SIGNS - 2**32)

    @unrolled
    def clear(smem, at, zero):
        store4(smem, at, (zero,) * 4)

    @unrolled
    def lanes_of(condition):
        return ballot(condition)

    @inlined
    def clear_row(smem, at, panel_bytes, row):
        i = types.int32(0)
        while i < CHUNKS:
            clear(smem, at + (i >> 3) * (panel_bytes // 4) + row * 32 + (i & 7) * 4, types.int32(0))
            i = following(i)

    @inlined
    def clean_keys(smem, words, k_stage, masked, lane):
        """Rows of K that hold anything but numbers become zeros, and bits."""
        k = words + (K + k_stage * KV_BYTES) // 4
        word = types.int32(0)
        while word < WORDS:
            found, row = types.int32(0), 32 * word + lane
            if masked:
                i = types.int32(0)
                while i < CHUNKS:
                    chunk = (i + lane) & 7  # eight lanes meet every bank once
                    at = k + (i >> 3) * (KV_PANEL // 4) + row * 32 + chunk * 4
                    found |= not_finite(smem, at)
                    i = following(i)
                if found != 0:
                    clear_row(smem, k, KV_PANEL, row)
            lanes = lanes_of(found != 0)
            if lane == 0:
                smem[words + BAD // 4 + BAD_WORDS * k_stage + word] = lanes
            word = following(word)
        fence_proxy_async()
        cuda.syncwarp()

    @inlined
    def clean_queries(smem, stats, words, stage, lane):
        """Rows of Q and dO whose results are NaN, or that attend nothing, become zeros."""
        at = words + (STATS + stage * STAT_BYTES) // 4
        row = types.int32(lane)
        while row < TILE_M:
            if not abs(stats[at + row]) < HUGE:
                clear_row(smem, words + stage * Q_BYTES // 4, Q_PANEL, row)
                clear_row(smem, words + (DO + stage * Q_BYTES) // 4, Q_PANEL, row)
            row = following(row + 31)
        fence_proxy_async()
        cuda.syncwarp()

    @inlined
    def clean_stream(smem, stats, place, sizes, schedule, lane):
        base, words = place
        heads, group, n_row, _, live = sizes
        work, plane_of, row_ptr, _, kinds = schedule
        zero = types.int32(0)
        stage, phases, k_stage, k_phase = zero, zero, zero, zero
        blocks, block = types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)
        for round_ in range(types.int32(quotient(types.int32(live + blocks - 1), blocks))):
            item = types.int32(item_of(round_, blocks, block))
            if item < live:
                at = WORK_WORDS * item
                n_block, b, h_kv, masked = work[at], work[at + 1], work[at + 2], work[at + 3]
                mbarrier_wait(base + RAW_K + 8 * k_stage, k_phase)
                clean_keys(smem, words, k_stage, masked, lane)
                if lane == 0:
                    mbarrier_arrive(base + FULL_K + 8 * k_stage)
                k_stage, k_phase = advance_k(k_stage, k_phase)
                first = types.int32(b * heads + h_kv * group)
                for bh in range(first, types.int32(first + group)):
                    at = types.int32(plane_of[bh] * n_row + n_block)
                    for t in range(row_ptr[at], row_ptr[at + 1]):
                        if kinds[t] != FULL:
                            mbarrier_wait(base + RAW + 8 * stage, phases >> stage & 1)
                            phases ^= 1 << stage
                            clean_queries(smem, stats, words, stage, lane)
                            if lane == 0:
                                mbarrier_arrive(base + FULL_Q + 8 * stage)
                                mbarrier_arrive(base + FULL_DO + 8 * stage)
                        stage, _ = advance(stage, zero)

    return clean_stream


def make_write_empty_columns(cfg):
    """``write_empty_columns(result, work, items, live, thread)``: no gradient where none attends.

    dK = dV = 0 for the end of the work list, by warps 1 to 3.
    """
    TILE_N, PAIRS = cfg.tile_n, cfg.head_dim // 2
    THREADS = 96

    @inlined
    def write_empty_columns(result, work, items, live, thread):
        dk, dv, stride, nk, _, _, _ = result
        zero = types.uint32(0)
        first, step = types.int32(live + cuda.blockIdx.x), types.int32(cuda.gridDim.x)
        for item in range(first, items, step):
            at = WORK_WORDS * item
            n_block, b, h_kv = work[at], work[at + 1], work[at + 2]
            start = b * stride[0] + h_kv * stride[2]
            i, end = types.int32(thread), types.int32(min(TILE_N, nk - n_block * TILE_N) * PAIRS)
            while i < end:
                row = quotient(i, PAIRS)
                at = (start + (n_block * TILE_N + row) * stride[1]) // 2 + (i - row * PAIRS)
                dk[at] = zero
                dv[at] = zero
                i = following(i + (THREADS - 1))

    return write_empty_columns
