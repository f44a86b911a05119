"""Before and behind the backward: a query's numbers, and dQ from its accumulator.

    shift = −LSE · log2 e        −∞ for a row that attends nothing, and for rows past the end
    δ     = rowsum(dO ∘ O) − dLSE        times 1 − p with dropout

Both have whole tiles of rows for each batch element and head, as dQ's accumulator has, which is
cleared here too. That holds fragments, so that what a warp adds lies side by side:

    number of (row, column) = 128 · (row // 16 · width / 8 + column // 8) + place
    place = 4 (4 r + q) + 2 i + e, or 32 (2 i + e) + 4 r + q        row % 16 = 8 i + r,
                                                                     column % 8 = 2 q + e

the former where four numbers are added at once.
"""

import math
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.mma.layout import CHUNK
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import load4, store4, unrolled
from nbflash.cuda.tile.warp_math import pack_half, unpack_half
from nbflash.cuda.tile.warp_reduce import warp_sum
from nbflash.definitions.constants import LOG2_E, WARP

WARPS = 4
PIECE = 128  # numbers of 16 rows and 8 columns


@dataclass(frozen=True)
class RowConfig:
    """Kernels over rows of ``head_dim`` elements, a multiple of 8.

    Attributes
    ----------
    width : int
        Columns of dQ's accumulator; 0 without one.
    vector_red : bool
        It is added to four numbers at a time.
    """

    dtype: str
    head_dim: int
    width: int = 0
    vector_red: bool = False
    min_blocks: int = 1
    threads: int = WARP * WARPS
    smem_bytes: int = 0


def blocks_for_rows(rows):
    """Blocks for one warp per row."""
    return -(-rows // WARPS)


def blocks_for_pieces(cfg, rows):
    """Blocks for eight threads per piece of dQ's accumulator."""
    return -(-rows * cfg.width // 16 // (WARP * WARPS))


def make_statistics_sm80(cfg):
    """The kernel: dout, out (in words), lse, dlse, shift, delta, dq's accumulator; strides of dout
    and out, and of dlse along batch, heads and queries; nq, heads, rows of a head with those past
    the end, and of all; what dropout keeps, 1 − p. A warp has a row.
    """
    CHUNKS, WIDTH = cfg.head_dim // CHUNK, cfg.width
    ZERO, NEG_INF, BASE = types.float32(0), types.float32(-math.inf), types.float32(LOG2_E)

    @unrolled
    def products(a, a_at, b, b_at, zero):
        total = zero
        for x, y in zip(load4(a, a_at), load4(b, b_at), strict=True):
            pairs = zip(unpack_half(cfg.dtype, x), unpack_half(cfg.dtype, y), strict=True)
            for u, v in pairs:
                total = total + u * v
        return total

    @unrolled
    def clear(memory, at, zero):
        store4(memory, at, (zero,) * 4)

    def statistics_sm80(
        dout,
        out,
        lse,
        dlse,
        shift,
        delta,
        total,
        do_stride,
        o_stride,
        l_stride,
        nq,
        heads,
        padded,
        rows,
        share,
    ):
        row = types.int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP)
        lane = types.int32(cuda.threadIdx.x % WARP)
        if row < rows:
            if WIDTH:
                for at in range(4 * lane, WIDTH, 4 * WARP):
                    clear(total, types.int64(row) * WIDTH + at, ZERO)
            bh, i = divmod_int32(row, padded)
            b, h = divmod_int32(bh, heads)
            found, number = NEG_INF, ZERO
            if i < nq:
                if lane < CHUNKS:
                    do_at = b * do_stride[0] + i * do_stride[1] + h * do_stride[2] + CHUNK * lane
                    o_at = b * o_stride[0] + i * o_stride[1] + h * o_stride[2] + CHUNK * lane
                    number = products(dout, do_at >> 1, out, o_at >> 1, ZERO)
                number = warp_sum(number)
                number -= dlse[b * l_stride[0] + h * l_stride[1] + i * l_stride[2]]
                natural = lse[types.int64(bh) * nq + i]
                if natural != NEG_INF:
                    found = -natural * BASE
            if lane == 0:
                shift[row], delta[row] = found, number * share

    return statistics_sm80


def statistics_sm80_spec(cfg):
    """How to compile and launch the kernel of a :class:`RowConfig`."""
    words, real = kinds.pointer(kinds.uint32), kinds.pointer(kinds.float32)
    signature = (words, words, *(real,) * 5, *(STRIDES,) * 3, *(kinds.int32,) * 4, kinds.float32)
    return KernelSpec("nbflash_statistics_sm80", make_statistics_sm80, cfg, signature)


def make_convert_dq_sm80(cfg):
    """The kernel: dq's accumulator, dq (in words); strides of dq; nq, heads, rows of a head with
    those past the end, and 16-row tiles of all; the factor. A thread has eight columns of a row and
    of the one 8 below.
    """
    PIECES, CHUNKS, VECTORS = cfg.width // CHUNK, cfg.head_dim // CHUNK, cfg.vector_red

    @unrolled
    def numbers(total, at, r):
        """Of 16 numbers in memory the eight of the upper row, then of the one below."""
        if VECTORS:
            quads = [load4(total, at + (4 * r + q) * 4) for q in range(4)]
            found = [[quads[q][2 * i + e] for q in range(4) for e in range(2)] for i in range(2)]
        else:
            by_element = [load4(total, at + 32 * n + 4 * r) for n in range(4)]
            found = [
                [by_element[2 * i + e][q] for q in range(4) for e in range(2)] for i in range(2)
            ]
        return tuple(found[0]), tuple(found[1])

    @unrolled
    def store_row(target, at, x, factor):
        pairs = (pack_half(cfg.dtype, x[n] * factor, x[n + 1] * factor) for n in range(0, 8, 2))
        store4(target, at, list(pairs))

    def convert_dq_sm80(total, dq, stride, nq, heads, padded, tiles, factor):
        at = types.int32(cuda.blockIdx.x * (WARPS * WARP) + cuda.threadIdx.x)
        piece, r = divmod_int32(at, types.int32(8))
        block, column = divmod_int32(piece, types.int32(PIECES))
        if block < tiles:
            bh, first = divmod_int32(types.int32(block * 16), padded)
            b, h = divmod_int32(bh, heads)
            row = types.int32(first + r)
            if column < CHUNKS and row < nq:
                upper, below = numbers(total, types.int64(piece) * PIECE, r)
                to = b * stride[0] + h * stride[2] + row * stride[1] + column * CHUNK
                store_row(dq, to >> 1, upper, factor)
                if row + 8 < nq:
                    store_row(dq, (to + 8 * stride[1]) >> 1, below, factor)

    return convert_dq_sm80


def convert_dq_sm80_spec(cfg):
    """How to compile and launch the kernel of a :class:`RowConfig`."""
    pointers = kinds.pointer(kinds.float32), kinds.pointer(kinds.uint32)
    signature = (*pointers, STRIDES, *(kinds.int32,) * 4, kinds.float32)
    return KernelSpec("nbflash_convert_dq_sm80", make_convert_dq_sm80, cfg, signature)
