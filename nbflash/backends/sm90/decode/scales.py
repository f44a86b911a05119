"""Scales, as the loading warp of the Hopper decode kernel finds them."""

from nbflash.backends.split_kv.part import located
from nbflash.backends.split_kv.units import unit_above
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.float_bits import EXPONENT, ONES
from nbflash.cuda.tile.tracing import maximum, store, unrolled
from nbflash.cuda.tile.warp_reduce import across_lanes


def make_scales(cfg):
    """What the loading warp does with scales; nothing for 16 bits.

    fetch(n0, length, head, pages, scales, lane)    a lane's, of a tile: the bits of K's and V's,
                                                    of each of its keys; 1 behind the last
    put(smem, at, held)                             at the lane's place
    unit_of(held)                                   the unit of V's, where all of a tile is seen
    """
    TILE_N = cfg.tile_n

    @inlined
    def scales_of(key, length, head, pages, scales):
        k_scale, k_stride, v_scale, v_stride = scales
        k = v = types.int32(ONES)
        if key < length:
            page, inside = located(key, pages)
            k = k_scale[page * k_stride[0] + inside * k_stride[1] + head * k_stride[2]]
            v = v_scale[page * v_stride[0] + inside * v_stride[1] + head * v_stride[2]]
        return k, v

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

    @unrolled
    def unit_of(held):
        largest = held[0][1] * 0
        for x in (v & EXPONENT for _, v in held):
            largest = maximum(largest, x)
        (largest,) = across_lanes((largest,), 32, maximum)
        return unit_above(largest)

    return of_64_keys if cfg.quantised else of_no_keys, put, unit_of
