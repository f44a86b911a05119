"""dQ from its float32 sum to the storage type: the end of the Hopper backward in one pass.

    dQ = scale · sum

Blocks go backwards over the sum: the parts that the main kernel has added to last are converted
first, as they are in the L2 then.
"""

from nbflash.backends.sm90.backward.row_statistics import backwards
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.tracing import load4, store4, unrolled
from nbflash.cuda.tile.warp_math import pack_half
from nbflash.cuda.tile.wgmma.gradient import PART


def make_convert_dq_sm90(cfg):
    """The kernel: sum, target; strides of the target; nq, heads, n_col, scale.

    A block converts one 64 × 64 part of the sum; a thread 8 columns of two rows.
    """
    DTYPE, HEAD_DIM, TILE_M = cfg.dtype, cfg.head_dim, cfg.tile_m
    PARTS = TILE_M // 64 * cfg.panels

    @unrolled
    def round_rows(source, at, scale):
        """The quads' elements of two rows, packed: see :mod:`nbflash.cuda.ptx.wgmma`."""
        quads = [load4(source, at + 4 * q) for q in range(4)]
        return tuple(
            pack_half(DTYPE, x[2 * i] * scale, x[2 * i + 1] * scale)
            for i in range(2)
            for x in quads
        )

    @unrolled
    def store_upper(target, at, packed):
        store4(target, at, packed[:4])

    @unrolled
    def store_lower(target, at, packed):
        store4(target, at, packed[4:])

    def convert_dq_sm90(source, target, stride, nq, heads, n_col, scale):
        part, tid = backwards(), cuda.threadIdx.x
        slot, which = part // PARTS, types.int32(part % PARTS)
        j, r, warp = tid % 8, tid // 8 % 8, tid // 64
        row = types.int32(slot % n_col) * TILE_M + 16 * warp + r
        column = 8 * j
        if TILE_M > 64:
            row += 64 * which
        else:
            column += 64 * which
        if column < HEAD_DIM and row < nq:
            at = part * PART + 512 * j + 128 * warp + 16 * r
            packed = round_rows(source, at, scale)
            bh = slot // n_col
            to = (bh // heads) * stride[0] + (bh % heads) * stride[2] + row * stride[1] + column
            store_upper(target, to // 2, packed)
            if row + 8 < nq:
                store_lower(target, (to + 8 * stride[1]) // 2, packed)

    return convert_dq_sm90


def convert_dq_sm90_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    pointers = (kinds.pointer(kinds.float32), kinds.pointer(kinds.uint32))
    signature = (*pointers, STRIDES, *(kinds.int32,) * 3, kinds.float32)
    return KernelSpec("nbflash_convert_dq_sm90", make_convert_dq_sm90, cfg, signature)
