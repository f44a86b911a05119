"""The online softmax of the Hopper forward: P, m and l from scores in registers.

    P = 2^(S · scale − m)        l += Σ P

m is a reference that seldom changes, so P is computed before anything has looked at the scores. Its
sums tell whether m still serves:

    Σ P of a thread's part of a row     not above LIMIT    it does
                                        below HUGE         m rises, P, l and O shrink
                                        else               P is lost, and so are the scores, whose
                                                           registers it took: they are computed
                                                           once more, from memory (100 times
                                                           as slowly as the tile, and as rarely as
                                                           a score is 2^100 beyond all before)

A row that has met no key has no m yet. Until all rows of a warp have met one, m comes first; and
in the tile after one in which it has risen.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import equal, fma, load4, opaque, select, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread, unpack_half
from nbflash.cuda.tile.wgmma.softmax import (
    make_apply_keep,
    make_wgmma_softmax,
    row_of,
    row_total,
    scale_fragment,
)


def make_scores_again(cfg):
    """``scores_again(where, keep, operands, thread)``: S of a tile, from memory.

    ``where`` is the tile's first key, row tile, and batch and head in one number.
    """
    TILE_M, PIECES, SIGN = cfg.tile_m, cfg.head_dim // 8, -1.0 if cfg.negate else 1.0
    PAIRS, ZERO = cfg.tile_n // 4, types.float32(0)
    START = (ZERO,) * (2 * PAIRS)
    apply_keep = make_apply_keep(cfg.tile_n, 0)

    @unrolled
    def add_products(total, q, q_at, k, k_at):
        """``total`` and 8 products more."""
        for a, b in zip(load4(q, q_at), load4(k, k_at), strict=True):
            for x, y in zip(unpack_half(cfg.dtype, a), unpack_half(cfg.dtype, b), strict=True):
                total = fma(x, y, total)
        return total

    @unrolled
    def put(s, pair, upper, below):
        """The scores of both rows in place: ``pair`` counts a row's columns of this thread."""
        first, values = pair // 2 * 4 + pair % 2, (upper * SIGN, below * SIGN)
        return tuple(
            select(equal(first, i - 2 * row_of(i)), values[row_of(i)], x) for i, x in enumerate(s)
        )

    @inlined
    def scores_again(where, keep, operands, thread):
        (n0, row, bh), (q, k, q_stride, k_stride, nq, nk, heads, group) = where, operands
        b, h = divmod_int32(bh, heads)
        h_kv, _ = divmod_int32(h, group)
        upper, column = row * TILE_M + row_of_thread(thread), n0 + thread % 4 * 2
        q_head = b * q_stride[0] + h * q_stride[2]
        k_head = b * k_stride[0] + h_kv * k_stride[2]
        # Those behind the last row or key count nowhere.
        q_upper = (q_head + min(upper, nq - 1) * q_stride[1]) >> 1
        q_below = (q_head + min(upper + 8, nq - 1) * q_stride[1]) >> 1
        # Loops that stay loops: registers are few.
        s, pairs, pieces = START, opaque(types.int32(PAIRS)), opaque(types.int32(PIECES))
        for pair in range(pairs):
            key = min(column + (pair >> 1) * 8 + (pair & 1), nk - 1)
            k_at = (k_head + key * k_stride[1]) >> 1
            above, below = ZERO, ZERO
            for piece in range(pieces):
                above = add_products(above, q, q_upper + 4 * piece, k, k_at + 4 * piece)
                below = add_products(below, q, q_below + 4 * piece, k, k_at + 4 * piece)
            s = put(s, types.int32(pair), above, below)
        return apply_keep(s, keep)

    return scores_again


class OnlineSoftmax(NamedTuple):
    """The steps of `make_online_softmax`.

        begin(s, scale)             P, m, Σ P and ``fresh`` of a row's first scores
        attempt(s, m, scale)        P, Σ P of further ones, and whether m must rise
        careful(s, m, l, scale)     P, m, l, Σ P, ``fresh`` and α, by scores that are looked at
                                    first
        shrunk(p, m, l)             P, m, l, Σ P and α from a P that is too large
        outgrown(sums)              whether P is too large
        lost(sums)                  whether it is infinite

    ``fresh`` is whether a row of the warp has met no key yet, or m has risen; Σ P is yet to be
    added to l, and O to be multiplied by α.
    """

    begin: Callable
    attempt: Callable
    careful: Callable
    shrunk: Callable
    outgrown: Callable
    lost: Callable


def make_online_softmax(n, dtype, most=None):
    """`OnlineSoftmax` of ``n`` columns of scores and weights up to 2^``most``."""
    PAIR = (types.float32(0),) * 2
    softmax = make_wgmma_softmax(n, dtype, most)
    row_max, row_sum, reference = softmax.row_max, softmax.row_sum, softmax.reference
    exponents, lower, exponentials = softmax.exponents, softmax.lower, softmax.exponentials
    without_key, unsettled, rise = softmax.without_key, softmax.unsettled, softmax.rise
    outgrown, overshot, rescale = softmax.outgrown, softmax.overshot, softmax.rescale

    @inlined
    def begin(s, scale):
        best = row_max(s)
        m = reference(best, scale)
        weights = exponentials(exponents(s, m, scale))
        return weights, m, row_sum(PAIR, weights), without_key(best, PAIR)

    @inlined
    def attempt(s, m, scale):
        weights = exponentials(exponents(s, m, scale))
        sums = row_sum(PAIR, weights)
        return weights, sums, outgrown(sums)

    @inlined
    def raised(m, l, risen):
        """m, l and α where m rises."""
        alpha = rescale(risen)
        m = m[0] + risen[0], m[1] + risen[1]
        return m, (l[0] * alpha[0], l[1] * alpha[1]), alpha

    @inlined
    def careful(s, m, l, scale):
        e = exponents(s, m, opaque(scale))  # or the compiler computes it in all cases
        best, total = row_max(e), row_total(l)
        risen = rise(best, total)
        m, l, alpha = raised(m, l, risen)
        weights = exponentials(lower(e, risen))
        return weights, m, l, row_sum(PAIR, weights), unsettled(best, total), alpha

    @inlined
    def shrunk(weights, m, l):
        m, l, alpha = raised(m, l, overshot(row_max(weights)))
        weights = scale_fragment(weights, alpha)
        return weights, m, l, row_sum(PAIR, weights), alpha

    return OnlineSoftmax(begin, attempt, careful, shrunk, outgrown, softmax.lost)
