"""The blocks of largest score of each row, in order: a bitonic sort of keys.

A block of threads sorts one row. The key of column c with score x has 64 bits:

    key = order(x) · 2³² + c        order falls as x rises; −0 is 0, and NaN is behind −∞

so that no two keys are equal, and equal scores stay in the order of their columns. A thread holds
the keys at i and j = i + 32:

    for size in 2, 4, …, capacity          sorted runs of size / 2 become runs of size
        compare the key at i with that at i ^ (size − 1)          the other run, backwards
        for stride in size / 4, …, 1
            compare the key at i with that at i ^ stride

and the smaller one goes to the lower place. The other key is in another lane; in the other slot, if
32 are flipped; from 64 on in another warp, over shared memory.
"""

import math
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.float_bits import float_bits
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import FULL_WARP, equal, select, unrolled
from nbflash.definitions.constants import WARP

MOST_COLUMNS = 2048
NAN, PADDING = 0x7FFFFFFE, 0x7FFFFFFF  # behind the order of −∞


@dataclass(frozen=True)
class BestBlocksConfig:
    """``capacity``: keys that are sorted, a power of two from 64 on."""

    capacity: int
    min_blocks: int = 1

    @property
    def threads(self):
        return self.capacity // 2

    @property
    def smem_bytes(self):
        return 8 * self.capacity if self.threads > WARP else 0


def best_blocks_config(columns):
    """The configuration for rows of so many columns, up to `MOST_COLUMNS`."""
    capacity = 2 * WARP
    while capacity < columns:
        capacity *= 2
    return BestBlocksConfig(capacity)


@unrolled
def order(x):
    """An int32 that falls as a float32 rises."""
    bits = float_bits(x + 0.0)
    return select(equal(x, x), bits ^ (bits >> 31 & 0x7FFFFFFF) ^ -1, NAN)


@inlined
def kept(own, other, i, stride):
    """Of two keys that are ``stride`` or more apart the one that belongs at i."""
    return other if (other < own) == ((i & stride) == 0) else own


def make_best_blocks(cfg):
    """The kernel: scores (rows of all planes, columns); indices (rows, width), counts; rows of a
    plane, columns, width; sinks, local; ``last``, of each row of a plane.

    Columns up to ``last`` are admissible. Of these the first ``sinks`` and the last ``local`` come
    first, as if their scores were infinite; those that are not admissible have −∞.
    """
    CAPACITY, LIMIT = cfg.capacity, types.float32(math.inf)

    @inlined
    def key_of(scores, row, column, columns, end, sinks, local):
        high = types.int32(PADDING)
        if column < columns:
            x = scores[types.int64(row) * columns + column]
            if column > end:
                x = -LIMIT
            elif column < sinks or column > end - local:
                x = LIMIT
            high = order(x)
        return (types.int64(high) << 32) | types.int64(column)

    def best_blocks(scores, indices, counts, n_rows, columns, width, sinks, local, last):
        smem = cuda.shared.array(0, types.int64)
        tid, row = types.int32(cuda.threadIdx.x), types.int32(cuda.blockIdx.x)
        i, (_, of_plane) = types.int32(2 * tid - (tid & (WARP - 1))), divmod_int32(row, n_rows)
        j, end = types.int32(i + WARP), types.int32(last[of_plane])
        a = key_of(scores, row, i, columns, end, sinks, local)
        b = key_of(scores, row, j, columns, end, sinks, local)
        size = types.int32(2)
        while size <= CAPACITY:
            flipped, stride = types.int32(size - 1), types.int32(size >> 1)
            while stride > 0:
                if flipped < WARP:
                    x = cuda.shfl_xor_sync(FULL_WARP, a, flipped)
                    y = cuda.shfl_xor_sync(FULL_WARP, b, flipped)
                elif flipped < 2 * WARP:
                    x = cuda.shfl_xor_sync(FULL_WARP, b, types.int32(flipped - WARP))
                    y = cuda.shfl_xor_sync(FULL_WARP, a, types.int32(flipped - WARP))
                else:
                    smem[i], smem[j] = a, b
                    cuda.syncthreads()  # the keys of all warps are there
                    x, y = smem[i ^ flipped], smem[j ^ flipped]
                    cuda.syncthreads()  # all have read them
                a, b = kept(a, x, i, stride), kept(b, y, j, stride)
                flipped = stride = types.int32(stride >> 1)
            size = types.int32(size << 1)
        to = types.int64(row) * width
        if i < width:
            indices[to + i] = types.int32(a)
        if j < width:
            indices[to + j] = types.int32(b)
        if tid == 0:
            counts[row] = min(max(types.int32(end + 1), types.int32(0)), types.int32(width))

    return best_blocks


def best_blocks_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (kinds.pointer(kinds.float32), INDEX, INDEX, *(kinds.int32,) * 5, INDEX)
    return KernelSpec("nbflash_best_blocks", make_best_blocks, cfg, signature)
