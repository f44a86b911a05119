"""Copies of the portable decode kernel: see :mod:`.kernel`."""

from nbflash.backends.sm80.decode.config import KEYS, ROWS
from nbflash.backends.split_kv.part import located
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.cp_async import cp_async16, cp_async_commit
from nbflash.cuda.tile.mma.layout import CHUNK
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import both, unrolled


def make_copies(cfg):
    """Device code of the copies that a decode block sends.

    send_q(to, q, q_stride, rows, thread)         the block's rows
    look_up(t, end, part, pages, col_idx)         of the keys that a warp has in tile t: how many
                                                  there are; their page, and the first one's place
                                                  in it
    send(to, caches, found, head, lane)           K and V of what was found: a group of copies

    A warp's 16 keys of a tile are in one page, because pages are of a multiple of 16. Keys behind
    the length become zeros if there are others before them, and stay what they are if not.
    """
    CHUNKS, TILE = cfg.tile.chunks, cfg.tile
    TILE_N, MASKED, USED = cfg.tile_n, cfg.masked, cfg.head_dim // CHUNK
    NONE, V, THREADS, copy = types.int32(0), KEYS * TILE.row_bytes, cfg.threads, cfg.copy.send

    @unrolled
    def send_chunk(to, q, at, row, chunk, valid):
        cp_async16(to + TILE.place(row, chunk), q, at, both(row < valid, chunk < USED))

    @inlined
    def send_q(to, q, q_stride, rows, thread):
        """Rows behind the last, and columns behind head_dim, become zeros."""
        first, count, pack, start = rows
        for i in range(thread, ROWS * CHUNKS, THREADS):
            r, chunk = types.int32(i // CHUNKS), types.int32(i % CHUNKS)
            token, head = divmod_int32(types.int32(first + r), pack)
            at = start + token * q_stride[1] + head * q_stride[2] + chunk * CHUNK
            send_chunk(to, q, at, r, chunk, types.int32(count - first))

    @inlined
    def look_up(t, end, part, pages, col_idx):
        length, own = part
        valid, page, inside = NONE, NONE, NONE
        if t < end:
            tile = types.int32(col_idx[t] if MASKED else t)
            key = types.int32(tile * TILE_N + own)
            valid = types.int32(max(length - key, NONE))
            if valid > 0:
                page, inside = located(key, pages)
        return valid, page, inside

    @inlined
    def send(to, caches, found, head, lane):
        (k, k_stride), (v, v_stride) = caches
        valid, page, inside = found
        if valid > 0:
            k_at = page * k_stride[0] + inside * k_stride[1] + head * k_stride[2]
            copy(to, k, k_at, k_stride[1], valid, lane)
            v_at = page * v_stride[0] + inside * v_stride[1] + head * v_stride[2]
            copy(types.int32(to + V), v, v_at, v_stride[1], valid, lane)
        cp_async_commit()

    return send_q, look_up, send
