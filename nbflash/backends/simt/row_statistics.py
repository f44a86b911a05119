"""δ = rowsum(dO ∘ O) − dLSE, the preprocessing of the backward pass (Algorithm 4, line 19).

dLSE, the gradient of the log-sum-exp, belongs here because ∂LSE/∂S = P: dS = P ∘ (dP − δ). One
warp per row of (batch, query, head); lanes stride over head_dim.
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.kinds import ACCUMULATOR, STORAGE
from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.tile.convert import make_convert
from nbflash.cuda.tile.warp_reduce import warp_sum
from nbflash.definitions.constants import WARP

WARPS = 4


@dataclass(frozen=True)
class RowConfig:
    """A kernel that gives one warp to every row of ``head_dim`` elements."""

    dtype: str
    head_dim: int
    min_blocks: int = 1
    threads: int = WARP * WARPS
    smem_bytes: int = 0

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]


def blocks_for(rows):
    """Blocks for one warp per row."""
    return -(-rows // WARPS)


def make_delta_simt(cfg):
    """The kernel: dout, out, dlse, delta; strides; nq, heads, rows = batch · nq · heads.

    The strides are those of dout and out, and of dlse along batch, heads and queries.
    """
    HEAD_DIM, ZERO = cfg.head_dim, cfg.accumulator.numba(0)
    to_accumulator, _ = make_convert(cfg.dtype)

    def delta_simt(dout, out, dlse, delta, do_stride, o_stride, l_stride, nq, heads, rows):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP
        lane = cuda.threadIdx.x % WARP
        if row < rows:
            h, i, b = row % heads, row // heads % nq, row // heads // nq
            do_base = b * do_stride[0] + i * do_stride[1] + h * do_stride[2]
            o_base = b * o_stride[0] + i * o_stride[1] + h * o_stride[2]
            total = ZERO
            for d in range(lane, HEAD_DIM, WARP):
                total += to_accumulator(dout[do_base + d]) * to_accumulator(out[o_base + d])
            total = warp_sum(total)
            if lane == 0:
                at = b * l_stride[0] + h * l_stride[1] + i * l_stride[2]
                delta[(b * heads + h) * nq + i] = total - dlse[at]

    return delta_simt


def delta_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor = kinds.pointer(STORAGE[cfg.dtype])
    pointers = (tensor, tensor, *(kinds.pointer(cfg.accumulator),) * 2)
    signature = (*pointers, *(STRIDES,) * 3, kinds.int32, kinds.int32, kinds.int64)
    return KernelSpec("nbflash_delta_simt", make_delta_simt, cfg, signature)
