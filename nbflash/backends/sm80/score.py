"""Score functions in these kernels: see :mod:`nbflash.cuda.tile.score`.

Without functions nothing here leaves an instruction.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.score import make_score
from nbflash.definitions.constants import LOG2_E


def make_scored(cfg, places, *, with_slope=False):
    """``scored(s, h, at, params, scale)`` and ``unit_of(params, scale)``, what the result is
    multiplied with in base 2.

    ``at`` is where the lane's first score is, (b, h, query, key); ``places`` are those of all, from
    there. With slopes, if there are any, they are behind the scores.
    """
    if cfg.score is None:

        @inlined
        def same(s, at, params, scale):
            return s

        @inlined
        def scale_of(params, scale):
            return scale

        return same, scale_of
    score, UNIT = make_score(cfg.score, places, cfg.dtype), types.float32(LOG2_E)
    step = score.apply_with_slope if with_slope and cfg.score.has_slope else score.apply
    hold, rest = score.hold, score.rest

    @inlined
    def scored(s, at, params, scale):
        _, h, _, _ = at
        return step(s, hold(h, params, scale), at, params, scale)

    @inlined
    def unit_of(params, scale):
        return rest(params, scale, UNIT)

    return scored, unit_of
