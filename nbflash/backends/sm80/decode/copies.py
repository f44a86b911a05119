"""Copies of keys and values of the portable decode kernel: see :mod:`.kernel`."""

from nbflash.backends.sm80.decode.config import KEYS
from nbflash.backends.split_kv.part import located
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.cp_async import cp_async_commit
from nbflash.cuda.tile.float_bits import ONES


def make_copies(cfg):
    """Device code of the copies that a warp sends.

    look_up(t, part, where, col_idx, lane)
        Of the keys that the warp has in tile t: how many there are; their page, and the first
        one's place in it; of a quantised cache the bits of a scale of each lane's: of K, from lane
        16 on of V.
    send(smem, word, first, to, caches, found, head, lane)
        K, V and the scales of what was found to the stage at address ``to``: a group of copies.
        Shared memory begins at word ``word``, at address ``first``.

    A warp's 16 keys of a tile are in one page, because pages are of a multiple of 16. Keys behind
    the length become zeros if there are others before them, and stay what they are if not.
    """
    TILE_N, MASKED, QUANTISED, copy = cfg.tile_n, cfg.masked, cfg.quantised, cfg.copy.send
    NONE, V, SCALES = types.int32(0), cfg.kv_bytes, cfg.kv_bytes // 2

    @inlined
    def scale_of(valid, page, inside, scales, head, lane):
        """1 behind the length."""
        (k_scale, k_stride), (v_scale, v_stride) = scales
        found, key = types.int32(ONES), lane & (KEYS - 1)
        if key < valid:
            at = inside + key
            if lane < KEYS:
                found = k_scale[page * k_stride[0] + at * k_stride[1] + head * k_stride[2]]
            else:
                found = v_scale[page * v_stride[0] + at * v_stride[1] + head * v_stride[2]]
        return types.int32(found)

    @inlined
    def look_up(t, part, where, col_idx, lane):
        (length, first_key, end), (pages, scales, head) = part, where
        valid, page, inside, scale = NONE, NONE, NONE, NONE
        if t < end:
            tile = types.int32(col_idx[t] if MASKED else t)
            key = types.int32(tile * TILE_N + first_key)
            valid = types.int32(max(length - key, NONE))
            if valid > 0:
                page, inside = located(key, pages)
                if QUANTISED:
                    scale = scale_of(valid, page, inside, scales, head, lane)
        return valid, page, inside, scale

    @inlined
    def send(smem, word, first, to, caches, found, head, lane):
        (k, k_stride), (v, v_stride) = caches
        valid, page, inside, scale = found
        if valid > 0:  # copies of nothing would still write zeros, over what is joined at the end
            k_at = page * k_stride[0] + inside * k_stride[1] + head * k_stride[2]
            copy(to, k, k_at, k_stride[1], valid, lane)
            v_at = page * v_stride[0] + inside * v_stride[1] + head * v_stride[2]
            copy(types.int32(to + V), v, v_at, v_stride[1], valid, lane)
            if QUANTISED:
                smem[types.int32(word + (to - first) // 4 + SCALES + lane)] = scale
        cp_async_commit()

    return look_up, send
