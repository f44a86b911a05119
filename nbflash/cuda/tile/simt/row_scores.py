"""Score functions on fragments of `slots`, whose rows are of several tokens and heads.

See :mod:`nbflash.cuda.tile.score`. Without functions nothing here leaves an instruction.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.score import make_score, scaled
from nbflash.cuda.tile.tracing import unrolled
from nbflash.definitions.constants import LOG2_E


def make_scored(cfg):
    """``scored(s, b, h, own, key, params)``: what the functions make of scores, in base 2.

    ``own`` is the position of the first row's token and ``h`` its head. Tokens before the first key
    see nothing anywhere.
    """
    if cfg.score is None:

        @inlined
        def same(s, b, h, own, key, params):
            return s

        return same
    score = make_score(cfg.score, [(0, u * cfg.slots) for u in range(cfg.keys)])
    rest, ONE, UNIT = score.rest, cfg.accumulator.numba(1), cfg.accumulator.numba(LOG2_E)
    of_rows = _from_row(0, cfg, score)

    @inlined
    def scored(s, b, h, own, key, params):
        s = of_rows(s, b, h, own, key, params)
        return scaled(s, rest(params, ONE, UNIT))

    return scored


def _from_row(r, cfg, score):
    """The functions on row ``r`` and on those after it."""
    if r == cfg.rows:

        @inlined
        def nothing(s, b, h, own, key, params):
            return s

        return nothing
    others, hold, apply = _from_row(r + 1, cfg, score), score.hold, score.apply
    (TOKEN, HEAD), ONE, NONE = divmod(r, cfg.pack), cfg.accumulator.numba(1), types.int32(0)
    first, end = r * cfg.keys, (r + 1) * cfg.keys

    @unrolled
    def row_of(s):
        return tuple(s[first:end])

    @unrolled
    def with_row(s, row):
        return (*s[:first], *row, *s[end:])

    @inlined
    def of_rows(s, b, h, own, key, params):
        head, position = types.int32(h + HEAD), types.int32(max(types.int32(own + TOKEN), NONE))
        at = b, head, position, key
        row = apply(row_of(s), hold(head, params, ONE), at, params, ONE)
        return others(with_row(s, row), b, h, own, key, params)

    return of_rows
