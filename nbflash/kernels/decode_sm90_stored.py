"""Caches of one byte in the Hopper decode kernel: see :mod:`.decode_sm90`.

A tile of K and V arrives as it is stored, with a scale for each key: the loading warp's lanes fetch
them while the copy engine works. What computes writes 16-bit tiles, of which the products are:

    K as it is, S ∘ scale: no rounding           V · scale, rounded like V of a 16-bit cache

    tile as stored    128 bytes a row of a panel, swizzled: 16 bytes are 16 columns
    tile              128 bytes a row of a panel, swizzled: 16 bytes are 8 columns
"""

from nbflash.ptx._asm import inlined, types
from nbflash.tile.dequantise import UNPACK, bits_float, signed
from nbflash.tile.pipeline import divided
from nbflash.tile.unroll import hide, load2, load4, store, store4, unrolled
from nbflash.tile.warp_math import pack_half

ONES = 0x3F800000  # the bits of 1


def make_widen(cfg):
    """``widen(smem, source, target, scales, thread)``: a stored tile as one of 16-bit elements.

    ``scales`` is the word of the keys' scales; of a negative one there are none.
    """
    TILE_N, PIECES = cfg.tile_n, cfg.head_dim // 16
    unpack = UNPACK.get(cfg.stored)

    @unrolled
    def widen_piece(smem, source, target, next_target, scale):
        """16 elements of one key."""
        factor = bits_float(scale)
        values = [x * factor for word in load4(smem, source) for x in unpack(word)]
        packed = [signed(pack_half(cfg.dtype, *values[i : i + 2])) for i in range(0, 16, 2)]
        store4(smem, target, packed[:4])
        store4(smem, next_target, packed[4:])

    @inlined
    def widen(smem, source, target, scales, thread):
        pieces = hide(types.int32(TILE_N * PIECES))  # a loop: registers are few
        for i in range(thread, pieces, 128):
            key, piece = i // PIECES, i % PIECES
            row, swizzle = key * 32, key % 8
            stored = source + piece // 8 * (TILE_N * 32) + row + ((piece % 8) ^ swizzle) * 4
            panel, chunk = target + piece // 4 * (TILE_N * 32) + row, piece % 4 * 2
            scale = types.int32(ONES)
            if scales >= 0:
                scale = smem[scales + key]
            widen_piece(
                smem,
                types.int32(stored),
                types.int32(panel + (chunk ^ swizzle) * 4),
                types.int32(panel + ((chunk + 1) ^ swizzle) * 4),
                scale,
            )

    return widen


def make_scale_scores(cfg):
    """``scale_scores(s, smem, at)``: S times the scales of its keys, whose first word is ``at``."""

    @unrolled
    def scale_scores(s, smem, at):
        """``at`` is that of this thread's first column."""
        out = []
        for j in range(cfg.tile_n // 8):
            scales = [bits_float(x) for x in load2(smem, at + 8 * j)]
            out += [s[4 * j + n] * scales[n % 2] for n in range(4)]
        return tuple(out)

    return scale_scores


@inlined
def located(key, pages):
    """The page of a key, and where it is in there."""
    table, first_page, page_size, sequence = pages
    page, inside = sequence, key
    if page_size > 0:
        nth, inside = divided(key, page_size)
        page = types.int32(table[first_page + nth])
    return page, inside


def make_scales(cfg):
    """``fetch(n0, length, head, pages, scales, lane)``: a lane's scales of a tile, K's and V's bits
    of each of its keys, and ``put(smem, at, held)``, lane ``at``; both nothing for 16 bits.

    Keys behind the last one have the scale 1.
    """
    TILE_N = cfg.tile_n

    @inlined
    def scales_of(key, length, head, pages, scales):
        (k_scale, k_stride, v_scale, v_stride), k, v = scales, types.int32(ONES), types.int32(ONES)
        if key < length:
            page, inside = located(key, pages)
            k = k_scale[page * k_stride[0] + inside * k_stride[1] + head * k_stride[2]]
            v = v_scale[page * v_stride[0] + inside * v_stride[1] + head * v_stride[2]]
        return k, v

    @inlined
    def of_32_keys(n0, length, head, pages, scales, lane):
        return (scales_of(types.int32(n0 + lane), length, head, pages, scales),)

    @inlined
    def of_64_keys(n0, length, head, pages, scales, lane):
        lower = scales_of(types.int32(n0 + lane), length, head, pages, scales)
        return lower, scales_of(types.int32(n0 + lane + 32), length, head, pages, scales)

    @inlined
    def of_no_keys(n0, length, head, pages, scales, lane):
        return ()

    @unrolled
    def put(smem, at, held):
        for i, (k, v) in enumerate(held):
            store(smem, at + 32 * i, k)
            store(smem, at + (TILE_N + 32 * i), v)

    return {0: of_no_keys, 32: of_32_keys, 64: of_64_keys}[TILE_N * cfg.quantised], put
