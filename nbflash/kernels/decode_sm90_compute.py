"""What the computing warpgroup of the Hopper decode kernel does: see :mod:`.decode_sm90`."""

from masks import BITS, FULL, INTERVAL
from nbflash.kernels.decode_sm90_config import RAGGED, ROWS
from nbflash.kernels.decode_sm90_load import COMPUTING
from nbflash.kernels.decode_sm90_stored import LEAST_UNIT, infinite, make_apply_scales, make_widen
from nbflash.kernels.sm90_config import BAD_WORDS, END, RECORD_WORDS
from nbflash.kernels.sm90_load import make_clean_key
from nbflash.kernels.sm90_row import poisoned
from nbflash.kernels.sm90_softmax import make_online_softmax
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbflash.tile.pipeline import divided, make_advance, read_record
from nbflash.tile.unroll import equal, hide, load, select, store, unrolled
from nbflash.tile.warp_math import approximate_reciprocal, lanes_of
from nbflash.tile.wgmma_gemm import ROW_BYTES, lower, make_gemm_pv, make_gemm_qk, settled
from nbflash.tile.wgmma_softmax import (
    make_apply_keep,
    make_finish,
    make_keep,
    make_wgmma_softmax,
    row_of,
    row_total,
    scale_fragment,
)


def make_rows(cfg):
    """``row_at, keep_of``: which token and head a row is, and what of a tile it sees.

    row_at(row, where, plane, length, lo, hi)    its token and bounds; where O and LSE belong
    keep_of(kind, n0, seen, bits, quad)            a bit for each key of this thread
    """
    MASKED = cfg.masked
    keep_interval, keep_bits, _ = make_keep(ROWS, cfg.tile_n)

    @inlined
    def row_at(row, where, plane, length, lo, hi):
        """Rows behind the last one repeat it; their places are −1."""
        first_head, part, pack, nq, heads = where
        token, nth = divided(min(row, nq * pack - 1), pack)
        if MASKED:
            i = plane * nq + token
            seen = token, types.int32(lo[i]), types.int32(hi[i]), length
        else:
            seen = token, types.int32(0), types.int32(0), types.int32(length - nq + token + 1)
        head = first_head + nth
        o_at = types.int64((part * nq + token) * heads + head)
        lse_at = types.int64((part * heads + head) * nq + token)
        if row >= nq * pack:
            o_at = lse_at = types.int64(-1)
        return seen, (o_at, lse_at)

    @inlined
    def keep_of(kind, n0, seen, bits, quad):
        token, low, high, end = seen
        keep = keep_interval(types.int32(0), end, n0, quad)
        if MASKED:
            if kind == INTERVAL:
                keep &= keep_interval(low, high, n0, quad)
            elif kind != FULL:
                keep &= keep_bits(bits, types.int32(kind - BITS), token, quad)
        return types.uint32(keep)

    return row_at, keep_of


def make_store_part(cfg):
    """``store_part(acc, m, l, part_o, part_lse, places, thread)``: O / l and LSE of two rows."""
    HEAD_DIM = cfg.head_dim
    _, log_sum_exp = make_finish(HEAD_DIM, cfg.dtype)

    @unrolled
    def normalised(acc, l):
        inverse = [select(equal(x, 0.0), 0.0, approximate_reciprocal(x)) for x in l]
        return tuple(x * inverse[row_of(i)] for i, x in enumerate(acc))

    def make_store_row(which):
        @unrolled
        def store_row(out, at, o):
            for j in range(HEAD_DIM // 8):
                for e in range(2):
                    store(out, at + (8 * j + e), o[4 * j + 2 * which + e])

        return store_row

    store_upper, store_below = make_store_row(0), make_store_row(1)

    @inlined
    def store_part(acc, m, l, part_o, part_lse, places, thread):
        (upper, upper_lse), (below, below_lse) = places
        l = row_total(l)
        values, o, column = log_sum_exp(m, l), normalised(acc, l), thread % 4 * 2
        if upper_lse >= 0:
            store_upper(part_o, upper * HEAD_DIM + column, o)
            if column == 0:
                part_lse[upper_lse] = values[0]
        if below_lse >= 0:
            store_below(part_o, below * HEAD_DIM + column, o)
            if column == 0:
                part_lse[below_lse] = values[1]

    return store_part


def make_compute(cfg):
    """``compute(smem, place, rows, bits, scale, thread)``: O, m and l of the part's tiles."""
    TILE_N, KV_BYTES, WORDS = cfg.tile_n, cfg.stored_bytes, -(-cfg.tile_n // 32)
    K, V, WIDE, SCALES, RECORDS, BAD, _ = cfg.offsets
    QUANTISED, SCALE_WORDS, WIDE_V = cfg.quantised, cfg.scale_words, WIDE + cfg.kv_bytes
    widen = make_widen(cfg) if QUANTISED else None
    load_scales, scale_scores, without, in_units, out_of_units = make_apply_scales(cfg)
    FULL_K, FULL_V, EMPTY = cfg.barriers
    O_START, PAIR = (types.float32(0),) * (cfg.head_dim // 2), (types.float32(0),) * 2
    S_START = (types.float32(0),) * (TILE_N // 2)
    issue_qk = make_gemm_qk(cfg.dtype, cfg.head_dim, ROWS, TILE_N, negate=cfg.negate)
    issue_pv, clean_key = make_gemm_pv(cfg.dtype, TILE_N), make_clean_key(cfg)
    _, _, careful, *_ = make_online_softmax(TILE_N, cfg.dtype)
    *_, pack = make_wgmma_softmax(TILE_N, cfg.dtype)
    _, _, gather = make_keep(ROWS, TILE_N)
    apply_keep, (_, keep_of) = make_apply_keep(TILE_N, 0), make_rows(cfg)
    advance, wait_all = make_advance(cfg.stages), wgmma_wait(0)

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(WORDS))

    @inlined
    def clean(smem, words, v, scales, stage, thread):
        """Keys whose V is not finite become zeros; which ones, as words of bits."""
        at = words + BAD // 4 + BAD_WORDS * stage
        if thread < TILE_N:
            bad = clean_key(smem, words + v // 4, thread)
            if QUANTISED:
                bad |= infinite(smem[scales + TILE_N + thread])
            found = lanes_of(bad)
            if thread % 32 == 0:
                smem[at + thread // 32] = found
        fence_proxy_async()
        bar_sync(COMPUTING, 128)
        return load_bad(smem, types.int32(at))

    @inlined
    def compute(smem, place, rows, bits, scale, thread):
        base, words = place
        acc, m, l = O_START, PAIR, PAIR
        stage, phase = types.int32(0), types.int32(0)
        quad, q = types.int32(thread % 4 * 2), types.uint32(lower(base, 16))
        unit = types.int32(LEAST_UNIT)
        mbarrier_wait(base + FULL_K, 0)
        kind, n0, _, _ = read_record(smem, words + RECORDS // 4)
        while kind != END:
            thread = hide(thread)  # or what follows from it stays in registers
            k, v = K + stage * KV_BYTES, V + stage * KV_BYTES
            scales = words + SCALES // 4 + SCALE_WORDS * stage
            if QUANTISED:
                widen(smem, types.int32(words + k // 4), types.int32(words + WIDE // 4), thread)
                fence_proxy_async()
                bar_sync(COMPUTING, 128)
                k = WIDE
            # S = Q Kᵀ
            wgmma_fence()
            s = issue_qk(S_START, q, types.uint32(lower(base + k, 16)))
            wgmma_commit()
            if QUANTISED:
                # beside S
                mbarrier_wait(base + FULL_V + 8 * stage, phase)
                widen(smem, types.int32(words + v // 4), types.int32(words + WIDE_V // 4), thread)
                k_scales = load_scales(smem, types.int32(scales + quad))
                v_scales = load_scales(smem, types.int32(scales + TILE_N + quad))
                new = smem[scales + 2 * TILE_N]
                fence_proxy_async()
                bar_sync(COMPUTING, 128)
                v = WIDE_V
            wait_all()
            s = settled(s)
            if QUANTISED:
                s = scale_scores(s, k_scales)
            else:
                mbarrier_wait(base + FULL_V + 8 * stage, phase)
            if kind != FULL:
                known = kind & (RAGGED - 1)
                upper = keep_of(known, n0, rows[0], bits, quad)
                below = keep_of(known, n0, rows[1], bits, quad)
                s = apply_keep(s, (upper, below))
                bad = types.uint32(gather(clean(smem, words, v, scales, stage, thread), quad))
                l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))
                if QUANTISED:
                    v_scales = without(v_scales, bad)
            if QUANTISED and thread == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
            # P = 2^(S · scale − m)
            weights, m, l, sums, _, alpha = careful(s, m, l, scale)
            l = l[0] + sums[0], l[1] + sums[1]
            if QUANTISED:
                weights, alpha, unit = in_units(weights, alpha, v_scales, unit, new)
            # O = α O + P V
            p, acc = pack(weights), scale_fragment(acc, alpha)
            wgmma_fence()
            acc = issue_pv(acc, p, types.uint32(lower(base + v, TILE_N * ROW_BYTES)))
            wgmma_commit()
            wait_all()
            acc = settled(acc)
            if not QUANTISED and thread == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
            stage, phase = advance(stage, phase)
            mbarrier_wait(base + FULL_K + 8 * stage, phase)
            kind, n0, _, _ = read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)
        if QUANTISED:
            acc = out_of_units(acc, unit)
        return acc, m, l

    return compute
