"""Statistics of the queries, before the Hopper backward in one pass; the sum of dQ is cleared.

    shift = −LSE · log2 e and −δ = dLSE − rowsum(dO ∘ O), tile by tile; sum of dQ = 0

Blocks go backwards over the sum: the main kernel begins with the heads that were cleared last,
which are in the L2 then. The kernel that runs after it, :mod:`.convert_dq`, has the same order.

A query that attends nothing (LSE = −∞), or that does not exist, gets shift −∞; one whose results
must be NaN gets a shift of NaN: see :mod:`nbflash.cuda.tile.wgmma.gradient`. A NaN of dLSE stays in
δ: it concerns dS alone, and no dV.
"""

import math
import operator
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.tracing import load4, store4, total, unrolled
from nbflash.cuda.tile.warp_math import unpack_half
from nbflash.cuda.tile.warp_reduce import across_lanes
from nbflash.definitions.constants import LOG2_E

THREADS = 256
CHUNK = 8  # elements that a thread reads of a row: 16 bytes


@dataclass(frozen=True)
class RowsConfig:
    """Geometry of this kernel and of :mod:`.convert_dq`: the main kernel's query tiles."""

    dtype: str
    head_dim: int
    tile_m: int
    panels: int
    threads: int = THREADS
    min_blocks: int = 1
    smem_bytes: int = 0

    @property
    def lanes(self):
        """Threads of one row, a power of two."""
        return 1 << (8 * self.panels - 1).bit_length()

    def statistics_blocks(self, rows):
        """Blocks for ``rows`` queries, of all heads and with those past the end."""
        return -(-rows * self.lanes // self.threads)


@inlined
def backwards():
    """The block's number, from the end."""
    return types.int64(cuda.gridDim.x) - 1 - cuda.blockIdx.x


def make_product(dtype):
    """``product(x, y)``: the sum of the products of 8 neighbours, four words of two."""

    def product(x, y):
        pairs = (
            pair
            for words in zip(x, y, strict=True)
            for pair in zip(*(unpack_half(dtype, word) for word in words), strict=True)
        )
        return total([x * y for x, y in pairs])

    return product


@inlined
def shift_and_minus_delta(natural, x, gradient, inside):
    """Of a query, or of none, with its LSE, rowsum(dO ∘ O) and dLSE."""
    shift, minus_delta = types.float32(-math.inf), types.float32(0)
    if inside and natural != types.float32(-math.inf):
        HUGE, TO_BASE_2 = types.float32(3e38), types.float32(-LOG2_E)
        shift, minus_delta = natural * TO_BASE_2, gradient - x
        if not (abs(natural) < HUGE and abs(x) < HUGE):
            shift = types.float32(math.nan)
    return shift, minus_delta


def make_statistics_sm90(cfg):
    """The kernel: dout, out, lse, dlse, stats, dq; strides; nq, heads, n_col, rows.

    The strides are those of dout and out, and of dlse along batch, heads and queries.
    """
    DTYPE, HEAD_DIM, TILE_M, LANES = cfg.dtype, cfg.head_dim, cfg.tile_m, cfg.lanes
    product_of = make_product(DTYPE)

    @unrolled
    def product(dout, do_at, out, o_at):
        return product_of(load4(dout, do_at), load4(out, o_at))

    @unrolled
    def row_sum(x):
        return across_lanes((x,), LANES, operator.add)[0]

    @unrolled
    def clear(dq, at, zero):
        store4(dq, at, (zero,) * 4)
        store4(dq, at + 4, (zero,) * 4)

    def statistics_sm90(
        dout, out, lse, dlse, stats, dq, do_stride, o_stride, l_stride, nq, heads, n_col, rows
    ):
        thread = backwards() * THREADS + cuda.threadIdx.x
        row, column = thread // LANES, types.int32(thread % LANES) * CHUNK
        h, i, b = row % heads, row // heads % (n_col * TILE_M), row // heads // (n_col * TILE_M)
        x, inside = types.float32(0), row < rows and i < nq
        if inside and column < HEAD_DIM:
            do_at = b * do_stride[0] + i * do_stride[1] + h * do_stride[2] + column
            o_at = b * o_stride[0] + i * o_stride[1] + h * o_stride[2] + column
            x = product(dout, do_at // 2, out, o_at // 2)
        x = row_sum(x)
        if row < rows:
            clear(dq, thread * CHUNK, types.float32(0))
            if column == 0:
                bh, natural, gradient = b * heads + h, types.float32(0), types.float32(0)
                if inside:
                    natural = lse[bh * nq + i]
                    gradient = dlse[b * l_stride[0] + h * l_stride[1] + i * l_stride[2]]
                shift, minus_delta = shift_and_minus_delta(natural, x, gradient, inside)
                at = (bh * n_col + i // TILE_M) * (2 * TILE_M) + i % TILE_M
                stats[at] = shift
                stats[at + TILE_M] = minus_delta

    return statistics_sm90


def statistics_sm90_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    halves, floats = kinds.pointer(kinds.uint32), kinds.pointer(kinds.float32)
    pointers, sizes = (halves, halves, *(floats,) * 4), (*(kinds.int32,) * 3, kinds.int64)
    signature = (*pointers, *(STRIDES,) * 3, *sizes)
    return KernelSpec("nbflash_statistics_sm90", make_statistics_sm90, cfg, signature)
