"""Statistics of a row's queries, by the warpgroup that has its dO: LSE · log2 e and −δ.

    −δ = dLSE − rowsum(dO ∘ O)

The quad that has two rows of a fragment reads them 16 bytes a lane, O from global memory and dO
from where TMA has swizzled it to:

    lane 4 r + q of warp w, step j    rows 16 w + r and 8 below,  columns 32 j + 8 q … + 7

Of the columns past the end dO is zero. The pass over columns, which runs next, reads the same
statistics from global memory; their layout is that of :mod:`.row_statistics`.
"""

import operator

from nbflash.backends.sm90.backward.dq_config import ROWS
from nbflash.backends.sm90.backward.row_statistics import make_product, shift_and_minus_delta
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import load4, select, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES

STEP = 32  # columns that a quad reads at once


def make_load_out(cfg):
    """``load_out(source, row, bh, sizes, thread)``: a thread's O, LSE and dLSE of its two rows.

    ``source``: out, lse, dlse and the strides of out and dlse. Rows past the end repeat the last.
    """
    TILE_M, HEAD_DIM, LAST_WORD = cfg.tile_m, cfg.head_dim, (cfg.head_dim - 8) // 2

    @unrolled
    def load_rows(out, upper, lower, quad):
        words = []
        for j in range(-(-HEAD_DIM // STEP)):
            at = quad * 4 + STEP // 2 * j
            if STEP * (j + 1) > HEAD_DIM:
                at = select(at < LAST_WORD, at, at * 0 + LAST_WORD)
            words += [*load4(out, upper + at), *load4(out, lower + at)]
        return tuple(words)

    @inlined
    def load_out(source, row, bh, sizes, thread):
        out, lse, dlse, o_stride, l_stride = source
        nq, heads = sizes
        b, h = divmod_int32(types.int32(bh), heads)
        upper = row * TILE_M + row_of_thread(thread)
        q0, q1 = min(upper, nq - 1), min(upper + 8, nq - 1)
        start = b * o_stride[0] + h * o_stride[2]
        at0, at1 = (start + q0 * o_stride[1]) // 2, (start + q1 * o_stride[1]) // 2
        words = load_rows(out, at0, at1, types.int64(thread % 4))
        at, to = types.int64(bh) * nq, b * l_stride[0] + h * l_stride[1]
        natural = lse[at + q0], lse[at + q1]
        return words, natural, (dlse[to + q0 * l_stride[2]], dlse[to + q1 * l_stride[2]])

    return load_out


def make_statistics_of(cfg):
    """``statistics_of(loaded, smem, dout, stats, row, bh, sizes, dropping, thread)``, once dO is
    there.

    ``dout`` is where the warpgroup's dO lies, in words. Returns LSE · log2 e and −δ of a thread's
    two rows, and leaves them in ``stats`` for the pass over columns. With dropout, −δ (1 − p).
    """
    TILE_M, STATS_M, HEAD_DIM, DROPOUT = cfg.tile_m, cfg.stats_m, cfg.head_dim, bool(cfg.dropout)
    PANEL_WORDS, ROW_WORDS = ROWS * ROW_BYTES // 4, ROW_BYTES // 4
    product = make_product(cfg.dtype)

    @unrolled
    def row_sums(words, smem, at, swizzle, quad):
        sums = [None, None]
        for j in range(-(-HEAD_DIM // STEP)):
            chunk = (swizzle ^ (quad + 4 * (j % 2))) * 4 + j // 2 * PANEL_WORDS
            for i in range(2):
                dout = load4(smem, at + (chunk + 8 * i * ROW_WORDS))
                x = product(words[8 * j + 4 * i :][:4], dout)
                sums[i] = x if sums[i] is None else sums[i] + x
        return across_lanes(sums, QUAD, operator.add)

    @inlined
    def leave(stats, shift, minus_delta, q, bh, nq):
        tiles, _ = divmod_int32(types.int32(nq + STATS_M - 1), types.int32(STATS_M))
        tile, inside = divmod_int32(types.int32(q), types.int32(STATS_M))
        if tile < tiles:
            at = (types.int64(bh) * tiles + tile) * types.int64(2 * STATS_M) + inside
            stats[at] = shift
            stats[at + STATS_M] = minus_delta

    @inlined
    def statistics_of(loaded, smem, dout, stats, row, bh, sizes, dropping, thread):
        words, natural, gradient = loaded
        nq, _ = sizes
        inner = types.int32(row_of_thread(thread % 128))
        at, swizzle = types.int32(dout + inner * ROW_WORDS), types.int32(inner & 7)
        sums = row_sums(words, smem, at, swizzle, types.int32(thread % 4))
        upper = types.int32(row * TILE_M + row_of_thread(thread))
        shift0, minus0 = shift_and_minus_delta(natural[0], sums[0], gradient[0], upper < nq)
        shift1, minus1 = shift_and_minus_delta(natural[1], sums[1], gradient[1], upper + 8 < nq)
        if DROPOUT:
            _, share = dropping
            minus0, minus1 = minus0 * share, minus1 * share
        if thread % 4 == 0:
            leave(stats, shift0, minus0, upper, bh, nq)
            leave(stats, shift1, minus1, upper + 8, bh, nq)
        return (-shift0, -shift1), (minus0, minus1)

    return statistics_of
