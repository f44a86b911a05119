"""Results of a row by several warps of a block, each of keys of its own, become one."""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.float_bits import bits_float, float_bits
from nbflash.cuda.tile.guarded_max import NEG_INF, guarded
from nbflash.cuda.tile.mma.quantised_gemm import StoredLayout
from nbflash.cuda.tile.tracing import (
    equal,
    exp2,
    fma,
    load2,
    load4,
    maximum,
    select,
    store,
    store4,
    unrolled,
)
from nbflash.cuda.tile.warp_math import approximate_reciprocal
from nbflash.cuda.tile.wgmma.softmax import log_of_sum


def make_stored_places(cfg):
    """Where a warp puts O of products with a cache of one byte an element.

    put_o(smem, own, acc, row, quad)      from word ``own`` on
    place_of(row, column)                 the word of a column, of four that follow each other

    A lane has ``span`` columns that follow each other of each n-tile. In place of words 4 i … of 32
    stand those of 4 (i ^ x), with another x for each of eight lanes, or all would meet in one bank.
    """
    layout = StoredLayout(cfg)
    WIDTH, OF_LANE = layout.width, 2 * layout.span

    @inlined
    def rotation_of(row, c):
        """By how much the columns of a row in lane c are rotated."""
        return types.int32(row % 2 * 16 + c * 4)

    @unrolled
    def put(smem, at, acc, first_column, rotation):
        """A lane's two rows: neighbours are ``span`` n-tiles."""
        for i in range(2):
            for e in range(2):
                for t in range(0, len(acc) // 4, 4):
                    column = first_column + layout.column(t, e) ^ rotation
                    values = [float_bits(acc[4 * (t + n) + 2 * i + e]) for n in range(4)]
                    store4(smem, at + 8 * i * WIDTH + column, values)

    @inlined
    def put_o(smem, own, acc, row, quad):
        at, first = types.int32(own + row * WIDTH), types.int32(quad * OF_LANE)
        put(smem, at, acc, first, rotation_of(row, quad))

    @inlined
    def place_of(row, column):
        return row * WIDTH + (column ^ rotation_of(row, column // OF_LANE % 4))

    return put_o, place_of


@unrolled
def put_statistics(smem, at, m, l):
    """m and l of a lane's two rows, eight apart, from word ``at`` of the first on."""
    for i in range(2):
        store(smem, at + 16 * i, float_bits(m[i]))
        store(smem, at + (16 * i + 1), float_bits(l[i]))


def make_join_warps(warps, o_words, statistics_words):
    """``join(smem, at, statistics)``: O of four columns and LSE of a row that warps have parts of.

    Theirs are at words ``at + w · o_words``, not divided yet, and (m, l), m in base 2, at
    ``statistics + w · statistics_words``:

        m = max_w m_w     f_w = 2^(m_w − m)     l = Σ_w f_w l_w     O = Σ_w f_w O_w / l
    """

    @unrolled
    def join(smem, at, statistics):
        pairs = [load2(smem, statistics + w * statistics_words) for w in range(warps)]
        pairs = [[bits_float(x) for x in pair] for pair in pairs]
        best = None
        for m, l in pairs:
            known = select(equal(l, 0.0), NEG_INF, m)
            best = known if best is None else maximum(best, known)
        total = bits_float(statistics * 0)
        o = [total] * 4
        for w, (m, l) in enumerate(pairs):
            factor = select(equal(l, 0.0), 0.0, exp2(m - guarded(best)))
            total = fma(factor, l, total)
            of_warp = map(bits_float, load4(smem, at + w * o_words))
            o = [fma(factor, x, sum_) for x, sum_ in zip(of_warp, o, strict=True)]
        inverse = select(equal(total, 0.0), 0.0, approximate_reciprocal(total))
        return *(x * inverse for x in o), log_of_sum(best, total)

    return join
