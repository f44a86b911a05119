"""Score functions on the two rows of a lane, whose tokens and heads may differ.

See :mod:`nbflash.cuda.tile.score`. Without functions nothing here leaves an instruction.
"""

from nbflash.backends.sm80.decode.config import KEYS
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.score import make_score
from nbflash.cuda.tile.tracing import unrolled
from nbflash.definitions.constants import LOG2_E


def make_places_of(cfg):
    """``places_of(row, key, sequence)``: where the lane's scores are, of its upper row and lower.

    ``row`` is the upper one and ``key`` the lane's first; ``sequence`` is its number, the position
    of its first token, the first head, the heads that share rows and the number of rows.
    """
    if cfg.score is None:

        @inlined
        def nowhere(row, key, sequence):
            return ()

        return nowhere

    @inlined
    def place_of(row, key, sequence):
        """Rows behind the last repeat it; a token before the first key sees nothing anywhere."""
        b, first, head, pack, count = sequence
        token, nth = divmod_int32(types.int32(min(row, count - 1)), pack)
        position = max(types.int32(first + token), types.int32(0))
        return b, types.int32(head + nth), types.int32(position), key

    @inlined
    def places_of(row, key, sequence):
        below = place_of(types.int32(row + 8), key, sequence)
        return place_of(row, key, sequence), below

    return places_of


def make_scored(cfg):
    """``scored(s, scoring)`` of a warp's 16 keys: what the functions make of scores, and its unit.

    Probabilities are 2^(score · unit − m). ``scoring`` are the lane's places, the parameters of the
    functions, and the scale.
    """
    if cfg.score is None:

        @inlined
        def same(s, scoring):
            return s, scoring[2]

        return same
    fragment, UNIT = Fragment(1, KEYS), types.float32(LOG2_E)
    rows = [[i for i in range(fragment.size) if fragment.row(i) == row] for row in range(2)]
    score = make_score(cfg.score, [(0, fragment.column(i)) for i in rows[0]], cfg.dtype)
    hold, apply, rest = score.hold, score.apply, score.rest

    @unrolled
    def upper_of(s):
        return tuple(s[i] for i in rows[0])

    @unrolled
    def below_of(s):
        return tuple(s[i] for i in rows[1])

    @unrolled
    def joined(upper, below):
        values = dict(zip(rows[0] + rows[1], (*upper, *below), strict=True))
        return tuple(values[i] for i in range(fragment.size))

    @inlined
    def scored(s, scoring):
        (above, below), params, scale = scoring
        upper = apply(upper_of(s), hold(above[1], params, scale), above, params, scale)
        lower = apply(below_of(s), hold(below[1], params, scale), below, params, scale)
        return joined(upper, lower), rest(params, scale, UNIT)

    return scored
