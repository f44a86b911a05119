"""Products of the means of blocks, S = Q Kᵀ in float32, which a CUDA graph records.

A block of threads makes a tile of 64 × 64 products of one head. Both operands go through shared
memory, 32 columns at a time and transposed, so that a thread reads four rows at once:

    for each step of 32 columns
        Q, K to shared memory                         zeros past the end
        S += Q Kᵀ                                     4 × 4 in the registers of a thread
    S to shared memory, and from there to its rows
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.simt.gemm import make_gemm_tn
from nbflash.cuda.tile.simt.gradient import make_store_x
from nbflash.cuda.tile.tracing import unrolled

_SIDE = 4  # products of a thread along each axis


@dataclass(frozen=True)
class BlockProductsConfig:
    """``tile``: rows of Q, and of K, of a block of threads; ``depth``: columns of a step."""

    tile: int = 64
    depth: int = 32
    min_blocks: int = 2

    @property
    def lanes(self):
        """Threads along each axis of a tile."""
        return self.tile // _SIDE

    @property
    def threads(self):
        return self.lanes**2

    @property
    def ld(self):
        """Words from row to row of shared memory: those of the tile and 4, for the banks."""
        return self.tile + 4

    @property
    def smem_bytes(self):
        return 4 * self.ld * max(self.tile, 2 * self.depth)


def make_block_products(cfg):
    """The kernel: q (planes, m, width), k (planes / group, n, width), s (planes, m, n); m, n,
    width, group; tiles along m and along n.
    """
    TILE, DEPTH, THREADS, LANES, LD = cfg.tile, cfg.depth, cfg.threads, cfg.lanes, cfg.ld
    K, STEP, ZERO, START = DEPTH * LD, 4 * LANES, types.float32(0), (types.float32(0),) * _SIDE**2
    PLACES = [4 * LANES * (i // 4) + i % 4 for i in range(_SIDE)]
    gemm = make_gemm_tn(_SIDE, _SIDE, LD, STEP, LD, STEP, DEPTH, unroll=1)
    put = unrolled(make_store_x(PLACES, PLACES, LD))

    @inlined
    def fill(smem, to, x, start, rows, width, first, tid):
        """``smem[to + c LD + r] = x[start + r width + first + c]``, 0 past the end."""
        for e in range(tid, TILE * DEPTH, THREADS):
            r, c = e // DEPTH, e % DEPTH
            value = ZERO
            if r < rows and first + c < width:
                value = x[start + types.int64(r) * width + (first + c)]
            smem[to + c * LD + r] = value

    def block_products(q, k, s, m, n, width, group, tiles_m, tiles_n):
        smem = cuda.shared.array(0, types.float32)
        tid = types.int32(cuda.threadIdx.x)
        ty, tx = types.int32(tid // LANES), types.int32(tid % LANES)
        strip, column = divmod_int32(types.int32(cuda.blockIdx.x), tiles_n)
        plane, row = divmod_int32(strip, tiles_m)
        m0, n0 = types.int32(row * TILE), types.int32(column * TILE)
        of_q = (types.int64(plane) * m + m0) * width
        of_k = (types.int64(plane // group) * n + n0) * width
        acc = START
        for first in range(0, width, DEPTH):
            fill(smem, 0, q, of_q, m - m0, width, first, tid)
            fill(smem, K, k, of_k, n - n0, width, first, tid)
            cuda.syncthreads()  # the operands are there
            # S += Q Kᵀ
            acc = gemm(acc, smem, 4 * ty, K + 4 * tx)
            cuda.syncthreads()  # all have read them
        put(smem, 4 * ty * LD + 4 * tx, acc)
        cuda.syncthreads()  # the products are there
        to = (types.int64(plane) * m + m0) * n + n0
        for e in range(tid, TILE * TILE, THREADS):
            r, c = e // TILE, e % TILE
            if r < m - m0 and c < n - n0:
                s[to + types.int64(r) * n + c] = smem[r * LD + c]

    return block_products


def block_products_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (*(kinds.pointer(kinds.float32),) * 3, *(kinds.int32,) * 6)
    return KernelSpec("nbflash_block_products", make_block_products, cfg, signature)
