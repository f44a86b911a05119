"""Softmax weights of scores, summed by blocks: what the queries of a block attend to.

    weights (row, column) = Σ over heads of a group, queries of the row, means of the column   w
    w = exp(x − m) r       x = scale · score       m = max x       r = 1 / Σ exp(x − m)

Of each query the first ``seen`` means count. m leaves NaN out; where the sum is NaN or 0, r is 1.
No weight is written, and scores are read three times, the second time from the L1:

* `softmax_statistics`: a warp makes m, and then r, of one query.
* `block_weights`: a block of threads makes some columns of one row. A thread has one mean, and adds
  its weights in the order of heads and queries, from the first query that sees it; the means of a
  column are added over shared memory. The same scores give the same bits.
"""

import math
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import exp2, maximum, unrolled
from nbflash.cuda.tile.warp_reduce import warp_max, warp_sum
from nbflash.definitions.constants import LOG2_E, WARP

FLOATS = kinds.pointer(kinds.float32)


@dataclass(frozen=True)
class BlockWeightsConfig:
    """``threads``: a block of `block_weights` takes this many means, in whole columns."""

    threads: int = 256
    min_blocks: int = 4

    @property
    def smem_bytes(self):
        return 4 * self.threads


def _exponential(x):
    return exp2(x * LOG2_E)


def make_softmax_statistics(cfg):
    """The kernel: scores (rows, n), statistics (rows, 2); first; rows, queries, n; last, length;
    scale.

    Rows are the queries of all heads. Query i is at position ``first + i``; mean j ends at key
    ``min((j + 1) length − 1, last)``, and is seen from there.
    """
    WARPS, NEG_INF, ZERO, ONE = cfg.threads // WARP, *map(types.float32, (-math.inf, 0, 1))
    larger, finite, exponential = unrolled(maximum), unrolled(guarded), unrolled(_exponential)

    def softmax_statistics(scores, statistics, first, rows, queries, n, last, length, scale):
        tid = types.int32(cuda.threadIdx.x)
        lane, row = tid % WARP, types.int32(cuda.blockIdx.x * WARPS + tid // WARP)
        if row < rows:
            _, query = divmod_int32(row, queries)
            position, seen = types.int32(first + query), types.int32(n)
            if position < last:
                seen = types.int32(types.int32(position + 1) // length)
            at, m, total = types.int64(row) * n, NEG_INF, ZERO
            for j in range(lane, seen, WARP):
                m = larger(m, scores[at + j] * scale)
            m = finite(warp_max(m))
            for j in range(lane, seen, WARP):
                total += exponential(scores[at + j] * scale - m)
            total = warp_sum(total)
            if lane == 0:
                statistics[2 * types.int64(row)] = m
                statistics[2 * types.int64(row) + 1] = ONE / total if total > ZERO else ONE

    return softmax_statistics


def make_block_weights(cfg):
    """The kernel: scores, statistics, weights (planes, all rows, columns); first, the first row;
    queries, n; heads of a group, queries of a row, means of a column; rows that the scores have,
    and all; columns, those of a block of threads, blocks of a row; last, length; scale.

    Arguments of the same names are those of `softmax_statistics`.
    """
    THREADS, ZERO = cfg.threads, types.float32(0)
    exponential = unrolled(_exponential)

    @inlined
    def weight_of(scores, statistics, at, n, mean, scale):
        x = scores[at * n + mean] * scale
        return exponential(x - statistics[2 * at]) * statistics[2 * at + 1]

    def block_weights(
        scores, statistics, weights, first, first_row, queries, n, group, size, per_column, rows,
        all_rows, columns, together, parts, last, length, scale,
    ):  # fmt: skip
        smem = cuda.shared.array(0, types.float32)
        tid = types.int32(cuda.threadIdx.x)
        strip, part = divmod_int32(types.int32(cuda.blockIdx.x), parts)
        plane, row = divmod_int32(strip, rows)
        column = types.int64(part) * together
        start = types.int64(row) * size
        end = min(start + size, types.int64(queries))
        acc = ZERO
        for j in range(tid, together * per_column, THREADS):
            mean = column * per_column + j
            if mean < n:
                sees = min((mean + 1) * length - 1, types.int64(last))
                begin = max(start, sees - first)
                for h in range(group):
                    of_head = (types.int64(plane) * group + h) * queries
                    for i in range(begin, end):
                        acc += weight_of(scores, statistics, of_head + i, n, mean, scale)
        smem[tid] = acc
        cuda.syncthreads()  # the sums of all threads are there
        if tid < together and column + tid < columns:
            means, total = min(per_column, types.int32(THREADS)), ZERO
            for j in range(means):
                total += smem[tid * means + j]
            to = (types.int64(plane) * all_rows + first_row + row) * columns
            weights[to + column + tid] = total

    return block_weights


def softmax_statistics_spec(cfg):
    """How to compile and launch the first kernel of ``cfg``."""
    signature = FLOATS, FLOATS, kinds.int64, *(kinds.int32,) * 5, kinds.float32
    return KernelSpec("nbflash_softmax_statistics", make_softmax_statistics, cfg, signature)


def block_weights_spec(cfg):
    """How to compile and launch the second kernel of ``cfg``."""
    signature = *(FLOATS,) * 3, *(kinds.int64,) * 2, *(kinds.int32,) * 12, kinds.float32
    return KernelSpec("nbflash_block_weights", make_block_weights, cfg, signature)
