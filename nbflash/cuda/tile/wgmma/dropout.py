"""Dropout on the fragments of wgmma: P ∘ (1 − p) Z, by words that AND with P once it is packed.

A call of Philox (:mod:`nbflash.definitions.philox`), of four words, serves {q, q + 1, q + 8, q + 9}
× {kv, kv + 1, kv + 8, kv + 9} and the keys 16 further on. Of the 16 keys of a step of P V, lane
4 r + c of a warp has

                     keys 2 c, 2 c + 1       keys 8 + 2 c, 8 + 2 c + 1
    query r          x                       x × y                     packed registers 0, 2
    query r + 8      y                       y × x                     packed registers 1, 3

Of a group of two steps, 32 keys, x and y are a and b in the first, and `further` in the second, of
a, b and c ^ d, if r is even; else c and d take the place of a and b. That is so of groups whose
number is even; where it is odd, queries have changed places. So of two groups each lane makes one
call, of the group whose number is as even as r: what it needs of it is always made of a, b and
c ^ d, and lane 4 (r ^ 1) + c, which it sends c, d and a ^ b to, makes the other one.

Of a transposed fragment, keys down, lane 4 r + c has of 16 queries

                     queries 2 c, 2 c + 1    queries 8 + 2 c, 8 + 2 c + 1
    key r            register 0              register 2
    key r + 8        register 1              register 3

and of four words, those of its 16 keys, one half. Two words are made of these, which then stand
where x and y do, and two of the halves that the other lane needs: of two steps each makes a call.

What a call makes of the queries and what it makes of the keys stay apart for three rounds: what is
the same for a row of tiles is done there.

A half is kept if its lower 15 bits are not below the threshold. As numbers of 16 bits such patterns
are in the order of integers; those of NaN, above all others, are unordered and kept, as they should
be where the threshold is none of them.
"""

import operator

import numpy as np

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.traced import Scalar, emit
from nbflash.cuda.tile.dropout import PLACED, make_starts
from nbflash.cuda.tile.tracing import equal, opaque_value, select, shuffle_xor, unrolled
from nbflash.cuda.tile.warp_math import permute
from nbflash.definitions import philox

_AHEAD = 3  # rounds, in which queries and keys do not meet
_ALL = 0xFFFFFFFF
_CROSSED = 0x2705  # nbflash.definitions.philox.crossed, as a selector of bytes


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
    wide = b.converted(types.uint64) * int(a)
    return (wide >> 32).converted(types.uint32), wide.converted(types.uint32)


def plus(a, b):
    """The sum of a uint32 and a number, modulo 2³²."""
    return a + int(b) if isinstance(a, Scalar) else philox.plus(a, b)


def mix(a, b, c):
    """Three words combined by exclusive or."""
    return a ^ b ^ c


def plus_product(a, m, x):
    """a + m x, modulo 2³²: of uint32, and a number ``m``."""
    return a + x * int(m) if isinstance(a, Scalar) else philox.plus_product(a, m, x)


_round, _queries_of = philox.make_round(product, mix), inlined(philox.queries_of)
_further = philox.make_further(plus_product)


def uniform(x):
    """The same uint32 of all lanes, which the compiler then knows it to be: ``redux.sync.or``."""
    if not isinstance(x, Scalar):
        return x
    return emit("redux.sync.or.b32 $0, $1, -1;", [x], x.type, keep=True)


def kept_halves(word, threshold):
    """All bits of a half where it is kept: ``set.geu.u32.f16x2`` of what has lost its signs."""
    if not isinstance(word, Scalar):
        low, high = word & philox.MASK, word >> 16 & philox.MASK
        limit = threshold & philox.MASK
        return np.uint32((0xFFFF if low >= limit else 0) | (0xFFFF0000 if high >= limit else 0))
    text = "{ .reg .b32 x; abs.f16x2 x, $1; set.geu.u32.f16x2 $0, x, $2; }"
    return emit(text, [word, threshold], types.uint32)


def selected(word, threshold, pair, others):
    """``pair[e]`` where half ``e`` is kept, else ``others[e]``: ``setp.geu.f16x2`` and ``selp``."""
    if not isinstance(word, Scalar):
        mask = int(kept_halves(word, threshold))
        kept = mask & 1, mask >> 31
        return tuple(map(select, kept, pair, others))
    text = """{ .reg .b32 x; .reg .pred p, q; abs.f16x2 x, $2; setp.geu.f16x2 p|q, x, $3;
    selp.f32 $0, $4, $6, p; selp.f32 $1, $5, $7, q; }"""
    return emit(text, [word, threshold, *pair, *others], (pair[0].type,) * 2)


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


def _exchanged(own, sent, second):
    """What a lane has of two calls, the first one first: what it keeps of its own, which is the
    ``second`` one or not, and what the lane of the neighbouring row has sent.
    """
    got = [shuffle_xor(x, 4) for x in sent]
    first = [select(second, y, x) for x, y in zip(own, got, strict=True)]
    return first, [select(second, x, y) for x, y in zip(own, got, strict=True)]


def _step(x, y):
    """The halves of a lane's scores in a step: of packed registers 0 to 3."""
    return x, y, permute(x, y, _CROSSED), permute(y, x, _CROSSED)


@unrolled
def _words_of_row(keys, number, h, b):
    queries, by_keys = _head_words(keys, h, b)
    return *map(uniform, by_keys), *_begun(philox.M1, number, queries)


@inlined
def words_of_row(keys, q, h, b):
    """Of the queries ``q`` and ``q + 8``, which a thread has, of one head."""
    return _words_of_row(keys, types.uint32(_queries_of(q)), types.uint32(h), types.uint32(b))


def _number(numbers, group, step, second=0):
    """What tokens are for the counter, of group ``group + second``: one of ``numbers``, or, if
    there is one alone, so many steps behind it.
    """
    if len(numbers) == 1:
        return numbers[0] + (second + group) * step
    if isinstance(second, int):
        return numbers[group + second]
    return select(equal(second, 1), numbers[group + 1], numbers[group])


def make_call(dropout, n):
    """``call_of(shifts, n0, thread)`` of a tile of ``n`` keys: what `make_drop` takes."""
    if dropout != PLACED:

        @inlined
        def call_behind(shifts, n0, thread):
            group = types.uint32(n0 >> 5)
            return types.uint32(4 * group + thread % 4), types.uint32((group ^ thread >> 2) & 1)

        return call_behind
    starts = make_starts(n, 1)

    @unrolled
    def numbered(starts, n0, thread):
        lane, second = thread % 4, (n0 >> 5 ^ thread >> 2) & 1
        return *((start >> 5) * 4 + lane for start in starts), second

    @inlined
    def call_at(shifts, n0, thread):
        return numbered(starts(shifts, types.uint32(n0)), types.uint32(n0), thread)

    return call_at


def make_drop(n, part=0):
    """``drop, drop_dp`` for part ``part`` of ``n`` columns, a multiple of 32.

    ``drop(p, row_words, keys, threshold, call)``: of packed P what is kept.
    ``drop_dp(dp, minus_delta, …)``: (1 − p) Z ∘ dP − δ, of dP and of −δ of a thread's two rows.
    ``row_words``: of `words_of_row`. ``call``: what the first key of the lane is for the counter,
    or the first ones in all groups of 32, and then whether the lane's first call is that of the
    second group.
    """
    GROUPS = range(n // 32 * part, n // 32 * (part + 1))

    def halves_of(row_words, keys, call):
        mixed, (word, low), (*firsts, second) = row_words[:2], row_words[2:], call
        of_query = _apart(philox.M0, (opaque_value(word), low))  # or three words stay in registers

        def words_of(group, second=0):
            begun = _begun(philox.M0, _number(firsts, group, 4, second), mixed)
            a, b, c, d = _words(of_query, _apart(philox.M1, begun), keys)
            return (a, b, c ^ d), (c, d, a ^ b)

        for group in GROUPS[::2]:
            swapped = second ^ group & 1
            if group + 1 in GROUPS:
                calls = _exchanged(*words_of(group, swapped), equal(swapped, 1))
            else:  # each makes it for itself
                pairs = zip(*words_of(group), strict=True)
                calls = [[select(equal(swapped, 1), y, x) for x, y in pairs]]
            for x, y, z in calls:
                yield from _step(x, y)
                yield from _step(*_further(x, y, z))

    @unrolled
    def drop(p, row_words, keys, threshold, call):
        masks = (kept_halves(word, threshold) for word in halves_of(row_words, keys, call))
        return tuple(map(operator.and_, p, masks))

    @unrolled
    def drop_dp(dp, minus_delta, row_words, keys, threshold, call):
        out = []
        for n, word in enumerate(halves_of(row_words, keys, call)):
            minus = minus_delta[n % 2]
            pair = [x + minus for x in dp[2 * n : 2 * n + 2]]
            out += selected(word, threshold, pair, (minus, minus))
        return tuple(out)

    return drop, drop_dp


def make_firsts(dropout, tile_m):
    """``firsts_of(shifts, q)`` of a thread's first query: what `make_drop_across` takes."""
    if dropout == PLACED:
        starts = make_starts(tile_m, 0)

        @inlined
        def placed(shifts, q):
            return starts(shifts, types.uint32(q))

        return placed

    @inlined
    def alone(shifts, q):
        return (types.uint32(q),)

    return alone


def make_drop_across(tile_m):
    """``masks, drop, drop_dp`` for a fragment of ``tile_m`` queries across, keys down.

    ``masks(keys, threshold, key, firsts, h, b)``: of the thread's upper key, and of the first of
    its queries, or of the first ones of all groups of 32. ``drop(p, masks)``: of packed P what is
    kept. ``drop_dp(dp, minus_deltas, masks, threshold)``: (1 − p) Z ∘ dP − δ, of dP − δ, and of −δ
    of a thread's queries.
    """

    @unrolled
    def masks(keys, threshold, key, firsts, h, b):
        queries, by_keys = _head_words(keys, h, b)
        odd, begun = key & 1, _begun(philox.M0, philox.keys_of(key), by_keys)
        of_key, far = _apart(philox.M1, begun), (key >> 4 & 1) * _ALL
        # Of words 0 and 2, or 1 and 3: lower halves for even keys, the one of query q first.
        mine = (key >> 5 & 1) * 0x4444 ^ odd * 0x2222 ^ 0x5410
        numbers, others = [philox.queries_of(q) + odd * 4 for q in firsts], mine ^ 0x2222
        out = []
        for pair in range(tile_m // 32):
            begun = _begun(philox.M1, _number(numbers, pair, 8), queries)
            a, b, c, d = _words(_apart(philox.M0, begun), of_key, keys)
            z, w = (c ^ d) & far, (a ^ b) & far
            (a, b), (c, d) = _further(a, b, z), _further(c, d, w)
            own, sent = ((permute(a, c, half), permute(b, d, half)) for half in (mine, others))
            for x, y in _exchanged(own, sent, equal(odd, 1)):
                upper, lower, below, lowest = _step(x, y)
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
