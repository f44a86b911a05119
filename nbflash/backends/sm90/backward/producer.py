"""What the loading warpgroup of the Hopper backward does: see :mod:`.kernel`.

Warp 0, one thread, walks the schedule and feeds the rings; without dQ warp 1, one thread, those of
K and V. With it warps 1 and 2 add the parts of dQ that the computing warpgroups leave in shared
memory. Warp 3 looks at K of every column that has masked tiles, and at the statistics of every
masked tile: there P and dS are 0 where a score is hidden, but 0 · NaN would reach the gradients.
Without dQ nobody sums over keys, and K arrives as it is.
"""

from masks import BITS, FULL, INTERVAL
from nbflash.backends.sm90.backward.config import COLUMN_DESCRIPTOR_WORDS
from nbflash.backends.sm90.backward.score import make_write_place
from nbflash.backends.sm90.shared.config import BAD_WORDS, END
from nbflash.backends.sm90.shared.tile_stream import write_descriptor
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import (
    bar_arrive,
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from nbflash.cuda.ptx.tma import (
    bulk_add,
    bulk_commit,
    bulk_load,
    bulk_wait,
    bulk_wait_read,
    tma_load_4d,
)
from nbflash.cuda.tile.addresses import global_address
from nbflash.cuda.tile.finite import clear, make_not_finite
from nbflash.cuda.tile.ring import item_of, make_advance, make_ring, rounds_of
from nbflash.cuda.tile.tracing import equal, opaque, opaque_value, select, unrolled
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES
from nbflash.cuda.tile.wgmma.gradient import PART

WORK_WORDS = 4  # key tile, batch element, head of K and V, whether the column has masked tiles
DQ_EMPTY, DQ_FULL = 5, 7  # named barriers of each warpgroup's part of dQ
DQ_THREADS = 128 + 32  # the warpgroup and the warp that stores
CLEANER = 96  # first thread of warp 3


@unrolled
def rematerialised(place):
    """The same place, for addresses that are not to be kept in registers: they are few."""
    return tuple(opaque_value(x) for x in place)


@unrolled
def following(i):
    """``i + 1``, of a loop that the compiler is not to unroll: registers are few."""
    return opaque_value(i + 1)


def make_send_panels(panels):
    """``send(to, panel_bytes, tensor_map, row, head, batch, bar)``: a tile, panel by panel."""

    @inlined
    def send(to, panel_bytes, tensor_map, row, head, batch, bar):
        for panel in range(panels):
            tma_load_4d(to + panel * panel_bytes, tensor_map, panel * PANEL, row, head, batch, bar)

    return send


def make_send_keys(cfg):
    """``send_keys(to, tensor_map, n_block, head, batch, empty, full, phase)``: a tile of K or V.

    When the last one there is done with: ``phase`` of ``empty``.
    """
    TILE_N, KV_BYTES, KV_PANEL = cfg.tile_n, cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    send = make_send_panels(cfg.panels)

    @inlined
    def send_keys(to, tensor_map, n_block, head, batch, empty, full, phase):
        n0 = types.int32(n_block * TILE_N)
        mbarrier_wait(empty, phase)
        mbarrier_arrive_expect_tx(full, KV_BYTES)
        send(to, KV_PANEL, tensor_map, n0, head, batch, full)

    return send_keys


def make_load_keys(cfg):
    """``load_keys(place, maps, sizes, work)``, for one thread: K and V of every column, without dQ.

    Neither these nor the queries, which another thread feeds, hold up the other's stages.
    """
    layout, barriers = cfg.smem, cfg.barriers
    K, V = layout.k, layout.v
    FULL_K, EMPTY_K, FULL_V, EMPTY_V = (
        barriers.full_k,
        barriers.empty_k,
        barriers.full_v,
        barriers.empty_v,
    )
    KV_BYTES = cfg.kv_bytes
    send_keys, advance = make_send_keys(cfg), make_advance(cfg.k_stages)

    @inlined
    def load_keys(place, maps, sizes, work):
        k_map, v_map = maps
        live, zero, one = sizes[-1], types.int32(0), types.int32(1)
        stage, phase, v_phase = zero, one, one
        blocks, block = types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)
        for round_ in range(rounds_of(live, blocks)):
            item = types.int32(item_of(round_, blocks, block))
            if item < live:
                base, _ = rematerialised(place)
                at = WORK_WORDS * item
                n_block, b, h_kv = work[at], work[at + 1], work[at + 2]
                to, empty = base + K + stage * KV_BYTES, base + EMPTY_K + 8 * stage
                bar = base + FULL_K + 8 * stage
                send_keys(to, k_map, n_block, h_kv, b, empty, bar, phase)
                empty, bar = base + EMPTY_V, base + FULL_V
                send_keys(base + V, v_map, n_block, h_kv, b, empty, bar, v_phase)
                stage, phase = advance(stage, phase)
                v_phase = types.int32(v_phase ^ 1)

    return load_keys


def make_load_stream(cfg):
    """``load_stream(smem, place, maps, tables, sizes, schedule)``, for one thread."""
    Q_BYTES, KV_BYTES = cfg.q_bytes, cfg.kv_bytes
    STAT_BYTES, MASK_BYTES, BIT_BYTES = cfg.stat_bytes, cfg.mask_bytes, cfg.bit_bytes
    STATS_WORDS, BITS_WORDS = STAT_BYTES // 4, BIT_BYTES // 4
    TILE_BYTES = (1 if cfg.with_dq else 2) * Q_BYTES + STAT_BYTES
    TILE_M, Q_PANEL = cfg.tile_m, cfg.tile_m * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DO = layout.k, layout.v, layout.do
    STATS, MASKS, DESCRIPTORS = layout.statistics, layout.masks, layout.descriptors
    FULL_Q, FULL_DO, EMPTY_Q = barriers.full_q, barriers.full_do, barriers.empty_q
    FULL_K, EMPTY_K, FULL_V = barriers.full_k, barriers.empty_k, barriers.full_v
    EMPTY_V, RAW, RAW_K = barriers.empty_v, barriers.raw, barriers.raw_k
    WITH_DQ, FULL_TILES = cfg.with_dq, cfg.full_tiles
    ARRIVED_K = FULL_K if FULL_TILES else RAW_K
    (stage_of, phase_of), (k_stage_of, k_phase_of) = make_ring(cfg.stages), make_ring(cfg.k_stages)
    (_, v_phase_of), send_keys = make_ring(1), make_send_keys(cfg)
    send = make_send_panels(cfg.panels)
    write_place = make_write_place(cfg)

    @unrolled
    def full_of(bar, kind, raw):
        """The barrier that the bytes of a tile are told to."""
        return bar if FULL_TILES else select(equal(kind, FULL), bar, bar + raw)

    @inlined
    def load_mask(base, stage, kind, query_tile, tables, bar):
        """The bounds or the bits of a masked tile."""
        _, bounds, bits = tables
        to = base + MASKS + stage * MASK_BYTES
        if kind == INTERVAL:
            mbarrier_arrive_expect_tx(bar, TILE_BYTES + STAT_BYTES)
            source = global_address(bounds, types.int64(query_tile) * STATS_WORDS)
            bulk_load(to, source, STAT_BYTES, bar)
        else:
            mbarrier_arrive_expect_tx(bar, TILE_BYTES + BIT_BYTES)
            source = global_address(bits, types.int64(kind - BITS) * BITS_WORDS)
            bulk_load(to, source, BIT_BYTES, bar)

    @inlined
    def load_stream(smem, place, maps, tables, sizes, schedule):
        q_map, k_map, v_map, do_map = maps
        stats, _, _ = tables
        heads, heads_kv, group, n_row, n_col, live = sizes
        work, plane_of, row_ptr, col_idx, kinds = schedule
        one = types.int32(1)
        tile, column, round_ = types.int64(0), types.int32(0), types.int32(0)
        # Block and grid anew in each round, here and in `clean_stream`: held through a column they
        # cost 44 bytes more of spills (d=128).
        while types.int32(round_ * opaque(types.int32(cuda.gridDim.x))) < live:
            blocks = opaque(types.int32(cuda.gridDim.x))
            block = opaque(types.int32(cuda.blockIdx.x))
            item = types.int32(item_of(round_, blocks, block))
            round_ += types.int32(1)
            if item < live:
                n_block, b = work[WORK_WORDS * item], work[WORK_WORDS * item + 1]
                h_kv, sign = work[WORK_WORDS * item + 2], types.int32(-one)
                for h in range(types.int32(h_kv * group), types.int32((h_kv + 1) * group)):
                    bh = types.int32(b * heads + h)
                    plane = plane_of[bh]
                    at = types.int32(plane * n_row + n_block)
                    for t in range(row_ptr[at], row_ptr[at + 1]):
                        base, words = rematerialised(place)
                        m_block, kind, stage = col_idx[t], kinds[t], stage_of(tile)
                        slot = types.int32(bh * n_col + m_block)
                        mbarrier_wait(base + EMPTY_Q + 8 * stage, phase_of(tile) ^ 1)
                        descriptor = types.int32(
                            words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage
                        )
                        bh_kv = types.int32(b * heads_kv + h_kv)
                        write_descriptor(
                            smem, descriptor, types.int32(sign * kind), n_block, bh_kv, slot
                        )
                        write_place(smem, words, stage, b, h, m_block, n_block)
                        bar = full_of(base + FULL_Q + 8 * stage, kind, RAW - FULL_Q)
                        if FULL_TILES or kind == FULL:
                            mbarrier_arrive_expect_tx(bar, TILE_BYTES)
                        else:
                            load_mask(base, stage, kind, plane * n_col + m_block, tables, bar)
                        source = global_address(stats, types.int64(slot) * STATS_WORDS)
                        bulk_load(base + STATS + stage * STAT_BYTES, source, STAT_BYTES, bar)
                        m0 = types.int32(m_block * TILE_M)
                        send(base + stage * Q_BYTES, Q_PANEL, q_map, m0, h, b, bar)
                        if WITH_DQ:
                            bar = full_of(base + FULL_DO + 8 * stage, kind, RAW - FULL_DO)
                            mbarrier_arrive_expect_tx(bar, Q_BYTES)
                        send(base + DO + stage * Q_BYTES, Q_PANEL, do_map, m0, h, b, bar)
                        if WITH_DQ and sign < 0:
                            k_stage = k_stage_of(column)
                            to, bar = base + K + k_stage * KV_BYTES, base + ARRIVED_K + 8 * k_stage
                            empty, phase = base + EMPTY_K + 8 * k_stage, k_phase_of(column) ^ 1
                            send_keys(to, k_map, n_block, h_kv, b, empty, bar, phase)
                            bar, phase = base + FULL_V, v_phase_of(column) ^ 1
                            empty = base + EMPTY_V
                            send_keys(base + V, v_map, n_block, h_kv, b, empty, bar, phase)
                            column += one
                        sign = one
                        tile += one
        base, words = place
        stage = stage_of(tile)
        mbarrier_wait(base + EMPTY_Q + 8 * stage, phase_of(tile) ^ 1)
        write_descriptor(
            smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage, END, 0, 0, 0
        )
        mbarrier_arrive(base + FULL_Q + 8 * stage)

    return load_stream


def make_store_stream(cfg):
    """``store_stream(smem, place, dq, tid)``: parts of dQ to their sum, for warps 1 and 2."""
    DQ, SLOTS = cfg.smem.leaving, cfg.smem.slots
    PART_BYTES, CONSUMERS = 4 * PART, cfg.consumers

    @inlined
    def store_stream(smem, place, dq, tid):
        base, words = place
        warp, lane = types.int32((tid >> 5) - 1), types.int32(tid & 31)
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
    layout, barriers = cfg.smem, cfg.barriers
    K, DO, STATS, BAD = layout.k, layout.do, layout.statistics, layout.bad_keys
    FULL_Q, FULL_DO, FULL_K = barriers.full_q, barriers.full_do, barriers.full_k
    RAW, RAW_K = barriers.raw, barriers.raw_k
    WORDS, HUGE = -(-TILE_N // 32), types.float32(3e38)
    not_finite = make_not_finite(cfg.dtype)
    (stage_of, _), (k_stage_of, k_phase_of) = make_ring(STAGES), make_ring(cfg.k_stages)
    WITH_DQ = cfg.with_dq

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
        heads, _, group, n_row, _, live = sizes
        work, plane_of, row_ptr, _, kinds = schedule
        tile, column, phases = types.int64(0), types.int64(0), types.int64(0)
        round_ = types.int64(0)
        while types.int32(round_ * opaque(types.int32(cuda.gridDim.x))) < live:
            blocks = opaque(types.int32(cuda.gridDim.x))
            block = opaque(types.int32(cuda.blockIdx.x))
            item = types.int32(item_of(round_, blocks, block))
            round_ += types.int32(1)
            if item < live:
                base, words = rematerialised(place)
                at = types.int32(WORK_WORDS * item)
                if WITH_DQ:
                    k_stage = k_stage_of(column)
                    mbarrier_wait(base + RAW_K + 8 * k_stage, k_phase_of(column))
                    clean_keys(smem, words, k_stage, work[at + 3], lane)
                    if lane == 0:
                        mbarrier_arrive(base + FULL_K + 8 * k_stage)
                    column += types.int32(1)
                n_block, first = work[at], types.int32(work[at + 1] * heads)
                first = types.int32(first + work[at + 2] * group)
                for bh in range(first, types.int32(first + group)):
                    at = types.int32(plane_of[bh] * n_row + n_block)
                    for t in range(row_ptr[at], row_ptr[at + 1]):
                        if kinds[t] != FULL:
                            base, words = rematerialised(place)
                            stage = stage_of(tile)
                            mbarrier_wait(base + RAW + 8 * stage, phases >> stage & 1)
                            phases ^= types.int32(1) << stage
                            clean_queries(smem, stats, words, stage, lane)
                            if lane == 0:
                                mbarrier_arrive(base + FULL_Q + 8 * stage)
                                if WITH_DQ:
                                    mbarrier_arrive(base + FULL_DO + 8 * stage)
                        tile += types.int32(1)

    return clean_stream
