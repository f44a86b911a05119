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
        S  = score(S)                      if there is one, of the tokens' positions
        S  = −∞                            behind the length, or where mask, window or causal rule
                                           hide it
        m' = max(m, rowmax S);  α = 2^(m − m');  P = 2^(S − m');  l = α l + rowsum P
        O  = α O + P V;   m = m'
    O, m, l of all warps → shared memory → O / l, LSE → memory, in float32;  the block that is
    done last of its rows: O, LSE of all parts (`combine_in_block`)

Keys of 16 bits are computed in :mod:`.compute`, quantised ones of 8 bits in :mod:`.compute_8bit`.
Where some row does not see all keys of a tile, V is searched for infinities and NaN: they become
zeros, and the results of rows that attend them NaN (:mod:`nbflash.cuda.tile.mma.poison`).

Lengths and pages are read here and not by the host: nothing waits for them, and a CUDA graph may be
replayed with others. Pages are looked up a tile before their copies are sent. FlashDecoding (Dao,
Haziza, Massa and Sizov, 2023); PagedAttention (Kwon et al., 2023, arXiv 2309.06180).
"""

from masks import FULL
from nbflash.backends.sm80.decode import compute, compute_8bit
from nbflash.backends.sm80.decode.config import KEYS, ROWS
from nbflash.backends.sm80.decode.copies import make_copies
from nbflash.backends.sm80.decode.results import make_results
from nbflash.backends.sm80.decode.score import make_places_of
from nbflash.backends.split_kv.combine_in_block import make_join_parts
from nbflash.backends.split_kv.part import make_rows, make_tiles_of_window
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.ptx.cp_async import cp_async_wait
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.float_bits import unsigned
from nbflash.cuda.tile.mma.layout import ALIGNMENT
from nbflash.cuda.tile.ring import divmod_int32, make_advance
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.tracing import opaque, unrolled
from nbflash.definitions.constants import WARP


def make_decode_sm80(cfg):
    """The kernel for a :class:`~.config.DecodeSm80Config`.

    Arguments of the kernel: q, k_cache, v_cache (of quantised caches elements of two bytes, and q
    in words); the scales of both (bits of float32); lengths; block table; part_o (splits, batch,
    nq, heads, head_dim) and part_lse (splits, batch, heads, nq); out and lse, contiguous; a count
    for each 16 rows, 0; whether the last block joins the parts; strides of q (batch, sequence,
    head), of caches and of scales (page or batch, token, head) in elements; entries of a table's
    row; page_size, 0 where there is none; capacity, beyond which no length counts; batch, nq,
    heads, pack (heads that share rows), group (heads that share a key head), splits; |scale| ·
    log2 e, or |scale| before a score; how many keys to the left and to the right of its own
    position a token sees; the schedule of the (nq, keys) mask, whose planes belong to batch and row
    of packed heads; the score's parameters. A block for each split, 16 rows, packed heads and
    batch.
    """
    TILE_N, STAGES, MASKED, SCORED = cfg.tile_n, cfg.stages, cfg.masked, cfg.score is not None
    RINGS, RING_BYTES, STAGE_BYTES = cfg.smem.rings, cfg.ring_bytes, cfg.stage_bytes
    NONE, UNSEEN = types.int32(0), (types.uint32(0),) * 2
    load_q, START, step, finish = (compute_8bit if cfg.quantised else compute).make_compute(cfg)
    look_up, send = make_copies(cfg)
    wait, wait_q = cp_async_wait(STAGES - 2), cp_async_wait(STAGES - 1)
    (row_at, keep_of), tiles_of_window = make_rows(cfg, windows=True), make_tiles_of_window(cfg)
    places_of = make_places_of(cfg)
    store_results, join_parts = make_results(cfg), make_join_parts(cfg)
    advance = make_advance(STAGES)

    @unrolled
    def places(start, thread):
        """The first aligned address, and the warp's ring."""
        first = thread * 0 + (start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        return first, first + RINGS + (thread >> 5) * RING_BYTES

    @unrolled
    def staged(address, stage):
        return address + stage * STAGE_BYTES

    @unrolled
    def own_of(keep, first_key):
        """Of the bits of a tile's keys those of the warp's."""
        return tuple(unsigned(x) >> first_key // 4 for x in keep)

    def decode_sm80(
        q,
        k,
        v,
        k_scale,
        v_scale,
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
        k_scale_stride,
        v_scale_stride,
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
        left,
        right,
        plane_of,
        row_ptr,
        col_idx,
        kinds,
        lo,
        hi,
        bits,
        params,
    ):
        smem = cuda.shared.array(0, types.int32)
        start, thread = shared_address(smem), types.int32(cuda.threadIdx.x)
        lane, first_key = types.int32(thread & (WARP - 1)), types.int32((thread >> 5) * KEYS)
        first, ring = places(start, thread)
        word = types.int32((first - start) // 4)
        row_tiles = types.int32((nq * pack + ROWS - 1) // ROWS)
        rest, split = divmod_int32(types.int32(cuda.blockIdx.x), splits)
        rest, row_tile = divmod_int32(rest, row_tiles)
        b, packed = divmod_int32(rest, heads // pack)
        head, plane = types.int32(packed * pack), NONE
        length = types.int32(min(max(lengths[b], 0), capacity))
        if MASKED:
            plane = types.int32(plane_of[rest])
        # All tokens see the 16 keys of a warp if its first key is seen_from + (0 … seen_by_all).
        seen_from = types.int32(length - 1 - left)
        seen_by_all = types.int32(left + right + 2 - nq - KEYS)
        if SCORED and length < nq:
            seen_from = types.int32(length + TILE_N)  # a token before the first key sees none
        head_kv, _ = divmod_int32(head, group)
        caches = (k, k_stride), (v, v_stride)
        scales = (k_scale, k_scale_stride), (v_scale, v_scale_stride)
        pages = table, types.int32(b * table_width), page_size, b

        rows = types.int32(row_tile * ROWS), types.int32(nq * pack), pack
        q_rows = *rows, b * q_stride[0] + head * q_stride[2]
        q_factors = load_q(smem, first, word, q, q_stride, q_rows, thread)
        keys = types.int32(max(length - nq - left, NONE)), length
        begin, end = tiles_of_window(keys, split, splits, plane, row_ptr, col_idx, lane)
        part, where = (length, first_key, end), (pages, scales, head_kv)
        for i in range(STAGES - 1):
            found = look_up(types.int32(begin + i), part, where, col_idx, lane)
            send(smem, word, first, staged(ring, types.int32(i)), caches, found, head_kv, lane)
        ahead = look_up(types.int32(begin + STAGES - 1), part, where, col_idx, lane)
        row_place = head, types.int32(split * batch + b), pack, nq, heads
        wait_q()
        cuda.syncthreads()  # Q is in place
        stage, free, state = NONE, types.int32(STAGES - 1), START
        for t in range(begin, end):
            n0, kind = types.int32(t * TILE_N), types.int32(FULL)
            if MASKED:
                n0, kind = types.int32(col_idx[t] * TILE_N), types.int32(kinds[t])
            wait()
            cuda.syncwarp()  # K and V are in place, and all are done with those before
            # What follows from the thread is made anew: registers are few.
            thread = opaque(types.int32(cuda.threadIdx.x))
            lane, first_key = types.int32(thread & (WARP - 1)), types.int32((thread >> 5) * KEYS)
            first, ring = places(shared_address(smem), thread)
            send(smem, word, first, staged(ring, free), caches, ahead, head_kv, lane)
            ahead = look_up(types.int32(t + STAGES), part, where, col_idx, lane)
            place, keep = types.int32(n0 + first_key - seen_from), UNSEEN
            hidden = kind != FULL or place < 0 or place > seen_by_all
            if hidden:
                quad, row = types.int32(lane % 4 * 2), types.int32(rows[0] + lane // 4)
                seen = length, left, right
                upper, _ = row_at(row, row_place, plane, seen, lo, hi)
                below, _ = row_at(types.int32(row + 8), row_place, plane, seen, lo, hi)
                keep = keep_of(kind, n0, upper, bits, quad), keep_of(kind, n0, below, bits, quad)
                keep = own_of(keep, first_key)
            key = types.int32(n0 + first_key + lane % 4 * 2)
            sequence = b, types.int32(length - nq), head, pack, rows[1]
            scores_at = places_of(types.int32(rows[0] + lane // 4), key, sequence)
            at, scoring = staged(ring, stage), (scores_at, params, scale)
            state = step(smem, word, first, at, hidden, keep, state, q_factors, scoring, lane)
            free = stage
            stage, _ = advance(stage, NONE)
        seen = row_place, plane, (length, left, right), lo, hi
        parts = part_o, part_lse
        store_results(smem, word, rows, seen, finish(state), parts, thread)
        if joining:
            tile, _ = divmod_int32(types.int32(cuda.blockIdx.x), splits)
            sizes = splits, nq, heads, types.int64(batch * nq * heads)
            rows = b, packed * pack, rows[0], types.int32(min(nq * pack - rows[0], ROWS)), pack
            join_parts(smem, word, (counts, tile), rows, sizes, parts, (out, lse), thread)

    return decode_sm80


def decode_sm80_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, floats, size = kinds.pointer(kinds.uint16), kinds.pointer(kinds.float32), kinds.int32
    q = INDEX if cfg.quantised else tensor
    pointers = q, tensor, tensor, *(INDEX,) * 4, floats, floats
    results = kinds.pointer(STORAGE[cfg.dtype]), floats, kinds.pointer(kinds.uint32), size
    signature = *pointers, *results, *(STRIDES,) * 5, *(size,) * 9, kinds.float32, size, size
    signature += *SCHEDULE[1:], score_signature(cfg.score)
    return KernelSpec("nbflash_decode_sm80", make_decode_sm80, cfg, signature, whole_program=True)
