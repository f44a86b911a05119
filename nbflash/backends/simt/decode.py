"""Partial attention of decode without tensor cores: the first kernel of split-KV (FlashDecoding).

A block takes the query heads of a KV group (``pack`` of them) and some query tokens, rows
``r = token · pack + head``, and walks its share of the live tiles of their sequence:

    O = 0, m = −∞, l = 0
    for each tile of the share:
        S  = Q Kᵀ                                    (Q carries scale · log2 e)
        S  = score(S) · log2 e                       (Q carries scale), if there is a score
        S  = −∞ behind the length, or where mask, window or causal rule hide it
        m' = max(m, rowmax S);  α = 2^(m − m')
        P  = 2^(S − m');  l = α l + rowsum P
        O  = α O + P V;   m = m'
    O / l → part_o,  (m + log2 l) ln 2 → part_lse

Memory bounds it, so nothing passes through shared memory: keys and values go straight into
registers, and every group of lanes has an O, m and l of its own until the end.

    lane of a group      4 + 4 columns of every row of Q, K, V and O (cuda/tile/simt/paged_rows.py)
    slot                 a group of ``lanes`` lanes: keys slot + SLOTS u of the tile
    at the end           slots of a warp by shuffles, warps through shared memory

Pages are looked up a tile ahead. A contiguous cache is a page of its capacity for each sequence.
"""

import math

from masks import FULL
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.simt.mask import make_apply_mask
from nbflash.cuda.tile.simt.paged_rows import PAGED, make_load_queries, make_load_rows, make_locate
from nbflash.cuda.tile.simt.row_scores import make_scored
from nbflash.cuda.tile.simt.slots import make_join, make_mask_keys, make_products
from nbflash.cuda.tile.simt.softmax import make_scale_rows, make_softmax
from nbflash.cuda.tile.tracing import exp2, maximum, store, store4, unrolled
from nbflash.cuda.tile.warp_reduce import first_behind
from nbflash.definitions.constants import LN2, WARP


def make_decode_simt(cfg):
    """The kernel for a :class:`~.decode_configs.DecodeSimtConfig`.

    Arguments of the kernel: q, k, v, k_scale, v_scale, lengths, table, part_o, part_lse; strides
    of q (batch, token, head), of the four paged arrays (page, token, head each) and of the table's
    rows; batch, nq, heads, group = heads // heads_kv; splits; query tiles; page_size, capacity;
    what Q is multiplied with (scale · log2 e, or scale before a score); how many keys to the left
    and to the right of its own position a token sees; the schedule; the score's parameters.
    """
    ROWS, PACK, QUERIES, HEAD_DIM = cfg.rows, cfg.pack, cfg.queries, cfg.head_dim
    LANES, SLOTS, KEYS, TILE_N = cfg.lanes, cfg.slots, cfg.keys, cfg.tile_n
    WARPS, THREADS, WIDTH, MASKED = cfg.warps, cfg.threads, cfg.width, cfg.masked
    ACC, M, L = cfg.accumulator.numba, cfg.smem.m, cfg.smem.l
    PER_LANE = WIDTH // LANES
    ZERO, MINUS_INF = ACC(0), ACC(-math.inf)
    M_START, L_START, O_START = (MINUS_INF,) * ROWS, (ZERO,) * ROWS, (ZERO,) * (ROWS * PER_LANE)

    load_q, load_k, load_v = make_load_queries(cfg), make_load_rows(cfg, 0), make_load_rows(cfg, 1)
    locate, places = make_locate(cfg)
    NOWHERE = (types.int64(0),) * places
    (scores, add, add_careful), scored = make_products(cfg), make_scored(cfg)
    SCORED = cfg.score is not None
    mask_keys, (joint_max, joint_sum) = make_mask_keys(cfg), make_join(cfg)
    apply_mask = make_apply_mask(
        [r // PACK for r in range(ROWS)], [u * SLOTS for u in range(KEYS)], QUERIES, TILE_N
    )
    softmax = make_softmax(ROWS, KEYS, 1)
    row_max, rescale, probabilities = softmax.row_max, softmax.rescale, softmax.probabilities
    row_sum = softmax.row_sum
    scale_rows, scale_l = make_scale_rows(ROWS, PER_LANE), make_scale_rows(ROWS, 1)
    larger = unrolled(maximum)

    @unrolled
    def weight(m, m_all):
        return exp2(m - guarded(m_all))

    @unrolled
    def store_o(smem, at, acc):
        for r in range(ROWS):
            for c in range(0, PER_LANE, 4):
                quad = acc[r * PER_LANE + c : r * PER_LANE + c + 4]
                store4(smem, at + (r * WIDTH + c * LANES), quad)

    @unrolled
    def store_stats(smem, at, m, l):
        for r in range(ROWS):
            store(smem, at + (M + r), m[r])
            store(smem, at + (L + r), l[r])

    @inlined
    def tiles_of(n):
        return divmod_int32(types.int32(n + TILE_N - 1), TILE_N)[0]

    @inlined
    def share(row_ptr, col_idx, row, keys, split, splits, lane):
        """The tiles of a split: of those that have any of the keys, all or what the mask lists."""
        first, behind = keys
        begin, _ = divmod_int32(types.int32(max(first, 0)), TILE_N)
        end = tiles_of(max(behind, 0))
        if MASKED:
            first_tile, begin = begin, row_ptr[row]
            end = first_behind(col_idx, begin, row_ptr[row + 1], end, lane)
            if first_tile > 0:
                begin = types.int32(first_behind(col_idx, begin, end, first_tile, lane))
        count, _ = divmod_int32(types.int32(end - begin + splits - 1), splits)
        first = begin + split * count
        return first, min(first + count, end)

    @inlined
    def first_key(col_idx, t, slot):
        tile = col_idx[t] if MASKED else t
        return types.int32(tile * TILE_N + slot)

    @inlined
    def joined(smem, r, d):
        """Column ``d`` of row ``r`` of O, and its m and l, over all warps."""
        m, l, o = MINUS_INF, ZERO, ZERO
        for w in range(WARPS):
            m = larger(m, smem[M + w * ROWS + r])
        for w in range(WARPS):
            f = weight(smem[M + w * ROWS + r], m)
            l += f * smem[L + w * ROWS + r]
            o += f * smem[(w * ROWS + r) * WIDTH + d]
        return o, m, l

    def decode_simt(
        q,
        k,
        v,
        k_scale,
        v_scale,
        lengths,
        table,
        part_o,
        part_lse,
        q_stride,
        strides,
        table_stride,
        batch,
        nq,
        heads,
        group,
        splits,
        n_row,
        page_size,
        capacity,
        scale,
        left,
        right,
        plane_of,
        row_ptr,
        col_idx,
        kind,
        lo,
        hi,
        bits,
        params,
    ):
        smem = cuda.shared.array(0, ACC)
        tid = types.int32(cuda.threadIdx.x)
        item, split = divmod_int32(types.int32(cuda.blockIdx.x), splits)
        packed, row = divmod_int32(item, n_row)
        bh, q0 = types.int32(packed * PACK), row * QUERIES
        b, h = divmod_int32(bh, heads)
        (warp, in_warp), (slot, lane) = divmod_int32(tid, WARP), divmod_int32(tid, LANES)
        column = 4 * lane
        length = min(max(lengths[b], 0), capacity)
        own = types.int32(length - nq + q0)  # position of the first token
        low, high = types.int32(own - left), types.int32(own + right + 1)  # its keys
        keys = low, min(high + QUERIES - 1, length)
        limit, seen_from = min(high, length), low + QUERIES - 1  # all tokens see what is between
        if SCORED and own < 0:
            limit = types.int32(0)
        plane = plane_of[packed] if MASKED else 0
        tiles = plane * n_row + row, keys, split, splits
        begin, end = share(row_ptr, col_idx, *tiles, in_warp)
        pages, (head, _), at = b * table_stride, divmod_int32(h, group), NOWHERE
        if begin < end:
            first = first_key(col_idx, begin, slot)
            at = locate(table, pages, page_size, first, length, head, strides)

        q_base = b * q_stride[0] + q0 * q_stride[1] + h * q_stride[2]
        rq = load_q(q, q_base, q_stride[1], q_stride[2], nq - 1 - q0, scale, column)
        m, l, acc = M_START, L_START, O_START
        for t in range(begin, end):
            key = first_key(col_idx, t, slot)
            rk, rv = load_k(k, k_scale, at, column), load_v(v, v_scale, at, column)
            if t + 1 < end:
                first = first_key(col_idx, t + 1, slot)
                at = locate(table, pages, page_size, first, length, head, strides)
            # S = Q Kᵀ
            s = scored(scores(rq, rk), b, h, own, key, params)
            n0 = key - slot
            hidden = n0 + TILE_N > limit or n0 < seen_from
            if hidden:
                s = mask_keys(s, key, own, low, high, length)
            if MASKED and kind[t] != FULL:
                first_row, last_row = plane * nq, plane * nq + nq - 1
                s = apply_mask(s, kind[t], lo, hi, first_row, last_row, q0, n0, bits, 0, slot)
                hidden = True
            m_new = row_max(m, s)
            alpha = rescale(m, m_new)
            p = probabilities(s, m_new)
            l = row_sum(l, alpha, p)
            m = m_new
            # O = α O + P V
            if hidden:
                acc = add_careful(acc, alpha, p, rv)
            else:
                acc = add(acc, alpha, p, rv)

        m_warp = joint_max(m)
        alpha = rescale(m, m_warp)
        l, acc = joint_sum(scale_l(l, alpha)), joint_sum(scale_rows(acc, alpha))
        if in_warp < LANES:
            store_o(smem, warp * ROWS * WIDTH + column, acc)
        if in_warp == 0:
            store_stats(smem, warp * ROWS, m_warp, l)
        cuda.syncthreads()  # O, m and l of every warp are in place
        for i in range(tid, min(QUERIES, nq - q0) * PACK * HEAD_DIM, THREADS):
            r, d = divmod_int32(types.int32(i), HEAD_DIM)
            o, m_row, l_row = joined(smem, r, d)
            value = MINUS_INF
            if l_row != ZERO:
                o /= l_row
                value = (m_row + ACC(math.log2(l_row))) * ACC(LN2)
            token, at_head = divmod_int32(r, PACK)
            token, at_head = q0 + token, h + at_head
            sequence = types.int64(split * batch + b)
            part_o[((sequence * nq + token) * heads + at_head) * HEAD_DIM + d] = o
            if d == 0:
                part_lse[(sequence * heads + at_head) * nq + token] = value

    return decode_simt


def decode_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    cache, stats = kinds.pointer(STORAGE[cfg.cache_dtype]), kinds.pointer(cfg.accumulator)
    scales, index = (kinds.pointer(kinds.float32),) * 2, (kinds.pointer(kinds.int32),) * 2
    pointers = (kinds.pointer(STORAGE[cfg.dtype]), cache, cache, *scales, *index, stats, stats)
    strides = STRIDES, kinds.several((STRIDES,) * PAGED), kinds.int64
    sizes, window, params = (kinds.int32,) * 8, (kinds.int32,) * 2, score_signature(cfg.score)
    return KernelSpec(
        "nbflash_decode_simt",
        make_decode_simt,
        cfg,
        (*pointers, *strides, *sizes, cfg.accumulator, *window, *SCHEDULE[1:], params),
    )
