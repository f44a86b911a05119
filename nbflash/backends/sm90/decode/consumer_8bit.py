"""8-bit quantised caches in the Hopper decode kernel: see :mod:`.kernel`.

A tile of K and V arrives as it is stored, with a scale for each key: the loading warp's lanes fetch
them while TMA works. Every warp computes for itself, with 16 rows of Q, the keys of a
tile that are its own, and waits for no other warp (:mod:`nbflash.cuda.tile.mma.quantised_gemm`); at
the end of the part the results of the four are merged.

    S = Q Kᵀ ∘ scale of K           O += (P ∘ scale of V / unit) V

All operands are float16, whatever Q and O are: K and V without a rounding, Q with next to none. The
unit, a power of two, brings the products to where float16 has room for those far below a row's
largest. Every row has its own. It goes by the largest exponent up to here: of the scales of V in
FULL tiles, and in others of the products themselves, so that a key which a row does not see,
whatever its scale, takes nothing from that row. What has been added up in a smaller unit shrinks; O
is multiplied by it last.
"""

from masks import FULL
from nbflash.backends.sm90.decode.config import RAGGED, WARPS
from nbflash.backends.sm90.decode.config import ROWS_8BIT as ROWS
from nbflash.backends.sm90.shared.config import DESCRIPTOR_WORDS, END
from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.backends.split_kv.combine_in_block import COMPUTING
from nbflash.backends.split_kv.join_warps import (
    make_join_warps,
    make_stored_places,
    put_statistics,
)
from nbflash.backends.split_kv.part import make_rows
from nbflash.backends.split_kv.units import (
    LEAST_UNIT,
    changes,
    finite,
    in_own_units,
    in_units,
    out_of_units,
    scale_scores,
)
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.tile.finite import poisoned
from nbflash.cuda.tile.mma.quantised_gemm import (
    StoredLayout,
    make_stored_products,
    make_stored_q,
    make_stored_scores,
)
from nbflash.cuda.tile.ring import divmod_int32, make_advance, read_descriptor
from nbflash.cuda.tile.tracing import (
    load2,
    opaque,
    store4,
    unrolled,
)
from nbflash.cuda.tile.wgmma.softmax import (
    make_apply_keep,
    make_wgmma_softmax,
    row_total,
    scale_fragment,
)


def make_stored_compute(cfg):
    """``compute(smem, place, inverses, rows, bits, scale, thread)``: O, m, l of a warp's keys."""
    TILE_N, KV_BYTES, SCALE_WORDS = cfg.tile_n, cfg.stored_bytes, cfg.scale_words
    layout, barriers = cfg.smem, cfg.barriers
    K, V, SCALES, DESCRIPTORS = layout.k, layout.v, layout.scales, layout.descriptors
    FULL_K, FULL_V, EMPTY = barriers.full_k, barriers.full_v, barriers.empty
    O_START = (types.float32(0),) * (StoredLayout(cfg).width // 2)
    PAIR, UNITS = (types.float32(0),) * 2, (types.int32(LEAST_UNIT),) * 2
    KEYS, scores = StoredLayout(cfg).keys, make_stored_scores(cfg)
    add_products, add_finite = make_stored_products(cfg)
    careful = make_online_softmax(KEYS, "float16", most=0).careful
    pack = make_wgmma_softmax(KEYS, "float16").pack
    apply_keep, advance = make_apply_keep(KEYS, 0), make_advance(cfg.stages)
    (_, keep_of), ALL, MASKED = make_rows(cfg), (1 << KEYS // 4) - 1, cfg.masked

    @unrolled
    def load_scales(smem, at):
        """The bits of the scales of a lane's keys."""
        return tuple(x for i in range(0, KEYS, 8) for x in load2(smem, at + i))

    @inlined
    def keep_of_warp(kind, n0, seen, bits, c, first_key):
        """A bit for each of this lane's keys."""
        keep = keep_of(kind & (RAGGED - 1), n0, seen, bits, 2 * c)
        return types.uint32(keep >> (first_key // 4) & ALL)

    @inlined
    def compute(smem, place, inverses, rows, bits, scale, thread):
        base, words = place
        acc, m, l, unit = O_START, PAIR, PAIR, UNITS
        stage, phase = types.int32(0), types.int32(0)
        mbarrier_wait(base + FULL_K, 0)
        kind, n0, _, _ = read_descriptor(smem, words + DESCRIPTORS // 4)
        while kind != END:
            thread = opaque(thread)  # or what follows from it stays in registers
            first_key, lane = types.int32(thread // 32 * KEYS), types.int32(thread % 32)
            q, r, c = types.int32(words + 4 * lane), types.int32(lane // 4), types.int32(lane % 4)
            k, v_at = words + (K + stage * KV_BYTES) // 4, words + (V + stage * KV_BYTES) // 4
            scales = words + SCALES // 4 + SCALE_WORDS * stage
            own = scales + first_key + 2 * c
            # S = Q Kᵀ ∘ scale
            s = scores(smem, q, types.int32(k), types.int32(first_key + r), c)
            mbarrier_wait(base + FULL_V + 8 * stage, phase)
            s = scale_scores(s, load_scales(smem, types.int32(own)), inverses)
            upper, below, bad = types.uint32(0), types.uint32(0), types.int32(0)
            if kind != FULL:
                upper = keep_of_warp(kind, n0, rows[0], bits, c, first_key)
                below = keep_of_warp(kind, n0, rows[1], bits, c, first_key)
                s = apply_keep(s, (upper, below))
            # P = 2^(S · scale − m)
            weights, m, l, sums, _, alpha = careful(s, m, l, scale)
            l = l[0] + sums[0], l[1] + sums[1]
            # P ∘ scale of V / unit
            v_scales = load_scales(smem, types.int32(own + TILE_N))
            if kind == FULL:
                new = smem[scales + 2 * TILE_N]
                if not MASKED:  # no other tile has come before: all rows have the same
                    unit = unit[0], unit[0]
                weights, alpha, unit = in_units(weights, alpha, v_scales, unit, new)
            else:
                v_scales, bad = finite(v_scales)
                weights, alpha, unit = in_own_units(weights, alpha, v_scales, unit)
            # O = α O + P V
            if changes(alpha):
                acc = scale_fragment(acc, alpha)
            p, v, key = pack(weights), types.int32(v_at), types.int32(first_key + 2 * c)
            if kind == FULL:
                acc = add_products(acc, p, smem, v, key, r)
            else:
                acc, bad = add_finite(acc, p, smem, v, key, r, bad)
                l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
            stage, phase = advance(stage, phase)
            mbarrier_wait(base + FULL_K + 8 * stage, phase)
            kind, n0, _, _ = read_descriptor(
                smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage
            )
        return out_of_units(acc, unit), m, l

    return compute


def make_join_results(cfg):
    """``put(smem, words, acc, m, l, thread)``, ``merged(smem, words, row, column)``: O of four
    columns and LSE.

    All warps' O are where the stages have been, their m and l where the scales have been.
    """
    K, SCALES, WIDTH = cfg.smem.k, cfg.smem.scales, StoredLayout(cfg).width
    OF_WARP, STATISTICS = ROWS * WIDTH, 2 * ROWS
    (put_o, place_of), join = make_stored_places(cfg), make_join_warps(WARPS, OF_WARP, STATISTICS)

    @inlined
    def put(smem, words, acc, m, l, thread):
        warp, r, c = thread // 32, types.int32(thread % 32 // 4), types.int32(thread % 4)
        l = row_total(l)
        bar_sync(COMPUTING, 32 * WARPS)  # all are through with the stages
        put_o(smem, types.int32(words + K // 4 + warp * OF_WARP), acc, r, c)
        if c == 0:
            put_statistics(smem, types.int32(words + SCALES // 4 + warp * STATISTICS + 2 * r), m, l)
        bar_sync(COMPUTING, 32 * WARPS)

    @inlined
    def merged(smem, words, row, column):
        at = types.int32(words + K // 4 + place_of(row, column))
        return join(smem, at, types.int32(words + SCALES // 4 + 2 * row))

    return put, merged


def make_stored_part(cfg):
    """``run(smem, place, q, q_stride, rows, where, seen, bits, scale, parts, thread)``.

    What the computing warps do with a row tile: O and LSE of the part of its keys.
    """
    HEAD_DIM, QUADS, (load_q_row, put_q) = cfg.head_dim, cfg.head_dim // 4, make_stored_q(cfg)
    compute, (put, merged) = make_stored_compute(cfg), make_join_results(cfg)
    row_at, _ = make_rows(cfg)
    store_o = unrolled(store4)

    @inlined
    def row_of_q(q, q_stride, rows, row, thread):
        first, count, pack, start = rows
        token, head = divmod_int32(types.int32(min(first + row, count - 1)), pack)
        at = (start + token * q_stride[1] + head * q_stride[2]) // 2
        return load_q_row(q, at, types.int32(thread % 4))

    @inlined
    def run(smem, place, q, q_stride, rows, where, seen, bits, scale, parts, thread):
        first, count, _, _ = rows
        plane, length, lo, hi = seen
        r = thread % 32 // 4
        upper_q, upper_inverse = row_of_q(q, q_stride, rows, r, thread)
        below_q, below_inverse = row_of_q(q, q_stride, rows, r + 8, thread)
        if thread < 32:
            put_q(smem, types.int32(place[1] + 4 * thread), upper_q, below_q)
        bar_sync(COMPUTING, 32 * WARPS)
        inverses = upper_inverse, below_inverse
        upper, _ = row_at(types.int32(first + r), where, plane, length, lo, hi)
        below, _ = row_at(types.int32(first + r + 8), where, plane, length, lo, hi)
        acc, m, l = compute(smem, place, inverses, (upper, below), bits, scale, thread)
        put(smem, place[1], acc, m, l, thread)
        part_o, part_lse = parts
        quads = opaque(types.int32(min(count - first, ROWS) * QUADS))
        for i in range(thread, quads, 32 * WARPS):
            row, column = i // QUADS, i % QUADS * 4
            found = merged(smem, place[1], row, column)
            _, (o_at, lse_at) = row_at(types.int32(first + row), where, plane, length, lo, hi)
            store_o(part_o, o_at * HEAD_DIM + column, found[:4])
            if column == 0:
                part_lse[lse_at] = found[4]

    return run
