"""Score functions in the Hopper forward: see :mod:`nbflash.cuda.tile.score`.

The softmax multiplies what comes of S by ``unit_of``. Without functions this is S itself and
scale · log2 e, and nothing here leaves an instruction.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.score import make_score, slope_at, weighed
from nbflash.cuda.tile.tracing import exp2, fma, opaque, select, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread
from nbflash.cuda.tile.wgmma.softmax import (
    column_of,
    hides,
    make_apply_keep,
    make_wgmma_softmax,
    row_of,
)
from nbflash.definitions.constants import LOG2_E


def make_scoring(cfg):
    """``where_of(row, bh, heads, scale, params, thread)`` of a row, and of its tiles
    ``scoring_of(where, row, n0, scale, params, thread)``, which `make_scored` takes.
    """
    if cfg.score is None:

        @inlined
        def nowhere(row, bh, heads, scale, params, thread):
            return types.int32(0)

        @inlined
        def only_scale(where, row, n0, scale, params, thread):
            return scale

        return nowhere, only_scale
    TILE_M = cfg.tile_m
    hold = make_score(cfg.score, (), cfg.dtype).hold

    @inlined
    def where_of(row, bh, heads, scale, params, thread):
        b, h = divmod_int32(bh, heads)
        return b, h, hold(h, params, scale), types.int32(row * TILE_M + row_of_thread(thread))

    @inlined
    def scoring_of(where, row, n0, scale, params, thread):
        b, h, held, q = where
        kv = n0 + 2 * (opaque(thread) & 3)
        return held, (b, h, q, types.int32(kv)), params, scale

    return where_of, scoring_of


def make_scored(cfg, n, part, *, with_slope=False):
    """``scored(s, scoring)`` for part ``part`` of ``n`` columns; ``unit_of(scoring)``, what the
    softmax multiplies the result with. With slopes, if there are any, they are behind the scores.
    """
    if cfg.score is None:

        @inlined
        def same(s, scoring):
            return s

        @inlined
        def scale_of(scoring):
            return scoring

        return same, scale_of
    places = [(8 * row_of(i), n * part + column_of(i)) for i in range(n // 2)]
    score, UNIT = make_score(cfg.score, places, cfg.dtype), types.float32(LOG2_E)
    step = score.apply_with_slope if with_slope and cfg.score.has_slope else score.apply
    rest = score.rest

    @inlined
    def scored(s, scoring):
        held, at, params, scale = scoring
        return step(s, held, at, params, scale)

    @inlined
    def unit_of(scoring):
        _, _, params, scale = scoring
        return rest(params, scale, UNIT)

    return scored, unit_of


def make_row_weights(cfg, n):
    """``full(x, m, unit), masked(x, m, unit, keep)``: P ∘ ∂S'/∂S of a tile of ``n`` keys.

    ``x`` is what `make_scored` makes with slopes: without any, P = 2^(S · unit − m).
    """
    code, sloped = cfg.score, cfg.score is not None and cfg.score.has_slope
    softmax = make_wgmma_softmax(n, cfg.dtype)
    exponents, exponentials = softmax.exponents, softmax.exponentials
    apply_keep = make_apply_keep(n, 0)

    @inlined
    def full(x, m, unit):
        return exponentials(exponents(x, m, unit))

    @inlined
    def masked(x, m, unit, keep):
        return exponentials(apply_keep(exponents(x, m, unit), keep))

    def exponent(x, m, unit, i):
        """One at a time: as fragments, one after the other, they would be too many registers."""
        return fma(x[i], unit, m[row_of(i)] * -1.0)

    @unrolled
    def sloped_full(x, m, unit):
        steps = ((exp2(exponent(x, m, unit, i)), slope_at(code, x, i)) for i in range(n // 2))
        return tuple(weighed(p, slope, not code.own) for p, slope in steps)

    @unrolled
    def sloped_masked(x, m, unit, keep):
        out = []
        for i in range(n // 2):
            p = exp2(select(hides(keep, i), NEG_INF, exponent(x, m, unit, i)))
            out.append(weighed(p, slope_at(code, x, i), True))
        return tuple(out)

    return (sloped_full, sloped_masked) if sloped else (full, masked)
