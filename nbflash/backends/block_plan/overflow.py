"""NaN for what a block map has no room for: rows that ask for more blocks than its lists hold.

The host does not wait to see the counts. A row whose count is above ``k`` would be attended in part
only; its results become NaN instead, in every bit 1, which is NaN in all dtypes. One warp looks at
one row of blocks of one head.
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.definitions.constants import WARP

WARPS = 4


@dataclass(frozen=True)
class OverflowConfig:
    """``pieces``, ``lse_pieces``: 16-bit pieces of a row of the result, and of an LSE."""

    pieces: int
    lse_pieces: int
    min_blocks: int = 1
    threads: int = WARP * WARPS
    smem_bytes: int = 0


def make_overflow(cfg):
    """The kernel: counts of the map; out and lse in pieces; strides of out along batch, sequence
    and head, in pieces, and those of lse along batch, heads and sequence; ``width`` of the lists;
    rows of all heads; rows of a head, queries of a block, queries, heads; batch elements and heads
    of the map.
    """
    PIECES, LSE_PIECES, ONES = cfg.pieces, cfg.lse_pieces, types.uint16(0xFFFF)

    def overflow(
        counts,
        out,
        lse,
        o_stride,
        l_stride,
        width,
        rows,
        n_rows,
        size,
        nq,
        heads,
        of_batch,
        of_heads,
    ):
        tid = types.int32(cuda.threadIdx.x)
        at, lane = types.int32(cuda.blockIdx.x * WARPS + (tid >> 5)), types.int32(tid & 31)
        if at >= rows:
            return
        bh, row = types.int32(at // n_rows), types.int32(at % n_rows)
        b, h = types.int32(bh // heads), types.int32(bh % heads)
        plane = types.int32(min(b, of_batch - 1) * of_heads + h * of_heads // heads)
        if counts[plane * n_rows + row] <= width:
            return
        for i in range(row * size, min((row + 1) * size, nq)):
            first = b * o_stride[0] + i * o_stride[1] + h * o_stride[2]
            for piece in range(lane, PIECES, WARP):
                out[first + piece] = ONES
            if lane < LSE_PIECES:
                lse[b * l_stride[0] + h * l_stride[1] + i * l_stride[2] + lane] = ONES

    return overflow


def overflow_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    pieces = kinds.pointer(kinds.uint16)
    signature = (INDEX, pieces, pieces, STRIDES, STRIDES, *(kinds.int32,) * 8)
    return KernelSpec("nbflash_overflow", make_overflow, cfg, signature)
