"""The results over the splits of a cache, joined: the second kernel of split-KV (FlashDecoding).

    m = max_s LSE_s      w_s = exp(LSE_s − m)      l = Σ_s w_s
    O = Σ_s w_s O_s / l            LSE = m + log l

A block has one row of (batch, query, head). Each of its warps reads the LSE of all splits, a lane
each, and adds up the O of splits w, w + WARPS, …, lanes along head_dim; shared memory, WARPS ×
head_dim, joins the warps. An empty split has LSE_s = −∞ and O_s = 0: its weight is 0.
"""

import math
import operator
from dataclasses import dataclass

from nbflash.constants import LN2, LOG2_E, WARP
from nbflash.kernels.spec import STRIDES, KernelSpec
from nbflash.ptx._asm import cuda, types
from nbflash.tile.copy import ACCUMULATOR, STORAGE, make_convert
from nbflash.tile.lanes import across_lanes
from nbflash.tile.softmax import guarded
from nbflash.tile.unroll import exp2, fma, load, maximum, select, store, unrolled

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


def _weight(lse, m):
    return exp2((lse - guarded(m)) * LOG2_E)


def make_combine_simt(cfg):
    """The kernel: part_o, part_lse, out, lse; strides of out; nq, heads, splits, rows.

    part_o (splits, batch, nq, heads, head_dim) and part_lse (splits, batch, heads, nq) are
    contiguous, as lse (batch, heads, nq) is; rows = batch · nq · heads, and a block for each. lse
    may be part_lse: a block reads all splits of its row before it writes what is the first's.
    """
    HEAD_DIM, WARPS, THREADS, ACC = cfg.head_dim, cfg.warps, cfg.threads, cfg.accumulator
    WIDTH, ZERO, NEG_INF = cfg.width, ACC(0), ACC(-math.inf)
    COLUMNS = range(0, WIDTH, WARP)
    O_START = (ZERO,) * len(COLUMNS)
    _, to_storage = make_convert(cfg.dtype)

    larger, weight = unrolled(maximum), unrolled(_weight)

    @unrolled
    def warp_max(x):
        return across_lanes((x,), WARP, maximum)[0]

    @unrolled
    def warp_sum(x):
        return across_lanes((x,), WARP, operator.add)[0]

    def make_add(count):
        @unrolled
        def add(acc, part_o, part_lse, m, split, rows, row, at, lane):
            """``O += w_s O_s`` for ``count`` splits, WARPS apart; all loads come first."""
            splits = [split + WARPS * u for u in range(count)]
            weights = [_weight(load(part_lse, s * rows + at), m) for s in splits]
            columns = [select(lane + c < HEAD_DIM, lane + c, 0) for c in COLUMNS]
            parts = [
                [load(part_o, (s * rows + row) * HEAD_DIM + c) for c in columns] for s in splits
            ]
            for w, o in zip(weights, parts, strict=True):
                acc = tuple(fma(w, x, total) for x, total in zip(o, acc, strict=True))
            return acc

        return add

    add_one, add_ahead = make_add(1), make_add(AHEAD)

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
        m, l, acc = NEG_INF, ZERO, O_START
        for s in range(lane, splits, WARP):
            m = larger(m, part_lse[s * rows + at])
        m = warp_max(m)
        for s in range(lane, splits, WARP):
            l += weight(part_lse[s * rows + at], m)
        l = warp_sum(l)
        # O += w_s O_s
        split = warp
        while split + (AHEAD - 1) * WARPS < splits:
            acc = add_ahead(acc, part_o, part_lse, m, split, rows, row, at, lane)
            split += AHEAD * WARPS
        while split < splits:
            acc = add_one(acc, part_o, part_lse, m, split, rows, row, at, lane)
            split += WARPS
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
            value = NEG_INF
            if l != ZERO:
                value = m + ACC(math.log2(l)) * ACC(LN2)
            lse[at] = value

    return combine_simt


def combine_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    stats = types.CPointer(cfg.accumulator)
    pointers = (stats, stats, types.CPointer(STORAGE[cfg.dtype]), stats)
    signature = (*pointers, STRIDES, *(types.int32,) * 3, types.int64)
    return KernelSpec("nbflash_combine_simt", make_combine_simt, cfg, signature)
