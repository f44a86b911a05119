"""Caches of one byte in the Hopper decode kernel: see :mod:`.decode_sm90`.

A tile of K and V arrives as it is stored, with a scale for each key: the loading warp's lanes fetch
them while the copy engine works. What computes writes 16-bit tiles, which hold the same numbers.
The scales of K multiply S, and those of V multiply P before it is rounded:

    S ∘ scale of K           O += (P ∘ scale of V / unit) V

The unit, a power of two, keeps a product as large as P is: it is the largest exponent of the scales
of V up to here, and what has been added up in a smaller one shrinks. O is multiplied by it last.

    tile as stored    128 bytes a row of a panel, swizzled: 16 bytes are 16 columns
    tile              128 bytes a row of a panel, swizzled: 16 bytes are 8 columns
"""

from nbflash.ptx._asm import inlined, types
from nbflash.tile.dequantise import HALVES, bits_float, signed
from nbflash.tile.lanes import across_lanes
from nbflash.tile.pipeline import divided
from nbflash.tile.unroll import equal, load2, load4, select, store, store4, unrolled
from nbflash.tile.wgmma_softmax import column_of

ONES = 0x3F800000  # the bits of 1
EXPONENT = 0x7F800000  # of a float32; all ones where it is infinite or NaN
LEAST_UNIT, LARGEST_UNIT = 1 << 23, 253 << 23  # bits of 2^-126 and 2^126: both have an inverse
INVERSE = 254 << 23  # less the bits of a power of two: those of its inverse


def make_widen(cfg):
    """``widen(smem, source, target, thread)``: a stored tile as one of 16-bit elements.

    A thread has the same 16 columns of several keys, whose places are constants apart.
    """
    TILE_N, PANEL_WORDS = cfg.tile_n, cfg.tile_n * 32

    def make_widen_panel(panel):
        pieces = min(8, 4 * (cfg.panels - 2 * panel))  # of 16 columns, in a row
        keys = 128 // pieces  # of all threads

        @unrolled
        def widen_panel(smem, source, target, thread):
            key, piece = thread // pieces, thread % pieces
            row, swizzle, chunk = key * 32, key % 8, piece % 4 * 2
            stored = source + row + (piece ^ swizzle) * 4 + panel * PANEL_WORDS
            wide = target + row + (piece // 4 + 2 * panel) * PANEL_WORDS
            places = wide + (chunk ^ swizzle) * 4, wide + ((chunk + 1) ^ swizzle) * 4
            further = range(0, TILE_N * 32, keys * 32)
            found = [load4(smem, stored + i) for i in further]
            for i, words in zip(further, found, strict=True):
                halves = [signed(x) for word in words for x in HALVES[cfg.stored](cfg.dtype, word)]
                store4(smem, places[0] + i, halves[:4])
                store4(smem, places[1] + i, halves[4:])

        return widen_panel

    widen_first = make_widen_panel(0)
    if cfg.stored_panels == 1:
        return widen_first
    widen_second = make_widen_panel(1)

    @inlined
    def widen(smem, source, target, thread):
        widen_first(smem, source, target, thread)
        widen_second(smem, source, target, thread)

    return widen


def make_apply_scales(cfg):
    """What the computing threads do with scales: a thread has those of its own columns.

    load_scales(smem, at)                  the scales; ``at`` is the place of its first column's
    scale_scores(s, scales)                S ∘ scale
    without(scales, bad)                   1 for those of columns whose bit is set
    in_units(p, alpha, scales, unit, new)  P ∘ scale / unit, α with what is old in the unit, and
                                           the unit: the larger one of ``unit`` and ``new``
    out_of_units(acc, unit)                O
    """

    @unrolled
    def load_scales(smem, at):
        return tuple(bits_float(x) for n in range(0, cfg.tile_n, 8) for x in load2(smem, at + n))

    def of_element(scales, i):
        return scales[column_of(i) // 8 * 2 + column_of(i) % 8]

    @unrolled
    def scale_scores(s, scales):
        return tuple(x * of_element(scales, i) for i, x in enumerate(s))

    @unrolled
    def without(scales, bad):
        return tuple(select(equal(bad & (1 << i), 0), x, 1.0) for i, x in enumerate(scales))

    @unrolled
    def in_units(p, alpha, scales, unit, new):
        larger = select(unit < new, new, unit)
        inverse = bits_float(larger * -1 + INVERSE)
        scales = [x * inverse for x in scales]
        shrunk = bits_float(unit) * inverse
        p = tuple(x * of_element(scales, i) for i, x in enumerate(p))
        return p, tuple(x * shrunk for x in alpha), larger

    @unrolled
    def out_of_units(acc, unit):
        return tuple(x * bits_float(unit) for x in acc)

    return load_scales, scale_scores, without, in_units, out_of_units


@unrolled
def infinite(bits):
    """Whether the float32 of an int32 is infinite or NaN."""
    return equal(bits & EXPONENT, EXPONENT)


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
    """What the loading warp does with scales; nothing for 16 bits.

    fetch(n0, length, head, pages, scales, lane)    a lane's, of a tile: the bits of K's and V's,
                                                    of each of its keys; 1 behind the last key
    put(smem, at, held)                             at the lane's place
    unit_of(held)                                   the unit of the tile's, its bits
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

    def larger(a, b):
        return select(a < b, b, a)

    @unrolled
    def unit_of(held):
        exponents = [v & EXPONENT for _, v in held]
        unit = held[0][1] * 0 + LEAST_UNIT
        for x in exponents:
            unit = larger(unit, select(equal(x, EXPONENT), 0, x))
        (unit,) = across_lanes((unit,), 32, larger)
        return select(unit < LARGEST_UNIT, unit, LARGEST_UNIT)

    return {0: of_no_keys, 32: of_32_keys, 64: of_64_keys}[TILE_N * cfg.quantised], put, unit_of
