"""Results of a row by several warps of a block, each of keys of its own, become one."""

from nbflash.cuda.tile.float_bits import bits_float
from nbflash.cuda.tile.guarded_max import NEG_INF, guarded
from nbflash.cuda.tile.tracing import equal, exp2, fma, load2, load4, maximum, select, unrolled
from nbflash.cuda.tile.warp_math import approximate_reciprocal
from nbflash.cuda.tile.wgmma.softmax import log_of_sum


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
