"""Products of the means of blocks, S = Q Kᵀ in float32, which a CUDA graph records.

A block of threads makes a tile of 64 × 64 products of one head. Both operands go through shared
memory, 32 columns at a time and transposed, so that a thread reads four rows at once:

    Q, K of the first step to registers               zeros past the end
    for each step of 32 columns
        Q, K to shared memory
        Q, K of the next step to registers            zeros past the last step
        S += Q Kᵀ                                     4 × 4 in the registers of a thread
    S to shared memory, and from there to its rows
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.simt.gemm import make_gemm_tn
from nbflash.cuda.tile.simt.gradient import make_store_x
from nbflash.cuda.tile.tracing import both, load, select, store, unrolled

_SIDE = 4  # products of a thread along each axis


@dataclass(frozen=True)
class BlockProductsConfig:
    """``tile``: rows of Q, and of K, of a block of threads; ``depth``: columns of a step.

    The threads are a multiple of the depth and divide a step's words: each has one column of a
    step, in several rows.
    """

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
    width (at least 1), group; tiles along m and along n.
    """
    TILE, DEPTH, THREADS, LANES, LD = cfg.tile, cfg.depth, cfg.threads, cfg.lanes, cfg.ld
    APART, COUNT = THREADS // DEPTH, TILE * DEPTH // THREADS
    K, STEP, ZERO, START = DEPTH * LD, 4 * LANES, types.float32(0), (types.float32(0),) * _SIDE**2
    PLACES = [4 * LANES * (i // 4) + i % 4 for i in range(_SIDE)]
    gemm = make_gemm_tn(_SIDE, _SIDE, LD, STEP, LD, STEP, DEPTH, unroll=1)
    put = unrolled(make_store_x(PLACES, PLACES, LD))

    @unrolled
    def fetch(x, at, width, rows, columns):
        """A thread's words of a step, in rows that are ``APART`` from each other; 0 past the end.

        There are no branches, which would make each load wait for the one before it: a thread
        loads element 0 in place of a word past the end, and drops it.
        """
        there = [both(columns > 0, rows > u * APART) for u in range(COUNT)]
        places = [select(t, at + u * APART * width, 0) for u, t in enumerate(there)]
        words = [load(x, place) for place in places]
        return tuple(select(t, word, ZERO) for t, word in zip(there, words, strict=True))

    @unrolled
    def transpose(smem, to, words):
        for u, word in enumerate(words):
            store(smem, to + u * APART, word)

    def block_products(q, k, s, m, n, width, group, tiles_m, tiles_n):
        smem = cuda.shared.array(0, types.float32)
        tid = types.int32(cuda.threadIdx.x)
        ty, tx = types.int32(tid // LANES), types.int32(tid % LANES)
        strip, column = divmod_int32(types.int32(cuda.blockIdx.x), tiles_n)
        plane, row = divmod_int32(strip, tiles_m)
        m0, n0 = types.int32(row * TILE), types.int32(column * TILE)
        r0, c0, wide = types.int32(tid // DEPTH), types.int32(tid % DEPTH), types.int64(width)
        of_q = (types.int64(plane) * m + m0 + r0) * width + c0
        of_k = (types.int64(plane // group) * n + n0 + r0) * width + c0
        rows_q, rows_k, to = types.int32(m - m0 - r0), types.int32(n - n0 - r0), c0 * LD + r0
        acc = START
        of_row = types.int32(width - c0)  # columns from this thread's on
        next_q = fetch(q, of_q, wide, rows_q, of_row)
        next_k = fetch(k, of_k, wide, rows_k, of_row)
        for first in range(DEPTH, width + DEPTH, DEPTH):
            transpose(smem, to, next_q)
            transpose(smem, K + to, next_k)
            cuda.syncthreads()  # the operands are there
            left = types.int32(of_row - first)
            next_q = fetch(q, of_q + first, wide, rows_q, left)
            next_k = fetch(k, of_k + first, wide, rows_k, left)
            # S += Q Kᵀ
            acc = gemm(acc, smem, 4 * ty, K + 4 * tx)
            cuda.syncthreads()  # all have read them
        put(smem, 4 * ty * LD + 4 * tx, acc)
        cuda.syncthreads()  # the products are there
        place = (types.int64(plane) * m + m0) * n + n0
        for e in range(tid, TILE * TILE, THREADS):
            r, c = e // TILE, e % TILE
            if r < m - m0 and c < n - n0:
                s[place + types.int64(r) * n + c] = smem[r * LD + c]

    return block_products


def block_products_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (*(kinds.pointer(kinds.float32),) * 3, *(kinds.int32,) * 6)
    return KernelSpec("nbflash_block_products", make_block_products, cfg, signature)
