"""What a block of the backward keeps and walks: where it lies, what comes next, its copies."""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.cp_async import cp_async16, cp_async_commit
from nbflash.cuda.tile.mma.layout import ALIGNMENT
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import opaque, unrolled


def make_places(cfg):
    """Where a lane's operands are: ``operands(start, thread)``, ``own(thread)``, ``words(start,
    thread)``.

    The first aligned address behind ``start``, the lane's in the kept tile by rows, and in the ring
    by columns and by rows; the lane's first row, of those that are kept, and column; the warp's
    first row and the words of it in both kept tiles.
    """
    TILE, ROWS = cfg.tile, 16 * cfg.m_tiles
    SECOND, RING = cfg.smem.second, cfg.smem.ring

    def aligned(start, thread):
        return thread * 0 + (start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT

    @unrolled
    def operands(start, thread):
        warp, lane, first = thread // 32, thread % 32, aligned(start, thread)
        kept = first + warp * (ROWS * TILE.row_bytes) + TILE.by_rows(lane)
        return first, kept, first + RING + TILE.by_columns(lane), first + RING + TILE.by_rows(lane)

    @unrolled
    def own(thread):
        return thread // 32 * ROWS + thread % 32 // 4, thread % 4 * 2

    @unrolled
    def words(start, thread):
        row = thread // 32 * ROWS
        at = (aligned(start, thread) - start) // 4 + row * (TILE.row_bytes // 4)
        return row, at, at + SECOND // 4

    return operands, own, words


def make_copies(cfg):
    """``send_kept(kept, b, h, row, valid, first, thread)``: both kept tiles, from a row on;
    ``send_tile(walked, numbers, there, b, h, group, start, valid, first, stage, thread)``: both
    tiles that begin at row ``start``, of a head that may have none more, and a group of copies.

    ``kept`` and ``walked`` are pairs of (array, its strides); ``numbers`` are shift, delta, heads
    and the rows of one in them.
    """
    COLUMNS, LENGTH = cfg.walk == "columns", cfg.length
    SECOND, RING, NUMBERS = cfg.smem.second, cfg.smem.ring, cfg.smem.numbers
    OTHER, STAGE_BYTES = LENGTH * cfg.tile.row_bytes, 2 * LENGTH * cfg.tile.row_bytes
    send_own, send_walked = cfg.copy(cfg.kept).send, cfg.copy(LENGTH).send

    @unrolled
    def send_chunk(to, source, at, n):
        cp_async16(to + n * 16, source, at + n * 4, n >= 0)

    @inlined
    def send_numbers(to, shift, delta, at, thread):
        """The first threads, 16 bytes each."""
        if thread < LENGTH // 4:
            send_chunk(to, shift, at, thread)
        elif thread < LENGTH // 2:
            n = types.int32(thread - LENGTH // 4)
            send_chunk(types.int32(to + 4 * LENGTH), delta, at, n)

    @inlined
    def place_of(strides, b, h, row):
        """Where a row of a head is; made anew, as what follows from the thread."""
        return opaque(b) * strides[0] + opaque(h) * strides[2] + row * strides[1]

    @inlined
    def send_tile(walked, numbers, there, b, h, group, start, valid, first, stage, thread):
        if there:
            (one, strides), (other, other_strides) = walked
            head = h
            if not COLUMNS:
                head, _ = divmod_int32(h, group)
            ring = types.int32(first + RING + stage * STAGE_BYTES)
            send_walked(ring, one, place_of(strides, b, head, start), strides[1], valid, thread)
            ring, at = types.int32(ring + OTHER), place_of(other_strides, b, head, start)
            send_walked(ring, other, at, other_strides[1], valid, thread)
            if COLUMNS:
                shift, delta, heads, padded = numbers
                to = types.int32(first + NUMBERS + stage * (8 * LENGTH))
                at = types.int64(opaque(b) * heads + h) * padded + start
                send_numbers(to, shift, delta, at, thread)
        cp_async_commit()

    @inlined
    def send_kept(kept, b, h, row, valid, first, thread):
        (one, strides), (other, other_strides) = kept
        send_own(first, one, place_of(strides, b, h, row), strides[1], valid, thread)
        second, at = types.int32(first + SECOND), place_of(other_strides, b, h, row)
        send_own(second, other, at, other_strides[1], valid, thread)

    return send_kept, send_tile


@inlined
def first_tile(h, last, b, heads, plane_of, row_ptr, n_row, tile):
    """The first of the heads from ``h`` on whose row is not empty, and where that is."""
    t, end = types.int32(0), types.int32(0)
    while h < last:
        at = plane_of[b * heads + h] * n_row + tile
        t, end = row_ptr[at], row_ptr[at + 1]
        if t < end:
            break
        h = types.int32(h + 1)
    return h, t, end


@inlined
def next_tile(h, t, end, last, b, heads, plane_of, row_ptr, n_row, tile):
    """The one behind: of the same head, or of a later one."""
    t = types.int32(t + 1)
    if t < end:
        return h, t, end
    h = types.int32(h + 1)
    return first_tile(h, last, b, heads, plane_of, row_ptr, n_row, tile)
