"""Dropout on the fragments of wgmma: P ∘ (1 − p) Z, by words that AND with P once it is packed.

A call of Philox (:mod:`nbflash.philox`) serves {q, q + 8} × {kv, kv + 1, kv + 8, kv + 9}, and of
the 16 keys of a step of P V, lane 4 r + c of a warp has

                     keys 2 c, 2 c + 1       keys 8 + 2 c, 8 + 2 c + 1
    query r          word 0                  word 2                         packed register i of
    query r + 8      word 1                  word 3                         a step: word i

so that its own call is all it needs. What a call makes of the place among the queries is the same
for a row of tiles: two of the ten rounds are done there, but for one product each.

Of a transposed fragment, keys down, lane 4 r + c has of 16 queries

                     queries 2 c, 2 c + 1    queries 8 + 2 c, 8 + 2 c + 1
    key r            register 0              register 2
    key r + 8        register 1              register 3

and of each query one half of four words, the other halves being those of key r ^ 1: of lane
4 (r ^ 1) + c, which makes the call of the odd query where this one makes that of the even one. Two
words each are exchanged.

A half is kept if its lower 15 bits are not below the threshold. As numbers of 16 bits such patterns
are in the order of integers; those of NaN, above all others, are unordered and kept, as they should
be where the threshold is none of them.
"""

import operator

import numpy as np

from nbflash import philox
from nbflash.ptx._asm import inline_ptx, inlined, ir, types
from nbflash.tile.unroll import Scalar, equal, fma, select, shuffle_xor, unrolled
from nbflash.tile.warp_math import permute, unpack_half

_AHEAD = 2  # rounds


def dropping_of(p, inverse=False):
    """The kernels' argument of that name: the threshold in both halves of a word, and the share
    1 − p of what it keeps, or its inverse; nothing without dropout.
    """
    if not p:
        return ()
    factor = philox.factor(p)
    share = np.float32(factor if inverse else 1 / factor)
    return np.uint32(philox.threshold(p) * np.uint32(0x10001)), share


def product(a, b):
    """The upper and the lower word of a product: a number and a uint32."""
    if not isinstance(b, Scalar):
        return philox.product(a, b)
    build, i64 = b.builder, ir.IntType(64)
    wide = build.mul(build.zext(b.value, i64), ir.Constant(i64, int(a)))
    upper = build.lshr(wide, ir.Constant(i64, 32))
    return tuple(b.new(types.uint32, build.trunc(x, ir.IntType(32))) for x in (upper, wide))


def plus(a, b):
    """The sum of a uint32 and a number, modulo 2³²."""
    return a + int(b) if isinstance(a, Scalar) else philox.plus(a, b)


def mix(a, b, c):
    """Three words combined by exclusive or."""
    return a ^ b ^ c


_round = philox.make_round(product, mix)


def uniform(x):
    """The same uint32 of all lanes, which the compiler then knows it to be: ``redux.sync.or``."""
    if not isinstance(x, Scalar):
        return x
    text, i32 = "redux.sync.or.b32 $0, $1, -1;", ir.IntType(32)
    value = inline_ptx(x.builder, text, "=r,r", i32, [x.value], side_effect=True)
    return x.new(x.type, value)


def kept_halves(word, threshold):
    """All bits of a half where it is kept: ``set.geu.u32.f16x2`` of what has lost its signs."""
    if not isinstance(word, Scalar):
        low, high = word & philox.MASK, word >> 16 & philox.MASK
        limit = threshold & philox.MASK
        return np.uint32((0xFFFF if low >= limit else 0) | (0xFFFF0000 if high >= limit else 0))
    text = "{ .reg .b32 x; abs.f16x2 x, $1; set.geu.u32.f16x2 $0, x, $2; }"
    i32 = ir.IntType(32)
    operands = [word.value, threshold.value]
    return word.new(types.uint32, inline_ptx(word.builder, text, "=r,r,r", i32, operands))


@unrolled
def round_keys(key):
    """Those of all rounds, in uniform registers: or the compiler would add anew for each call."""
    keys = [key]
    for _ in range(philox.ROUNDS - 1):
        k0, k1 = keys[-1]
        keys.append((plus(k0, philox.W0), plus(k1, philox.W1)))
    return tuple(uniform(k) for pair in keys for k in pair)


@unrolled
def _place_words(keys, pair, h, b):
    """What the first two rounds make of all but the number among the keys."""
    c0, c1 = product(philox.M1, h)
    upper, lower = product(philox.M0, c0 ^ pair ^ keys[0])
    return uniform(b ^ keys[1]), uniform(c1 ^ keys[2]), upper ^ keys[3], lower


@inlined
def place_words(keys, q, h, b):
    """Of the queries ``q`` and ``q + 8``, which a thread has, of one head."""
    pair = types.uint32((q >> 4 << 3) + (q & 7))
    return _place_words(keys, pair, types.uint32(h), types.uint32(b))


def words_of(i, place, keys):
    """The words of call ``i`` of a place."""
    before_c2, before_c0, before_c2_again, c3 = place
    a, a_low = product(philox.M0, i)
    b, b_low = product(philox.M1, a ^ before_c2)
    counter = b ^ before_c0, b_low, before_c2_again ^ a_low, c3
    for n in range(_AHEAD, philox.ROUNDS):
        counter = _round(*counter, *keys[2 * n : 2 * n + 2])
    return counter


def make_drop(n, part=0):
    """``drop, drop_dp`` for part ``part`` of ``n`` columns.

    ``drop(p, place, keys, threshold, i)``: of packed P what is kept. ``drop_dp(dp, minus_delta,
    …)``: (1 − p) Z ∘ dP − δ, of dP and of −δ of a thread's two rows. ``i`` is the thread's call of
    the tile's first 16 keys.
    """
    STEPS = n // 16

    def masks_of(place, keys, threshold, i):
        for step in range(STEPS):
            for word in words_of(i + 4 * (STEPS * part + step), place, keys):
                yield kept_halves(word, threshold)

    @unrolled
    def drop(p, place, keys, threshold, i):
        return tuple(map(operator.and_, p, masks_of(place, keys, threshold, i)))

    @unrolled
    def drop_dp(dp, minus_delta, place, keys, threshold, i):
        masks = enumerate(masks_of(place, keys, threshold, i))
        return tuple(
            fma(dp[2 * n + e], z, minus_delta[n % 2])
            for n, mask in masks
            for e, z in enumerate(ones(mask))
        )

    return drop, drop_dp


def ones(mask):
    """1 for each half that is kept, and 0: two float32."""
    return unpack_half("bfloat16", mask & 0x3F803F80)


def make_drop_across(tile_m):
    """``masks, drop, drop_dp`` for a fragment of ``tile_m`` queries across, keys down.

    ``masks(keys, threshold, key, q, h, b)``: of the thread's upper key and the first of its
    queries. ``drop(p, masks)`` and ``drop_dp(dp, minus_deltas, masks)`` are as those of
    `make_drop`, but that −δ is one for each query.
    """

    @unrolled
    def masks(keys, threshold, key, q, h, b):
        odd = equal(key & 1, 1)
        i = (key >> 4 << 2) + (key >> 1 & 3)
        out = []
        for step in range(tile_m // 16):
            counter = i, (q >> 4 << 3) + (q & 7) + (key & 1) + 8 * step, h, b
            for n in range(philox.ROUNDS):
                counter = _round(*counter, *keys[2 * n : 2 * n + 2])
            out += [kept_halves(word, threshold) for word in _crossed(counter, odd)]
        return tuple(out)

    @unrolled
    def drop(p, masks):
        return tuple(map(operator.and_, p, masks))

    @unrolled
    def drop_dp(dp, minus_deltas, masks):
        factors = (z for mask in masks for z in ones(mask))
        deltas = (minus_deltas[i // 4 * 2 + i % 2] for i in range(2 * len(masks)))
        return tuple(map(fma, dp, factors, deltas))

    return masks, drop, drop_dp


def _crossed(words, odd):
    """The words of a lane's scores, from its call and that of the lane with the other key."""
    sent, first, second = (
        select(odd, words[0] * 0 + selectors[0], words[0] * 0 + selectors[1])
        for selectors in ((0x5410, 0x7632), (0x3254, 0x5410), (0x3276, 0x7610))
    )
    out = []
    for a, b in ((words[0], words[2]), (words[1], words[3])):
        got = shuffle_xor(permute(a, b, sent), 4)
        out += [permute(a, got, first), permute(b, got, second)]
    return out
