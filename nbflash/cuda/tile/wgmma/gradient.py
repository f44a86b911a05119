"""Scores and their gradients in the backward pass: fragments of Sᵀ, keys down and queries across.

A thread holds two keys of a 64 × ``tile_m`` tile (see :mod:`nbflash.cuda.ptx.wgmma`), and of each
statistic of the queries the pairs that its columns need:

    lane 4 r + q of warp w, i, e = 0, 1:   key 16 w + r + 8 i,   query 8 j + 2 q + e
    P = 2^(S · scale + shift),  dS = P ∘ (dP − δ)                shift = −LSE · log2 e

The fragments of P and dS are, packed in pairs, the A operands of dV += Pᵀ dO and dK += dSᵀ Q. A
query's shift is −∞ if it attends nothing, and NaN if its results must be: then its rows of Q and
dO have been set to zero in masked tiles, where 0 · NaN would reach keys that it does not see.
"""

from collections.abc import Callable
from typing import NamedTuple

from nbflash.cuda.ptx.wgmma import wgmma
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.score import slope_at, weighed
from nbflash.cuda.tile.tracing import (
    both,
    equal,
    exp2,
    fma,
    load,
    load2,
    load4,
    select,
    store4,
    unrolled,
)
from nbflash.cuda.tile.warp_math import pack_half
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, STEP, UPPER
from nbflash.cuda.tile.wgmma.softmax import row_of

PART = 64 * 64  # elements of dQ that one warpgroup computes


def make_hiding(tile_m, tile_n):
    """``in_interval, in_bits`` of ``(fragment, smem, mask, key)``: −∞ where a score is hidden.

    ``mask`` is where the bounds of the first pair of queries, or their words, lie; ``key`` is the
    first key's number, in the sequence or in the tile.
    """
    pairs, words = range(tile_m // 8), -(-tile_n // 32)

    def in_interval(fragment, smem, mask, key):
        keys, x = (key, key + 8), iter(fragment)
        for j in pairs:
            low, high = load2(smem, mask + 8 * j), load2(smem, mask + (tile_m + 8 * j))
            for n in range(4):
                inside = both(keys[n // 2] >= low[n % 2], keys[n // 2] < high[n % 2])
                yield select(inside, next(x), NEG_INF)

    def in_bits(fragment, smem, mask, key):
        first, bit, x = mask + key // 32, key % 32, iter(fragment)
        for j in pairs:
            seen = [load(smem, first + words * (8 * j + e)) >> bit for e in range(2)]
            for n in range(4):
                hidden = equal(seen[n % 2] & (1 << 8 * (n // 2)), 0)
                yield select(hidden, NEG_INF, next(x))

    return in_interval, in_bits


class Probabilities(NamedTuple):
    """P of scores, by two steps or by one; ``hide_…`` and ``at_once_…`` as of `make_hiding`.

    exponents(s, scales, shifts)             the first of two steps
    hide_interval, hide_bits                 of (x, smem, mask, key): −∞ for what is hidden
    weights(x)                               the second: P
    full(s, scales, shifts)                  both at once where nothing is hidden
    at_once_interval, at_once_bits           both at once of (s, scales, shifts, smem, mask, key)
    """

    exponents: Callable
    hide_interval: Callable
    hide_bits: Callable
    weights: Callable
    full: Callable
    at_once_interval: Callable
    at_once_bits: Callable


def make_probabilities(tile_m, tile_n, dtype, score=None):
    """`Probabilities` of a tile: ``scales`` are those of a thread's two keys, ``shifts`` its
    queries'.

    If score functions have slopes, there is one step alone, and it gives P, packed, and P ∘ ∂S'/∂S
    beside it: both fragments would be too many registers.
    """
    elements = range(tile_m // 2)
    sloped = score is not None and score.has_slope

    def scaled(s, scales, shifts):
        return (fma(s[i], scales[i % 4 // 2], shifts[i // 4 * 2 + i % 2]) for i in elements)

    def weighted(x, s, hidden=True):
        if not sloped:
            return tuple(map(exp2, x))
        p, packed, w = [], [], []
        for i, exponent in enumerate(x):
            p.append(exp2(exponent))
            w.append(weighed(p[i], slope_at(score, s, i), hidden))
            if i % 2:
                packed.append(pack_half(dtype, p[i - 1], p[i]))
        return tuple(packed), tuple(w)

    @unrolled
    def exponents(s, scales, shifts):
        return tuple(scaled(s, scales, shifts))

    @unrolled
    def weights(x):
        return tuple(map(exp2, x))

    @unrolled
    def full(s, scales, shifts):
        """A slope that follows from S' is finite; of others a function may make what it hides."""
        return weighted(scaled(s, scales, shifts), s, hidden=sloped and not score.slope_of_score)

    def forms(hide):
        @unrolled
        def in_place(x, smem, mask, key):
            return tuple(hide(x, smem, mask, key))

        @unrolled
        def at_once(s, scales, shifts, smem, mask, key):
            return weighted(hide(scaled(s, scales, shifts), smem, mask, key), s)

        return in_place, at_once

    interval, bits = map(forms, make_hiding(tile_m, tile_n))
    return Probabilities(
        exponents,
        hide_interval=interval[0],
        hide_bits=bits[0],
        weights=weights,
        full=full,
        at_once_interval=interval[1],
        at_once_bits=bits[1],
    )


def make_statistics(tile_m, late):
    """``values, by_keys, less_deltas``, of a thread's pairs of queries.

    ``values(stats, at)``: shifts or −δ, where the first pair's lie; ``by_keys(minus_deltas)``: a
    fragment that dP may start with; ``less_deltas(dp, stats, at)``: dP − δ of one that started with
    zeros. ``late``: the fragment is made when it is asked for, by a sum with 0; where registers are
    few they do not suffice for what ptxas would else do, to load every element twice.
    """

    def pairs(stats, at):
        return (load2(stats, at + 8 * j) for j in range(tile_m // 8))

    @unrolled
    def values(stats, at):
        return tuple(x for pair in pairs(stats, at) for x in pair)

    @unrolled
    def by_keys(minus_deltas):
        elements = [x + 0.0 for x in minus_deltas] if late else minus_deltas
        return tuple(x for j in range(0, tile_m // 4, 2) for x in 2 * elements[j : j + 2])

    @unrolled
    def less_deltas(dp, stats, at):
        minus_deltas = (x for pair in pairs(stats, at) for x in 2 * pair)
        return tuple(x + minus for x, minus in zip(dp, minus_deltas, strict=True))

    return values, by_keys, less_deltas


def make_score_gradients(tile_m, dtype):
    """``gradients, masked, pack``: dS of P and dP − δ; what counts of it; neighbours in a word."""

    @unrolled
    def gradients(p, dp):
        return tuple(x * y for x, y in zip(p, dp, strict=True))

    @unrolled
    def masked(p, ds):
        """0 where P is 0: there dP may be NaN."""
        return tuple(select(equal(x, 0.0), 0.0, y) for x, y in zip(p, ds, strict=True))

    @unrolled
    def pack(x):
        return tuple(pack_half(dtype, x[i], x[i + 1]) for i in range(0, tile_m // 2, 2))

    return gradients, masked, pack


def make_row_gradients(n):
    """``full, masked``: dS of a tile of ``n`` keys, queries down and keys across.

    ``minus_delta`` are those of a thread's two rows: see :mod:`.softmax`.
    """

    def gradient(p, dp, minus_delta, i):
        return p[i] * (dp[i] + minus_delta[row_of(i)])

    @unrolled
    def full(p, dp, minus_delta):
        return tuple(gradient(p, dp, minus_delta, i) for i in range(n // 2))

    @unrolled
    def masked(p, dp, minus_delta):
        """0 where P is 0: there dP may be NaN."""
        return tuple(
            select(equal(p[i], 0.0), 0.0, gradient(p, dp, minus_delta, i)) for i in range(n // 2)
        )

    return full, masked


def make_gemm_dq(dtype, tile_n):
    """``issue(acc, ds, k)``: a 64 × 64 part of dQ = dS K, of the lower words of dSᵀ and K."""

    @unrolled
    def issue(acc, ds, k):
        for i in range(tile_n // STEP):
            row = i * STEP * ROW_BYTES >> 4
            a, b = (ds + row, UPPER), (k + row, UPPER)
            acc = wgmma(dtype, acc, a, b, accumulate=i > 0, transpose_a=True, transpose_b=True)
        return acc

    return issue


@unrolled
def store_part(smem, at, dq):
    """A 64 × 64 fragment to shared memory in its own order; ``at`` is the thread's place."""
    for i in range(0, PART // 128, 4):
        store4(smem, at + 128 * i, dq[i : i + 4])


@unrolled
def load_part(smem, at):
    """What :func:`store_part` stored."""
    return tuple(x for i in range(0, PART // 128, 4) for x in load4(smem, at + 128 * i))
