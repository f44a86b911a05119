"""Decode by mma: the last tokens of a sequence and its cached keys, a part of them a block.

A block takes one part of the keys of 16 rows: rows are the query tokens of all heads that share a
key head (row r is token r // pack, head r % pack of them), so that K and V are read once. Memory
bounds it. Every warp has 16 keys of each tile, a ring of stages for them, and an O, m and l of its
own: it waits for no other warp until all are joined at the end.

    copies        tiles 0 … stages − 2 are under way
    for each tile t of the part, in every warp:
        K and V of t are there             behind the barrier of the warp all its lanes are done
                                           with tile t − 1: its stage takes tile t + stages − 1
        S  = Q Kᵀ
        S  = −∞                            behind the length, or where mask or causal rule hide it
        m' = max(m, rowmax S);  α = 2^(m − m');  P = 2^(S − m');  l = α l + rowsum P
        O  = α O + P V;   m = m'
    O, m, l of all warps → shared memory → O / l, LSE → memory, in float32;  the block that is
    done last of its rows: O, LSE of all parts (`combine_in_block`)

A tile with keys that some row does not see is looked through for infinities and NaN in V: rows
that attend one are poisoned, then it is cleaned (:mod:`nbflash.cuda.tile.mma.poison`).

Lengths and pages are read here and not by the host: nothing waits for them, and a CUDA graph may be
replayed with others. Pages are looked up a tile before their copies are sent. FlashDecoding (Dao,
Haziza, Massa and Sizov, 2023); PagedAttention (Kwon et al., 2023, arXiv 2309.06180).
"""

import math

from masks import FULL
from nbflash.backends.sm80.decode.config import KEYS, ROWS
from nbflash.backends.sm80.decode.copies import make_copies
from nbflash.backends.sm80.decode.results import make_results
from nbflash.backends.split_kv.combine_in_block import make_join_parts
from nbflash.backends.split_kv.part import make_rows, make_tiles_of_part
from nbflash.cuda.kernel_spec import INDEX, SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.ptx.cp_async import cp_async_commit, cp_async_wait
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.convert import STORAGE
from nbflash.cuda.tile.float_bits import unsigned
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.gemm import make_gemm_abt, make_gemm_pb
from nbflash.cuda.tile.mma.layout import ALIGNMENT
from nbflash.cuda.tile.mma.poison import make_poison_rows
from nbflash.cuda.tile.mma.softmax import make_softmax
from nbflash.cuda.tile.ring import divmod_int32, make_advance
from nbflash.cuda.tile.tracing import opaque, unrolled
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep
from nbflash.definitions.constants import WARP


def make_decode_sm80(cfg):
    """The kernel for a :class:`~.config.DecodeSm80Config`.

    Arguments of the kernel: q, k_cache, v_cache; lengths; block table; part_o (splits, batch, nq,
    heads, head_dim) and part_lse (splits, batch, heads, nq); out and lse, contiguous; a count for
    each 16 rows, 0; whether the last block joins the parts; strides of q (batch, sequence, head)
    and of the caches (page or batch, token, head) in elements; entries of a table's row; page_size,
    0 where there is none; capacity, beyond which no length counts; batch, nq, heads, pack (heads
    that share rows), group (heads that share a key head), splits; |scale| · log2 e; then the
    schedule of the (nq, keys) mask, whose planes belong to batch and row of packed heads. A block
    for each split, 16 rows, packed heads and batch.
    """
    TILE, TILE_N, STAGES, MASKED = cfg.tile, cfg.tile_n, cfg.stages, cfg.masked
    RINGS, RING_BYTES, STAGE_BYTES = cfg.smem.rings, cfg.ring_bytes, cfg.stage_bytes
    V = KEYS * TILE.row_bytes
    ZERO, NONE = types.float32(0), types.int32(0)
    O_START = (ZERO,) * Fragment(1, TILE.width).size
    S_START, L_START = (ZERO,) * Fragment(1, KEYS).size, (ZERO,) * 2
    M_START = (types.float32(-math.inf),) * 2

    send_q, look_up, send = make_copies(cfg)
    scan, clean, advance = cfg.copy.scan, cfg.copy.clean, make_advance(STAGES)
    wait, wait_q = cp_async_wait(STAGES - 2), cp_async_wait(STAGES - 1)
    gemm_qk = make_gemm_abt(cfg.dtype, 1, KEYS, TILE, negate=cfg.negate)
    gemm_pv = make_gemm_pb(cfg.dtype, 1, KEYS, TILE)
    poison_rows = make_poison_rows(cfg.dtype, 1, KEYS, TILE)
    softmax, pack_p = make_softmax(1, KEYS), Fragment(1, KEYS).make_pack(cfg.dtype)
    row_max, has_grown, rescale = softmax.row_max, softmax.has_grown, softmax.rescale
    probabilities, row_sums = softmax.probabilities, softmax.row_sums
    scale_rows, apply_keep = Fragment(1, TILE.width).make_scale_rows(), make_apply_keep(KEYS, 0)
    (row_at, keep_of), tiles_of_part = make_rows(cfg), make_tiles_of_part(cfg)
    store_results, join_parts = make_results(cfg), make_join_parts(cfg)

    @unrolled
    def places(start, thread):
        """The first aligned address, the warp's ring, and a lane's operands: Q; K and V of it."""
        first = thread * 0 + (start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        ring, lane = first + RINGS + thread // WARP * RING_BYTES, thread % WARP
        q, v = first + TILE.by_rows(lane), ring + V + TILE.by_rows(lane)
        return first, ring, q, ring + TILE.by_columns(lane), v

    @unrolled
    def staged(address, stage):
        return address + stage * STAGE_BYTES

    @unrolled
    def own_of(keep, own):
        """Of the bits of a tile's keys those of the warp's."""
        return tuple(unsigned(x) >> own // 4 for x in keep)

    @unrolled
    def plus(l, alpha, sums):
        return tuple(x * a + y for x, a, y in zip(l, alpha, sums, strict=True))

    def decode_sm80(
        q,
        k,
        v,
        lengths,
        table,
        part_o,
        part_lse,
        out,
        lse,
        counts,
        joining,
        q_stride,
        k_stride,
        v_stride,
        table_width,
        page_size,
        capacity,
        batch,
        nq,
        heads,
        pack,
        group,
        splits,
        scale,
        plane_of,
        row_ptr,
        col_idx,
        kinds,
        lo,
        hi,
        bits,
    ):
        smem = cuda.shared.array(0, types.int32)
        start, thread = shared_address(smem), types.int32(cuda.threadIdx.x)
        lane, own = types.int32(thread & (WARP - 1)), types.int32((thread >> 5) * KEYS)
        first_address, ring, q_at, k_at, v_at = places(start, thread)
        row_tiles = types.int32((nq * pack + ROWS - 1) // ROWS)
        rest, split = divmod_int32(types.int32(cuda.blockIdx.x), splits)
        rest, row_tile = divmod_int32(rest, row_tiles)
        b, packed = divmod_int32(rest, heads // pack)
        head, plane = types.int32(packed * pack), NONE
        length = types.int32(min(max(lengths[b], 0), capacity))
        if MASKED:
            plane = types.int32(plane_of[rest])
        seen_by_all = length if MASKED else types.int32(length - nq + 1)
        head_kv, _ = divmod_int32(head, group)
        caches = (k, k_stride), (v, v_stride)
        part, pages = (length, own), (table, types.int32(b * table_width), page_size, b)

        rows = types.int32(row_tile * ROWS), types.int32(nq * pack), pack
        send_q(first_address, q, q_stride, (*rows, b * q_stride[0] + head * q_stride[2]), thread)
        cp_async_commit()
        begin, end = tiles_of_part(length, split, splits, plane, row_ptr, col_idx, lane)
        for i in range(STAGES - 1):
            found = look_up(types.int32(begin + i), end, part, pages, col_idx)
            send(staged(ring, types.int32(i)), caches, found, head_kv, lane)
        ahead = look_up(types.int32(begin + STAGES - 1), end, part, pages, col_idx)
        where = head, types.int32(split * batch + b), pack, nq, heads
        upper, _ = row_at(types.int32(rows[0] + lane // 4), where, plane, length, lo, hi)
        below, _ = row_at(types.int32(rows[0] + lane // 4 + 8), where, plane, length, lo, hi)
        wait_q()
        cuda.syncthreads()  # Q is in place
        m, l, acc = M_START, L_START, O_START
        stage, free = NONE, types.int32(STAGES - 1)
        for t in range(begin, end):
            n0, kind = types.int32(t * TILE_N), types.int32(FULL)
            if MASKED:
                n0, kind = types.int32(col_idx[t] * TILE_N), types.int32(kinds[t])
            wait()
            cuda.syncwarp()  # K and V are in place, and all are done with those before
            # What follows from the thread is made anew: registers are few.
            thread = opaque(types.int32(cuda.threadIdx.x))
            lane, own = types.int32(thread & (WARP - 1)), types.int32((thread >> 5) * KEYS)
            _, ring, q_at, k_at, v_at = places(shared_address(smem), thread)
            send(staged(ring, free), caches, ahead, head_kv, lane)
            ahead = look_up(types.int32(t + STAGES), end, part, pages, col_idx)
            # S = Q Kᵀ
            s = gemm_qk(S_START, q_at, staged(k_at, stage))
            hidden = kind != FULL or n0 + own + KEYS > seen_by_all
            if hidden:
                quad = types.int32(lane % 4 * 2)
                keep = keep_of(kind, n0, upper, bits, quad), keep_of(kind, n0, below, bits, quad)
                s = apply_keep(s, own_of(keep, own))
            # P = 2^(S · scale − m)
            m_new = row_max(m, s, scale)
            p = probabilities(s, m_new, scale)
            alpha, sums, p = rescale(m, m_new), row_sums(p), pack_p(p)
            # O = α O + P V
            if has_grown(m, m_new):
                acc = scale_rows(acc, alpha)
            m, l = m_new, plus(l, alpha, sums)
            if hidden:
                word = types.int32((staged(ring, stage) + V - start) // 4)
                if lanes_of(scan(smem, word, lane) != 0) != 0:
                    p = poison_rows(p, staged(v_at, stage))
                    cuda.syncwarp()  # all have seen V
                    clean(smem, word, lane)
                    cuda.syncwarp()  # V is finite
            acc = gemm_pv(acc, p, staged(v_at, stage))
            free = stage
            stage, _ = advance(stage, NONE)
        word = types.int32((first_address - start) // 4)
        seen = where, plane, length, lo, hi
        parts = part_o, part_lse
        store_results(smem, word, rows, seen, (acc, m, l), parts, thread)
        if joining:
            tile, _ = divmod_int32(types.int32(cuda.blockIdx.x), splits)
            sizes = splits, nq, heads, types.int64(batch * nq * heads)
            rows = b, packed * pack, rows[0], types.int32(min(nq * pack - rows[0], ROWS)), pack
            join_parts(smem, word, (counts, tile), rows, sizes, parts, (out, lse), thread)

    return decode_sm80


def decode_sm80_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, floats, size = types.CPointer(types.uint16), types.CPointer(types.float32), types.int32
    pointers = *(tensor,) * 3, INDEX, INDEX, floats, floats
    results = types.CPointer(STORAGE[cfg.dtype]), floats, types.CPointer(types.uint32), size
    signature = *pointers, *results, *(STRIDES,) * 3, *(size,) * 9, types.float32, *SCHEDULE[1:]
    return KernelSpec("nbflash_decode_sm80", make_decode_sm80, cfg, signature, whole_program=True)
