"""Means of blocks of tokens: one pass over q or k.

A block of threads makes the mean of one block of tokens of one head. A row of head_dim elements is
read by as many lanes as it has pieces of 16 bytes; groups of that many threads take one row each:

    group g sums the rows g, g + GROUPS, …        in registers
    mean = (Σ over groups) / rows                 over shared memory, GROUPS × head_dim

Heads are innermost in the grid: blocks that run at the same time read neighbouring memory.
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import STRIDES, KernelSpec
from nbflash.cuda.kinds import ACCUMULATOR, STORAGE
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.convert import widened
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import load, load4, store, store4, unrolled
from nbflash.cuda.tile.warp_math import unpack_half
from nbflash.definitions.constants import HALF_PRECISION, VECTOR_BYTES

THREADS = 128
_VECTOR = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements of 16 bytes


@dataclass(frozen=True)
class BlockMeansConfig:
    """``vectors``: rows are aligned to 16 bytes, and are read in pieces of 16 bytes."""

    dtype: str
    head_dim: int
    vectors: bool
    min_blocks: int = 1

    @property
    def piece(self):
        """Elements that a thread reads at once."""
        return _VECTOR[self.dtype] if self.vectors else 1

    @property
    def packed(self):
        """Elements of what addresses and strides count: two of 16 bits make a word of vectors."""
        return 2 if self.vectors and self.dtype in HALF_PRECISION else 1

    @property
    def storage(self):
        return kinds.uint32 if self.packed == 2 else STORAGE[self.dtype]

    @property
    def lanes(self):
        """Threads of a row."""
        return self.head_dim // self.piece

    @property
    def threads(self):
        return THREADS if self.lanes <= THREADS else 2 * THREADS

    @property
    def groups(self):
        """Rows that are read at a time."""
        return self.threads // self.lanes

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]

    @property
    def smem_bytes(self):
        return self.groups * self.head_dim * self.accumulator.bitwidth // 8


def block_means_config(dtype, head_dim, alignment):
    """The configuration for rows whose addresses are multiples of ``alignment`` bytes."""
    piece = _VECTOR.get(dtype)
    vectors = piece is not None and alignment == VECTOR_BYTES and head_dim % piece == 0
    return BlockMeansConfig(dtype, head_dim, vectors)


def make_block_means(cfg):
    """The kernel: x, means; strides of x in units of ``cfg.packed`` elements; tokens of a head, of
    a block; blocks and heads.

    x is (batch, n, heads, head_dim), means (batch, heads, blocks, head_dim).
    """
    DTYPE, HEAD_DIM, LANES, GROUPS = cfg.dtype, cfg.head_dim, cfg.lanes, cfg.groups
    THREADS, PIECE, STEP = cfg.threads, cfg.piece, cfg.piece // cfg.packed
    ACC, VECTORS, PACKED = cfg.accumulator.numba, cfg.vectors, cfg.packed
    ZERO = ACC(0)

    def elements(x, at):
        if not VECTORS:
            return (widened(load(x, at), DTYPE, ACC),)
        if PACKED == 1:
            return load4(x, at)
        return tuple(part for word in load4(x, at) for part in unpack_half(DTYPE, word))

    @unrolled
    def zeros(zero):
        return (zero,) * PIECE

    @unrolled
    def add(acc, x, at):
        return tuple(a + b for a, b in zip(acc, elements(x, at), strict=True))

    @unrolled
    def put(smem, at, acc):
        if VECTORS:
            store4(smem, at, acc)
        else:
            store(smem, at, acc[0])

    def block_means(x, means, stride, n, size, blocks, heads):
        smem = cuda.shared.array(0, ACC)
        tid = types.int32(cuda.threadIdx.x)
        group, lane = types.int32(tid // LANES), types.int32(tid % LANES)
        plane, h = divmod_int32(types.int32(cuda.blockIdx.x), heads)
        b, block = divmod_int32(plane, blocks)
        first = types.int64(block) * size
        end = min(first + size, types.int64(n))
        if group < GROUPS:
            acc = zeros(ZERO)
            base = b * stride[0] + h * stride[2] + lane * STEP
            for i in range(first + group, end, GROUPS):
                acc = add(acc, x, base + i * stride[1])
            put(smem, group * HEAD_DIM + lane * PIECE, acc)
        cuda.syncthreads()  # the sums of all groups are there
        rows, to = ACC(end - first), (types.int64(b * heads + h) * blocks + block) * HEAD_DIM
        for d in range(tid, HEAD_DIM, THREADS):
            total = ZERO
            for g in range(GROUPS):
                total += smem[g * HEAD_DIM + d]
            means[to + d] = types.float32(total / rows)

    return block_means


def block_means_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    pointers = kinds.pointer(cfg.storage), kinds.pointer(kinds.float32)
    signature = (*pointers, STRIDES, *(kinds.int32,) * 4)
    return KernelSpec("nbflash_block_means", make_block_means, cfg, signature)
