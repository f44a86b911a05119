"""dQ from its accumulator to the storage type: the end of the one-pass backward."""

from nbflash.backends.simt.row_statistics import WARP, WARPS
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.tile.convert import make_convert


def make_convert_dq_simt(cfg):
    """The kernel: accumulator, target; their strides; nq, heads, rows = batch · nq · heads."""
    HEAD_DIM = cfg.head_dim
    _, to_storage = make_convert(cfg.dtype)

    def convert_dq_simt(source, target, s_stride, t_stride, nq, heads, rows):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP
        if row < rows:
            h, i, b = row % heads, row // heads % nq, row // heads // nq
            s_base = b * s_stride[0] + i * s_stride[1] + h * s_stride[2]
            t_base = b * t_stride[0] + i * t_stride[1] + h * t_stride[2]
            for d in range(cuda.threadIdx.x % WARP, HEAD_DIM, WARP):
                target[t_base + d] = to_storage(source[s_base + d])

    return convert_dq_simt


def convert_dq_simt_spec(cfg):
    """How to compile and launch the kernel of a :class:`~.row_statistics.RowConfig`."""
    pointers = (kinds.pointer(cfg.accumulator), kinds.pointer(STORAGE[cfg.dtype]))
    signature = (*pointers, STRIDES, STRIDES, kinds.int32, kinds.int32, kinds.int64)
    return KernelSpec("nbflash_convert_dq_simt", make_convert_dq_simt, cfg, signature)
