"""What brings Q, K and V of the Hopper decode kernel: see :mod:`.kernel`."""

from masks import FULL
from nbflash.backends.sm90.decode.config import RAGGED, ROWS
from nbflash.backends.sm90.decode.scales import make_scales
from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS, END
from nbflash.backends.sm90.shared.tile_stream import write_descriptor
from nbflash.backends.split_kv.combine_in_block import COMPUTING
from nbflash.backends.split_kv.part import located, make_tiles_of_part
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import (
    bar_sync,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from nbflash.cuda.ptx.tma import evict_first, tma_load_4d_once
from nbflash.cuda.tile.ring import divmod_int32, make_advance
from nbflash.cuda.tile.tracing import load4, opaque, store4, unrolled
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES


def make_load(cfg):
    """``load_part(smem, place, maps, part, pages, scales, schedule, lane)``, for the last warp.

    What a tile needs of global memory is looked up while the copies of the tile before are under
    way: by lane i the page of box i, and the scales of keys i, i + 32, ….
    """
    TILE_N, BOX, PANELS, STAGES = cfg.tile_n, cfg.box, cfg.stored_panels, cfg.stages
    KV_BYTES, KV_PANEL, MASKED = cfg.stored_bytes, TILE_N * ROW_BYTES, cfg.masked
    layout = cfg.smem
    K, V, SCALES, DESCRIPTORS = layout.k, layout.v, layout.scales, layout.descriptors
    QUANTISED, SCALE_WORDS = cfg.quantised, cfg.scale_words
    fetch_scales, put_scales, unit_of = make_scales(cfg)
    FULL_K, FULL_V, EMPTY = cfg.barriers.full_k, cfg.barriers.full_v, cfg.barriers.empty
    BOX_BYTES = PANELS * BOX * ROW_BYTES
    advance, tiles_of_part = make_advance(STAGES), make_tiles_of_part(cfg)

    @inlined
    def look_up(t, end, length, pages, schedule, lane):
        """First key and kind of a tile, how many boxes it has, and where this lane's is."""
        n0, kind, boxes = types.int32(length), types.int32(FULL), types.int32(0)
        page = inside = types.int32(0)
        if t < end:
            n0 = types.int32(t * TILE_N)
            if MASKED:
                n0, kind = types.int32(schedule[1][t] * TILE_N), types.int32(schedule[2][t])
            boxes = types.int32((min(length - n0, TILE_N) + BOX - 1) // BOX)
            if lane < boxes:
                page, inside = located(types.int32(n0 + lane * BOX), pages)
        return n0, kind, boxes, page, inside

    @inlined
    def send(to, tensor_map, page, inside, head, lane, bar, once):
        """This lane's box of a tile."""
        for panel in range(PANELS):
            at = to + panel * KV_PANEL + lane * BOX * ROW_BYTES
            tma_load_4d_once(at, tensor_map, panel * PANEL, inside, head, page, bar, once)

    @inlined
    def load_part(smem, place, maps, part, pages, scales, schedule, lane):
        (base, words), (k_map, v_map) = place, maps
        length, seen_by_all, split, splits, plane, head = part
        stage, phase = types.int32(0), types.int32(1)
        once, row_ptr, col_idx = evict_first(), schedule[0], schedule[1]
        first, end = tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane)
        n0, kind, boxes, page, inside = look_up(first, end, length, pages, schedule, lane)
        held = fetch_scales(n0, length, head, pages, scales, lane)
        for t in range(first, end):
            if n0 + TILE_N > seen_by_all:
                kind += RAGGED
            mbarrier_wait(base + EMPTY + 8 * stage, phase)
            full_k, full_v = base + FULL_K + 8 * stage, base + FULL_V + 8 * stage
            if lane == 0:
                write_descriptor(
                    smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, kind, n0, 0, 0
                )
                mbarrier_arrive_expect_tx(full_k, boxes * BOX_BYTES)
                mbarrier_arrive_expect_tx(full_v, boxes * BOX_BYTES)
            if lane < boxes:
                send(base + K + stage * KV_BYTES, k_map, page, inside, head, lane, full_k, once)
                send(base + V + stage * KV_BYTES, v_map, page, inside, head, lane, full_v, once)
            at, unit = words + SCALES // 4 + SCALE_WORDS * stage, types.int32(0)
            if QUANTISED:
                put_scales(smem, at + lane, held)
                unit = unit_of(held)
            cuda.syncwarp()  # no lane may be a round of the stages behind, and the scales are there
            if QUANTISED and lane == 0:
                smem[at + 2 * TILE_N] = unit
                mbarrier_arrive(full_v)
            more = types.int32(t + 1)
            n0, kind, boxes, page, inside = look_up(more, end, length, pages, schedule, lane)
            held = fetch_scales(n0, length, head, pages, scales, lane)
            stage, phase = advance(stage, phase)
        if lane == 0:
            mbarrier_wait(base + EMPTY + 8 * stage, phase)
            write_descriptor(
                smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, END, 0, 0, 0
            )
            mbarrier_arrive(base + FULL_K + 8 * stage)

    return load_part


def make_load_q(cfg):
    """``load_q(smem, words, q, q_stride, rows, thread)``: the row tile's Q; behind it zeros."""
    CHUNKS, USED = 8 * cfg.panels, cfg.head_dim // 8

    @unrolled
    def copy(smem, to, q, at):
        store4(smem, to, load4(q, at))

    @unrolled
    def clear(smem, to, zero):
        store4(smem, to, (zero,) * 4)

    @inlined
    def load_q(smem, words, q, q_stride, rows, thread):
        first, count, pack, start = rows
        chunks = opaque(types.int32(ROWS * CHUNKS))  # a loop: registers are few
        for i in range(thread, chunks, 128):
            r, chunk = i // CHUNKS, i % CHUNKS
            to = words + chunk // 8 * (ROWS * 32) + r * 32 + ((chunk % 8) ^ (r % 8)) * 4
            if first + r < count and chunk < USED:
                token, head = divmod_int32(types.int32(first + r), pack)
                at = (start + token * q_stride[1] + head * q_stride[2]) // 2 + 4 * chunk
                copy(smem, types.int32(to), q, at)
            else:
                clear(smem, types.int32(to), types.int32(0))
        fence_proxy_async()
        bar_sync(COMPUTING, 128)

    return load_q
