"""Two parts of an attention become one, in place where the caller likes: `nbflash.merging`.

    LSE = log(exp LSE_a + exp LSE_b)      w_p = exp(LSE_p − LSE)      O = w_a O_a + w_b O_b

Part a, and the result, have rows that part b lacks: those stay as they are. Each element is read
once and written once; for many contiguous splits of a few rows there is
:mod:`nbflash.backends.split_kv.combine` instead.
Gradients of parts add up: the same, with weights of 1.

    a block has QUERIES queries of HEADS heads
    a thread of each row reads both LSE, writes the joint one, and puts the weights in shared memory
    the block goes over the elements of its rows, LANES of them an access
"""

import math
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, STRIDES, KernelSpec
from nbflash.cuda.kinds import ACCUMULATOR, STORAGE
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.convert import as_stored, widened
from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.tracing import load, load2, opaque_value, select, store, store4, unrolled

#: Of a block: neighbouring LSE of a head fill a sector, neighbouring heads of a query a line.
QUERIES = HEADS = 8
ROWS = QUERIES * HEADS
THREADS = 256
ABSENT = -1.0  # in place of a weight: the part attends nothing, and its O is not to be used


@dataclass(frozen=True)
class MergeConfig:
    """Dtypes of part a and the result, and of part b; ``lanes`` elements are one access.

    ``indexed``: an array says which rows of part a the rows of part b are. ``weighted``: by LSE;
    otherwise parts are added, and there are no LSE.
    """

    dtype: str
    part_dtype: str
    head_dim: int
    lanes: int
    indexed: bool
    weighted: bool = True
    threads: int = THREADS
    min_blocks: int = 1

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]

    @property
    def vectors(self):
        """Accesses that a thread has under way: one in each half of a row, where it has two."""
        return math.gcd(2, self.head_dim // self.lanes)

    @property
    def smem_bytes(self):
        return 2 * ROWS * self.accumulator.bitwidth // 8


def make_weights(accumulator):
    """``weights(lse_a, lse_b)``: those of both parts, `ABSENT` among them, and the joint LSE."""
    ZERO, NEG_INF = accumulator(0), accumulator(-math.inf)
    SKIP = accumulator(ABSENT)

    @unrolled
    def shift_of(m):
        return guarded(m)

    @inlined
    def weights(lse_a, lse_b):
        larger = lse_a if lse_a > lse_b else lse_b
        shift = shift_of(larger)
        p_a = accumulator(math.exp(lse_a - shift))
        p_b = accumulator(math.exp(lse_b - shift))
        total = p_a + p_b
        lse = total  # NaN, of an LSE that is NaN or infinite
        if total >= ZERO:
            lse = larger + accumulator(math.log1p(p_a if p_a < p_b else p_b))
        w_a, w_b = p_a / total, p_b / total
        if lse_a == NEG_INF:
            w_a = SKIP
        if lse_b == NEG_INF:
            w_b = SKIP
        return w_a, w_b, lse

    return weights


def make_merge(cfg):
    """The kernel: O and LSE of part a, of part b, and of the result, which may be those of part a;
    places of the rows of part b; strides of O and of LSE of each; n, heads.

    Part b has ``n`` queries; blocks are batch elements by queries by heads.
    """
    ACC, DTYPE, PART, LANES = cfg.accumulator.numba, cfg.dtype, cfg.part_dtype, cfg.lanes
    INDEXED, WEIGHTED, ZERO, ONE = cfg.indexed, cfg.weighted, ACC(0), ACC(1)
    APART = cfg.head_dim // cfg.vectors
    PIECES, STEPS = APART // LANES, range(0, cfg.head_dim, APART)
    weights = make_weights(ACC)

    def loaded(memory, at):
        return load2(memory, at, LANES) if LANES > 1 else (load(memory, at),)

    def weighted(vectors, dtype, weight):
        """``w O``, rounded by itself: to the bit the same in whatever order parts are added."""
        absent = weight < 0  # a NaN is not
        values = (widened(x, dtype, ACC) for vector in vectors for x in vector)
        return [select(absent, ZERO, opaque_value(x * weight)) for x in values]

    @unrolled
    def merge_piece(out_a, at_a, w_a, out_b, at_b, w_b, out, at):
        """All loads come first: the result may be where part a is."""
        a, b = [loaded(out_a, at_a + c) for c in STEPS], [loaded(out_b, at_b + c) for c in STEPS]
        pairs = zip(weighted(a, DTYPE, w_a), weighted(b, PART, w_b), strict=True)
        merged = [as_stored(x + y, DTYPE) for x, y in pairs]
        for c in STEPS:
            vector, merged = merged[:LANES], merged[LANES:]
            if LANES > 1:
                store4(out, at + c, vector)
            else:
                store(out, at + c, vector[0])

    def merge_parts(
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        places,
        a_stride,
        la_stride,
        b_stride,
        lb_stride,
        o_stride,
        l_stride,
        n,
        heads,
    ):
        smem = cuda.shared.array(0, ACC)
        tid = types.int32(cuda.threadIdx.x)
        across, along = -(-heads // HEADS), -(-n // QUERIES)
        block = types.int32(cuda.blockIdx.x)
        first_head = types.int32(block % across * HEADS)
        first = types.int32(block // across % along * QUERIES)
        b = types.int64(block // across // along)
        there_heads = min(types.int32(HEADS), types.int32(heads - first_head))
        rows = types.int32(there_heads * min(types.int32(QUERIES), types.int32(n - first)))
        w_a, w_b = ONE, ONE
        i, h = types.int32(first + tid % QUERIES), types.int32(first_head + tid // QUERIES)
        if WEIGHTED and tid < ROWS and i < n and h < heads:
            row = types.int64(places[i] if INDEXED else i)
            in_a = b * la_stride[0] + h * la_stride[1] + row * la_stride[2]
            in_b = b * lb_stride[0] + h * lb_stride[1] + i * lb_stride[2]
            w_a, w_b, joint = weights(lse_a[in_a], lse_b[in_b])
            lse[b * l_stride[0] + h * l_stride[1] + row * l_stride[2]] = joint
            smem[2 * tid], smem[2 * tid + 1] = w_a, w_b
        cuda.syncthreads()  # the weights of all rows are there
        for piece in range(tid, rows * PIECES, THREADS):
            of_block = types.int32(piece // PIECES)
            d = types.int32(piece % PIECES) * LANES
            query = types.int32(of_block // there_heads)
            head = types.int32(of_block % there_heads)
            if WEIGHTED:
                w = types.int32(2 * (head * QUERIES + query))
                w_a, w_b = smem[w], smem[w + 1]
            i, h = types.int32(first + query), types.int32(first_head + head)
            row = types.int64(places[i] if INDEXED else i)
            at_a = b * a_stride[0] + row * a_stride[1] + h * a_stride[2] + d
            at_b = b * b_stride[0] + i * b_stride[1] + h * b_stride[2] + d
            at = b * o_stride[0] + row * o_stride[1] + h * o_stride[2] + d
            merge_piece(out_a, at_a, w_a, out_b, at_b, w_b, out, at)

    return merge_parts


def merge_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    of_lse = kinds.pointer(cfg.accumulator)
    whole, part = (kinds.pointer(STORAGE[dtype]) for dtype in (cfg.dtype, cfg.part_dtype))
    signature = (whole, of_lse, part, of_lse, whole, of_lse, INDEX, *(STRIDES,) * 6)
    signature += kinds.int32, kinds.int32
    return KernelSpec("nbflash_merge", make_merge, cfg, signature)
