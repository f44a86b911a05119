"""The results over the splits of a cache, joined: the second kernel of split-KV (FlashDecoding).

A block has one row of (batch, query, head): :mod:`nbflash.cuda.tile.split_kv`. Each of its warps
adds up the O of splits w, w + WARPS, …; shared memory, WARPS × head_dim, joins the warps.
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.kinds import ACCUMULATOR, STORAGE
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.convert import make_convert
from nbflash.cuda.tile.split_kv import make_join, make_statistics
from nbflash.cuda.tile.tracing import store, unrolled
from nbflash.definitions.constants import WARP

MOST_WARPS = 8
AHEAD = 4  # splits whose O a warp has in flight


@dataclass(frozen=True)
class CombineConfig:
    """``warps`` warps for every row of ``head_dim`` elements; ``dtype`` is that of the result."""

    dtype: str
    head_dim: int
    warps: int
    min_blocks: int = 1

    @property
    def threads(self):
        return WARP * self.warps

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]

    @property
    def width(self):
        """Columns of a warp in shared memory: one for every lane."""
        return -(-self.head_dim // WARP) * WARP

    @property
    def smem_bytes(self):
        return self.warps * self.width * self.accumulator.bitwidth // 8


def combine_config(dtype, head_dim, splits):
    """As many warps as have ``AHEAD`` splits each, up to ``MOST_WARPS``."""
    warps = 1
    while warps < MOST_WARPS and AHEAD * warps < splits:
        warps *= 2
    return CombineConfig(dtype, head_dim, warps)


def combine_specs(dtype, head_dim):
    """How to compile the kernels of any number of splits."""
    warps = (2**i for i in range(MOST_WARPS.bit_length()))
    return [combine_simt_spec(CombineConfig(dtype, head_dim, each)) for each in warps]


def make_combine_simt(cfg):
    """The kernel: part_o, part_lse, out, lse; strides of out; nq, heads, splits, rows.

    part_o (splits, batch, nq, heads, head_dim) and part_lse (splits, batch, heads, nq) are
    contiguous, as lse (batch, heads, nq) is; rows = batch · nq · heads, and a block for each.
    """
    HEAD_DIM, WARPS, THREADS, ACC = cfg.head_dim, cfg.warps, cfg.threads, cfg.accumulator.numba
    WIDTH, ZERO = cfg.width, ACC(0)
    COLUMNS = range(0, WIDTH, WARP)
    _, to_storage = make_convert(cfg.dtype)
    join, (_, lse_of) = make_join(HEAD_DIM, ACC, WARPS, AHEAD), make_statistics(ACC)

    @unrolled
    def put(smem, at, acc):
        for x, c in zip(acc, COLUMNS, strict=True):
            store(smem, at + c, x)

    def combine_simt(part_o, part_lse, out, lse, o_stride, nq, heads, splits, rows):
        smem = cuda.shared.array(0, ACC)
        tid, row = cuda.threadIdx.x, types.int64(cuda.blockIdx.x)
        warp, lane = tid // WARP, tid % WARP
        h, i, b = row % heads, row // heads % nq, row // heads // nq
        at = (b * heads + h) * nq + i
        acc, m, l = join(part_o, part_lse, rows, row, at, splits, warp, lane)
        put(smem, warp * WIDTH + lane, acc)
        cuda.syncthreads()  # the sums of all warps are in place
        o_base = b * o_stride[0] + i * o_stride[1] + h * o_stride[2]
        for d in range(tid, HEAD_DIM, THREADS):
            total = ZERO
            for w in range(WARPS):
                total += smem[w * WIDTH + d]
            if l != ZERO:
                total /= l
            out[o_base + d] = to_storage(total)
        if tid == 0:
            lse[at] = lse_of(m, l)

    return combine_simt


def combine_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    stats = kinds.pointer(cfg.accumulator)
    pointers = (stats, stats, kinds.pointer(STORAGE[cfg.dtype]), stats)
    signature = (*pointers, STRIDES, *(kinds.int32,) * 3, kinds.int64)
    return KernelSpec("nbflash_combine_simt", make_combine_simt, cfg, signature)
