"""What the loading warpgroup of the pass for dQ does: see :mod:`.dq_kernel`.

Warp 0, one thread, feeds K and V, and warp 1, one thread, feeds Q and dO: neither waits for the
other's stages. Warps 2 and 3 write the rows that attend nothing, and then look at K of every masked
tile before the consumers do: dS is 0 where a score is hidden, but 0 · NaN would reach dQ.
"""

from masks import FULL
from nbflash.backends.sm90.backward.dq_config import LAST, ROWS
from nbflash.backends.sm90.backward.producer import rematerialised
from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS, END
from nbflash.backends.sm90.shared.tile_stream import make_send, tiles_of_round, write_descriptor
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from nbflash.cuda.tile.ring import divmod_int32, item_of, make_advance, rounds_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES

LOOKERS = 64  # threads of warps 2 and 3


def make_load_keys(cfg):
    """``load_keys(smem, place, maps, sizes, schedule)``, for one thread: K, V, tile descriptors."""
    TILE_N, KV_BYTES, KV_PANEL = cfg.tile_n, cfg.kv_bytes, cfg.tile_n * ROW_BYTES
    layout, barriers = cfg.smem, cfg.barriers
    K, V, DESCRIPTORS = layout.k, layout.v, layout.descriptors
    FULL_K, EMPTY_K, FULL_V = barriers.full_k, barriers.empty_k, barriers.full_v
    EMPTY_V, RAW_K = barriers.empty_v, barriers.raw_k
    FULL_TILES = cfg.full_tiles
    send, advance, advance_v = (
        make_send(cfg),
        make_advance(cfg.k_stages),
        make_advance(cfg.v_stages),
    )

    @inlined
    def load_keys(smem, place, maps, sizes, schedule):
        k_map, v_map = maps
        heads, group, _, live = sizes
        _, _, _, col_idx, kind = schedule
        zero, one = types.int32(0), types.int32(1)
        stage, phase, v_stage, v_phase = zero, one, zero, one
        for round_ in range(rounds_of(live, types.int32(cuda.gridDim.x))):
            row, bh, begin, end = tiles_of_round(types.int32(round_), sizes, schedule)
            if begin < end:
                b, h = divmod_int32(types.int32(bh), heads)
                h_kv, _ = divmod_int32(h, group)
                for t in range(begin, end):
                    base, words = rematerialised(place)
                    n0 = types.int32(col_idx[t] * TILE_N)
                    mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
                    descriptor = words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage
                    last = LAST if t + 1 == end else 0
                    write_descriptor(smem, descriptor, kind[t] + last, n0, row, bh)
                    full = FULL_TILES or kind[t] == FULL
                    bar = base + (FULL_K if full else RAW_K) + 8 * stage
                    send(base + K + stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar, KV_BYTES)
                    mbarrier_wait(base + EMPTY_V + 8 * v_stage, v_phase)
                    to, bar = base + V + v_stage * KV_BYTES, base + FULL_V + 8 * v_stage
                    send(to, KV_PANEL, v_map, n0, h_kv, b, bar, KV_BYTES)
                    stage, phase = advance(stage, phase)
                    v_stage, v_phase = advance_v(v_stage, v_phase)
        base, words = place
        mbarrier_wait(base + EMPTY_K + 8 * stage, phase)
        write_descriptor(smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, END, 0, 0, 0)
        mbarrier_arrive(base + FULL_K + 8 * stage)

    return load_keys


def make_load_rows(cfg):
    """``load_rows(place, maps, sizes, work)``, for one thread: Q and dO of every warpgroup."""
    TILE_M, PART_BYTES, PANEL_BYTES = cfg.tile_m, cfg.part_bytes, ROWS * ROW_BYTES
    CONSUMERS, Q_STAGES, DO_STAGES = cfg.consumers, cfg.q_stages, cfg.do_stages
    layout, barriers = cfg.smem, cfg.barriers
    DO = layout.do
    FULL_Q, EMPTY_Q, FULL_DO, EMPTY_DO = (
        barriers.full_q,
        barriers.empty_q,
        barriers.full_do,
        barriers.empty_do,
    )
    send, advance_q, advance_do = make_send(cfg), make_advance(Q_STAGES), make_advance(DO_STAGES)

    @inlined
    def send_parts(to, tensor_map, row, h, b, full, empty, stage, stages, phase):
        """The parts of a row tile, each as soon as its warpgroup has done with the last one."""
        for warpgroup in range(CONSUMERS):
            part = warpgroup * stages + stage
            mbarrier_wait(empty + 8 * part, phase)
            q0 = types.int32(row * TILE_M + warpgroup * ROWS)
            bar = full + 8 * part
            send(to + part * PART_BYTES, PANEL_BYTES, tensor_map, q0, h, b, bar, PART_BYTES)

    @inlined
    def load_rows(place, maps, sizes, work):
        q_map, do_map = maps
        heads, _, _, live = sizes
        zero, one = types.int32(0), types.int32(1)
        q, q_phase, do, do_phase = zero, one, zero, one
        blocks, block = types.int32(cuda.gridDim.x), types.int32(cuda.blockIdx.x)
        for round_ in range(rounds_of(live, blocks)):
            item = types.int32(item_of(round_, blocks, block))
            if item < live:
                base, _ = rematerialised(place)
                row, bh = work[2 * item], work[2 * item + 1]
                b, h = divmod_int32(types.int32(bh), heads)
                full, empty = base + FULL_Q, base + EMPTY_Q
                send_parts(base, q_map, row, h, b, full, empty, q, Q_STAGES, q_phase)
                full, empty = base + FULL_DO, base + EMPTY_DO
                send_parts(base + DO, do_map, row, h, b, full, empty, do, DO_STAGES, do_phase)
                q, q_phase = advance_q(q, q_phase)
                do, do_phase = advance_do(do, do_phase)

    return load_rows


def make_write_empty_rows(cfg):
    """``write_empty_rows(dq, stride, sizes, work, nq, items, thread)``, for warps 2 and 3.

    dQ = 0 for the row tiles that attend nothing: the end of the work list.
    """
    TILE_M, PAIRS = cfg.tile_m, cfg.head_dim // 2

    @inlined
    def write_empty_rows(dq, stride, sizes, work, nq, items, thread):
        heads, _, _, live = sizes
        zero = types.uint32(0)
        for item in range(live + cuda.blockIdx.x, items, cuda.gridDim.x):
            row, bh = work[2 * item], work[2 * item + 1]
            b, h = divmod_int32(types.int32(bh), heads)
            start = b * stride[0] + h * stride[2]
            for i in range(thread, min(TILE_M, nq - row * TILE_M) * PAIRS, LOOKERS):
                q, pair = divmod_int32(types.int32(i), types.int32(PAIRS))
                dq[(start + (row * TILE_M + q) * stride[1]) // 2 + pair] = zero

    return write_empty_rows
