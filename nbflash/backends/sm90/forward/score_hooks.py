"""Where score functions enter a tile of :mod:`.mainloop_pingpong`; of plain scores, nowhere.

Functions take S after the product and before the mask, but for ALiBi: it is a sum, and S begins as
what is added. With room for its operand that is a product, :mod:`.alibi_gemm`.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.backends.sm90.shared.score import make_scored
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep


class ScoreHooks(NamedTuple):
    """What `make_score_hooks` returns. ``ramp`` is known to the hooks alone.

    unit_of(scoring)                                   what the softmax multiplies S with
    before_qk(acc_s, m_i, n0, unit, scoring, thread)   S to begin with, m of the tile, ``ramp``
    issue(acc_s, base, ramp)                           a product that S begins with
    after_qk(acc_s, ramp, scoring, thread)             the functions of S
    again(acc_s, keep, ramp, scoring, thread)          all of it, of S = Q Kᵀ that was lost
    after_softmax(m_i, m_row, ramp, unit)              m of the row, which was ``m_row``, where
                                                       that of the tile has changed
    """

    unit_of: Callable
    before_qk: Callable
    issue: Callable
    after_qk: Callable
    again: Callable
    after_softmax: Callable


def make_score_hooks(cfg):
    """`ScoreHooks` of every tile."""
    SCORED = cfg.score is not None
    ADDS = SCORED and cfg.score.adds
    scored, unit_of = make_scored(cfg, cfg.tile_n, 0)
    apply_keep = make_apply_keep(cfg.tile_n, 0)

    @inlined
    def before_qk(acc_s, m_i, n0, unit, scoring, thread):
        if ADDS:
            acc_s = scored(acc_s, scoring)
        return acc_s, m_i, types.int32(0)

    @inlined
    def issue(acc_s, base, ramp):
        return acc_s

    @inlined
    def after_qk(acc_s, ramp, scoring, thread):
        return acc_s if ADDS else scored(acc_s, scoring)

    @inlined
    def again(acc_s, keep, ramp, scoring, thread):
        return apply_keep(scored(acc_s, scoring), keep) if SCORED else acc_s

    @inlined
    def after_softmax(m_i, m_row, ramp, unit):
        return m_i

    return ScoreHooks(unit_of, before_qk, issue, after_qk, again, after_softmax)
