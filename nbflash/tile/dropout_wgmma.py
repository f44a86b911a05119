"""Dropout on the fragments of wgmma: P ∘ (1 − p) Z, by words that AND with P once it is packed.

A call of Philox (:mod:`nbflash.philox`) serves {q, q + 1, q + 8, q + 9} × {kv, kv + 1, kv + 8,
kv + 9}. Of the 16 keys of a step of P V, lane 4 r + c of a warp has

                     keys 2 c, 2 c + 1       keys 8 + 2 c, 8 + 2 c + 1
    query r          word 0                  word 0 × 1                packed registers 0, 2
    query r + 8      word 1                  word 1 × 0                packed registers 1, 3

of the call that is lane 4 (r ^ 1) + c's too, where r is even; else it is words 2 and 3. So of two
steps, which begin at a multiple of 32, the lane whose r is even makes the call of the first one,
the other lane that of the second, where queries have changed places: what a lane needs of its own
call are words 0 and 1, and the others it sends.

Of a transposed fragment, keys down, lane 4 r + c has of 16 queries

                     queries 2 c, 2 c + 1    queries 8 + 2 c, 8 + 2 c + 1
    key r            register 0              register 2
    key r + 8        register 1              register 3

and of all four words one half. Two words are made of these, which then stand where words 0 and 1
do, and two of the halves that the other lane needs: of two steps each makes one call, as above.

What a call makes of the queries and what it makes of the keys stay apart for three rounds: what is
the same for a row of tiles is done there.

A half is kept if its lower 15 bits are not below the threshold. As numbers of 16 bits such patterns
are in the order of integers; those of NaN, above all others, are unordered and kept, as they should
be where the threshold is none of them.
"""

import operator

import numpy as np

from nbflash import philox
from nbflash.ptx._asm import inline_ptx, inlined, ir, types
from nbflash.tile.unroll import Scalar, equal, opaque, select, shuffle_xor, unrolled
from nbflash.tile.warp_math import permute

_AHEAD = 3  # rounds, in which queries and keys do not meet
_CROSSED = 0x2705  # nbflash.philox.crossed, as a selector of bytes


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


_round, _pair_of = philox.make_round(product, mix), inlined(philox.pair_of)


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


def selected(word, threshold, pair, others):
    """``pair[e]`` where half ``e`` is kept, else ``others[e]``: ``setp.geu.f16x2`` and ``selp``."""
    if not isinstance(word, Scalar):
        mask = int(kept_halves(word, threshold))
        kept = mask & 1, mask >> 31
        return tuple(map(select, kept, pair, others))
    text = """{ .reg .b32 x; .reg .pred p, q; abs.f16x2 x, $2; setp.geu.f16x2 p|q, x, $3;
    selp.f32 $0, $4, $6, p; selp.f32 $1, $5, $7, q; }"""
    both = ir.LiteralStructType([ir.FloatType()] * 2)
    operands = [x.value for x in (word, threshold, *pair, *others)]
    value = inline_ptx(word.builder, text, "=f,=f,r,r,f,f,f,f", both, operands)
    return tuple(pair[0].new(pair[0].type, word.builder.extract_value(value, e)) for e in range(2))


@unrolled
def round_keys(key):
    """Those of all rounds, in uniform registers: or the compiler would add anew for each call."""
    keys = [key]
    for _ in range(philox.ROUNDS - 1):
        k0, k1 = keys[-1]
        keys.append((plus(k0, philox.W0), plus(k1, philox.W1)))
    return tuple(uniform(k) for pair in keys for k in pair)


def _head_words(keys, h, b):
    """What the first round makes of a head, and the keys of two rounds: for queries and for keys,
    what their number is combined with, and after it their first product.
    """
    (a, a_low), (c, c_low) = product(philox.M0, h), product(philox.M1, b)
    return (a ^ keys[1], c_low ^ keys[2]), (c ^ keys[0], a_low ^ keys[3])


def _begun(multiplier, number, mixed):
    """What two rounds make of the number of a query, or of a key: two words."""
    a, a_low = product(multiplier, number ^ mixed[0])
    return a ^ mixed[1], a_low


def _apart(multiplier, begun):
    """And the third one: three."""
    word, low = begun
    return *product(multiplier, word), low


def _words(of_query, of_key, keys):
    """The words of a call."""
    (a, a_low, a_ago), (b, b_low, b_ago) = of_query, of_key
    counter = b ^ a_ago ^ keys[4], b_low, a ^ b_ago ^ keys[5], a_low
    for n in range(_AHEAD, philox.ROUNDS):
        counter = _round(*counter, *keys[2 * n : 2 * n + 2])
    return counter


def _placed(own, sent, odd):
    """The halves of a lane's scores in two steps, of what it has drawn itself and what it sends.

    Of each step those of words 0, 1, 0 × 1 and 1 × 0.
    """
    got = tuple(shuffle_xor(x, 4) for x in sent)
    for even_lane, odd_lane in ((own, got), (got, own)):
        a, b = (select(odd, y, x) for x, y in zip(even_lane, odd_lane, strict=True))
        yield a, b, permute(a, b, _CROSSED), permute(b, a, _CROSSED)


@unrolled
def _place_words(keys, number, h, b):
    queries, by_keys = _head_words(keys, h, b)
    return *map(uniform, by_keys), *_begun(philox.M1, number, queries)


@inlined
def place_words(keys, q, h, b):
    """Of the queries ``q`` and ``q + 8``, which a thread has, of one head."""
    return _place_words(keys, types.uint32(_pair_of(q)), types.uint32(h), types.uint32(b))


def make_drop(n, part=0):
    """``drop, drop_dp`` for part ``part`` of ``n`` columns, a multiple of 32.

    ``drop(p, place, keys, threshold, call)``: of packed P what is kept. ``drop_dp(dp, minus_delta,
    …)``: (1 − p) Z ∘ dP − δ, of dP and of −δ of a thread's two rows. ``call``: what the first key
    of the lane's first call is for the counter, of which 4 is there if the lane's row is odd.
    """
    PAIRS = n // 32

    def halves_of(place, keys, call):
        mixed, (word, low), odd = place[:2], place[2:], equal(call & 4, 4)
        of_query = _apart(philox.M0, (opaque(word), low))  # or three words stay in registers
        for pair in range(PAIRS * part, PAIRS * (part + 1)):
            begun = _begun(philox.M0, call + 8 * pair, mixed)
            words = _words(of_query, _apart(philox.M1, begun), keys)
            for step in _placed(words[:2], words[2:], odd):
                yield from step

    @unrolled
    def drop(p, place, keys, threshold, call):
        masks = (kept_halves(word, threshold) for word in halves_of(place, keys, call))
        return tuple(map(operator.and_, p, masks))

    @unrolled
    def drop_dp(dp, minus_delta, place, keys, threshold, call):
        out = []
        for n, word in enumerate(halves_of(place, keys, call)):
            minus = minus_delta[n % 2]
            pair = [x + minus for x in dp[2 * n : 2 * n + 2]]
            out += selected(word, threshold, pair, (minus, minus))
        return tuple(out)

    return drop, drop_dp


def make_drop_across(tile_m):
    """``masks, drop, drop_dp`` for a fragment of ``tile_m`` queries across, keys down.

    ``masks(keys, threshold, key, q, h, b)``: of the thread's upper key and the first of its
    queries. ``drop(p, masks)``: of packed P what is kept. ``drop_dp(dp, minus_deltas, masks,
    threshold)``: (1 − p) Z ∘ dP − δ, of dP − δ, and of −δ of a thread's queries.
    """

    @unrolled
    def masks(keys, threshold, key, q, h, b):
        queries, by_keys = _head_words(keys, h, b)
        odd, begun = key & 1, _begun(philox.M0, philox.pair_of(key), by_keys)
        of_key = _apart(philox.M1, begun)
        # Of words 0 and 2, or 1 and 3: lower halves for even keys, the one of query q first.
        mine = (key >> 4 & 1) * 0x4444 ^ odd * 0x2222 ^ 0x5410
        first, others = philox.pair_of(q) + 4 * odd, mine ^ 0x2222
        out = []
        for pair in range(tile_m // 32):
            begun = _begun(philox.M1, first + 8 * pair, queries)
            a, b, c, d = _words(_apart(philox.M0, begun), of_key, keys)
            own, sent = ((permute(a, c, x), permute(b, d, x)) for x in (mine, others))
            for upper, lower, below, lowest in _placed(own, sent, equal(odd, 1)):
                step = upper, below, lower, lowest
                out += [kept_halves(word, threshold) for word in step]
        return tuple(out)

    @unrolled
    def drop(p, masks):
        return tuple(map(operator.and_, p, masks))

    @unrolled
    def drop_dp(dp, minus_deltas, masks, threshold):
        out = []
        for n, mask in enumerate(masks):  # not below any threshold: without its sign it is NaN
            pair, minus = dp[2 * n : 2 * n + 2], minus_deltas[n // 2 * 2 :][:2]
            out += selected(mask, threshold, pair, minus)
        return tuple(out)

    return masks, drop, drop_dp
