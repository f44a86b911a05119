"""Score functions in the Hopper pass over columns: see :mod:`nbflash.cuda.tile.score`.

Scores are transposed here, keys down and queries across. The loader leaves the place of a tile's
first score beside its descriptor. Without functions nothing here leaves an instruction.
"""

from nbflash.backends.sm90.backward.config import PLACE_WORDS
from nbflash.backends.sm90.shared.tile_stream import write_descriptor
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import read_descriptor
from nbflash.cuda.tile.score import make_score
from nbflash.cuda.tile.tracing import opaque
from nbflash.cuda.tile.wgmma.softmax import column_of, row_of
from nbflash.definitions.constants import LOG2_E


def make_write_place(cfg):
    """``write_place(smem, words, stage, b, h, m_block, n_block)``, for the loader."""
    PLACED, TILE_M, TILE_N, PLACES = cfg.placed, cfg.tile_m, cfg.tile_n, cfg.smem.places

    @inlined
    def write_place(smem, words, stage, b, h, m_block, n_block):
        if PLACED:
            at = words + PLACES // 4 + PLACE_WORDS * stage
            write_descriptor(smem, at, b, h, m_block * TILE_M, n_block * TILE_N)

    return write_place


def make_scoring(cfg):
    """``scoring_of(smem, place, stage, row, pair, scale, params)`` of a tile, for `make_scored`.

    ``row`` is the upper one of a thread's keys and ``pair`` its first query, in the tile.
    """
    if cfg.score is None:

        @inlined
        def nothing(smem, place, stage, row, pair, scale, params):
            return types.int32(0)

        return nothing
    PLACES = cfg.smem.places
    hold = make_score(cfg.score, (), cfg.dtype).hold

    @inlined
    def scoring_of(smem, place, stage, row, pair, scale, params):
        b, h, q, kv = read_descriptor(smem, place[1] + PLACES // 4 + PLACE_WORDS * stage)
        at = b, h, types.int32(q + pair), types.int32(kv + row)
        return hold(h, params, scale), at, params, scale

    return scoring_of


def make_scored(cfg):
    """``scored(s, scoring)``, with what the slopes follow from; ``unit_of(scale, params)``, what
    the scores are multiplied with.
    """
    code = cfg.score
    if code is None:

        @inlined
        def as_they_are(s, scoring):
            return s

        @inlined
        def scale_of(scale, params):
            return scale

        return as_they_are, scale_of
    places = [(column_of(i), 8 * row_of(i)) for i in range(cfg.tile_m // 2)]
    score, UNIT = make_score(code, places, cfg.dtype), types.float32(LOG2_E)
    step, rest = score.apply_with_slope if code.has_slope else score.apply, score.rest

    @inlined
    def scored(s, scoring):
        held, at, params, scale = scoring
        return step(s, held, at, params, scale)

    @inlined
    def unit_of(scale, params):
        return opaque(rest(params, scale, UNIT))  # where it is asked for: a register is dearer

    return scored, unit_of


def make_weights_of(cfg, pack):
    """``packed_of(p), w_of(p)``: P, packed, and P ∘ ∂S'/∂S of what `make_probabilities` gives."""
    if cfg.sloped:

        @inlined
        def first(p):
            return p[0]

        @inlined
        def second(p):
            return p[1]

        return first, second

    @inlined
    def same(p):
        return p

    return pack, same
