"""Decode on Hopper: the last tokens of a sequence and its cached keys, a part of them a block.

A block takes one part of the keys of one row tile: rows are the query tokens of all heads that
share a key head (row r is token r // pack, head r % pack of them), so that K and V are read once.
What bounds it is memory: a warp loads as many tiles as fit, and a warpgroup computes one after the
other; of 8-bit quantised caches its warps compute keys of their own (:mod:`.consumer_8bit`).
The block that is done last of a row tile joins its parts (`split_kv.combine_in_block`), or, where
they are many, `combine_simt` does.

    for each tile t of the part
        wait for K;  S = Q Kᵀ;  wait
        m, P, l of t, looked at first: nothing runs beside it that could be held up
        O = α O;  wait for V;  O += P V;  wait
    O / l, LSE → memory, in float32;  the last block of the row tile: O, LSE of all parts

    barrier      arrives                               waits
    full_k[s]    loader, bytes of K; descriptor        all that compute, before S of the tile
    full_v[s]    loader, bytes of V; then scales       all that compute, before P V of the tile
    empty[s]     one that computes (of 8 bits: one     loader
                 of each warp), P V of the tile

The loader's lanes send the boxes of different pages. One of them says how many bytes will come, no
matter whether before or after they do: until it has arrived no phase ends.

Lengths and pages are read here and not by the host: nothing waits for them, and a CUDA graph may be
replayed with others. FlashDecoding (Dao, Haziza, Massa and Sizov, 2023); PagedAttention (Kwon et
al., 2023, arXiv 2309.06180).
"""

from nbflash.backends.sm90.decode.config import WARPS
from nbflash.backends.sm90.decode.consumer import make_part
from nbflash.backends.sm90.decode.consumer_8bit import make_stored_part
from nbflash.backends.sm90.decode.producer import make_load
from nbflash.backends.split_kv.combine_in_block import make_join_parts
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.ptx.mbarrier import fence_mbarrier_init, mbarrier_init
from nbflash.cuda.tile.addresses import shared_address
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT


def make_decode_sm90(cfg):
    """The kernel for a :class:`~.config.DecodeSm90Config`.

    Arguments of the kernel: tensor maps of k_cache and v_cache; q; part_o (splits, batch, nq,
    heads, head_dim) and part_lse (splits, batch, heads, nq); out and lse, contiguous; a count for
    each row tile, 0; whether the last block joins the parts; lengths; block table; scales of
    k_cache and v_cache (bits of float32); strides of q (batch, sequence, head) and of the scales
    (page or batch, token, head) in elements; entries of a table's row; page_size, 0 where there is
    none; capacity, beyond which no length counts; batch, nq, heads, pack (heads that share a row
    tile), group (heads that share a key head), splits; |scale| · log2 e; then the schedule of the
    (nq, keys) mask, whose planes belong to batch and row of packed heads. A block for each split,
    row tile, packed heads and batch.
    """
    STAGES = cfg.stages
    FULL_K, FULL_V, EMPTY = cfg.barriers.full_k, cfg.barriers.full_v, cfg.barriers.empty
    MASKED, QUANTISED, TILE_M = cfg.masked, cfg.quantised, cfg.tile_m
    load_part, compute_part = make_load(cfg), (make_stored_part if QUANTISED else make_part)(cfg)
    READERS, join_parts = WARPS if QUANTISED else 1, make_join_parts(cfg)

    def decode_sm90(
        k_map,
        v_map,
        q,
        part_o,
        part_lse,
        out,
        lse,
        counts,
        joining,
        lengths,
        table,
        k_scale,
        v_scale,
        q_stride,
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
        plane_of,
        row_ptr,
        col_idx,
        kinds,
        lo,
        hi,
        bits,
    ):
        smem = cuda.shared.array(0, types.int32)
        start = types.int64(shared_address(smem))
        base = (start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1)
        place = base, (base - start) // 4
        tid = types.int32(cuda.threadIdx.x)
        if tid == 0:
            for i in range(STAGES):
                mbarrier_init(base + FULL_K + 8 * i, 1)
                mbarrier_init(base + FULL_V + 8 * i, 1 + QUANTISED)
                mbarrier_init(base + EMPTY + 8 * i, READERS)
            fence_mbarrier_init()
        cuda.syncthreads()
        row_tiles = (nq * pack + TILE_M - 1) // TILE_M
        rest, split = divmod_int32(types.int32(cuda.blockIdx.x), splits)
        rest, row_tile = divmod_int32(rest, types.int32(row_tiles))
        b, packed = divmod_int32(rest, heads // pack)
        head, plane = packed * pack, types.int32(0)
        length = types.int32(min(max(lengths[b], 0), capacity))
        if MASKED:
            plane = types.int32(plane_of[rest])
        seen_by_all = length if MASKED else types.int32(length - nq + 1)
        if tid >= 128:
            part = length, seen_by_all, split, splits, plane, types.int32(head // group)
            pages = table, types.int32(b * table_width), page_size, b
            scales = k_scale, k_scale_stride, v_scale, v_scale_stride
            tables = row_ptr, col_idx, kinds
            load_part(smem, place, (k_map, v_map), part, pages, scales, tables, tid - 128)
        else:
            start = b * q_stride[0] + head * q_stride[2]
            rows = types.int32(row_tile * TILE_M), types.int32(nq * pack), pack, start
            where = head, types.int32(split * batch + b), pack, nq, heads
            seen, parts = (plane, length, lo, hi), (part_o, part_lse)
            compute_part(smem, place, q, q_stride, rows, where, seen, bits, scale, parts, tid)
            if joining:
                # Where the block is, anew: held from its start, it spilled 16 bytes at d=128.
                tile, _ = divmod_int32(opaque(types.int32(cuda.blockIdx.x)), splits)
                rest, row_tile = divmod_int32(tile, types.int32(row_tiles))
                b, packed = divmod_int32(rest, heads // pack)
                first = types.int32(row_tile * TILE_M)
                count = types.int32(min(nq * pack - first, TILE_M))
                sizes = splits, nq, heads, types.int64(batch * nq * heads)
                rows = b, packed * pack, first, count, pack
                join_parts(smem, place[1], (counts, tile), rows, sizes, parts, (out, lse), tid)

    return decode_sm90


def decode_sm90_spec(cfg):
    """How to compile and launch the kernel of ``cfg``; the first two arguments are maps."""
    maps, floats, size = (kinds.uint64,) * 2, kinds.pointer(kinds.float32), kinds.int32
    results = kinds.pointer(STORAGE[cfg.dtype]), floats, kinds.pointer(kinds.uint32), size
    arrays = (INDEX, floats, floats, *results, *(INDEX,) * 4)
    sizes = (*(STRIDES,) * 3, *(size,) * 9, kinds.float32)
    signature = (*maps, *arrays, *sizes, *SCHEDULE[1:])
    return KernelSpec(
        "nbflash_decode_sm90",
        make_decode_sm90,
        cfg,
        signature,
        maps=len(maps),
        whole_program=True,
    )
