"""Dropout's random numbers: Philox-4x32-10, a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Every score
has a number of 15 bits, which its place and the caller's seed alone determine, so that no mask is
stored: each tile of any size, in each pass and implementation, makes its part. One call serves 32
scores, those of four queries and eight keys:

    philox(h, keys_of(kv), b, queries_of(q), *key(seed, offset)) = a, b, c, d

              keys     k, k + 1    k + 8, k + 9    k + 16, k + 17    k + 24, k + 25
    query q            a           a × b           e                 e × f
    query q + 8        b           b × a           f                 f × e
    query q + 1        c           c × d           g                 g × h
    query q + 9        d           d × c           h                 h × g

    e, f = a + M0 z, b + M1 z, z = c ^ d      g, h = c + M0 w, d + M1 w, w = a ^ b      (`further`)

queries_of is 4 (q // 16) + q % 8 // 2, keys_of 4 (kv // 32) + kv % 8 // 2; k and q are the lower
ones, even, and the lower half of a word is for key k, k + 8, k + 16 or k + 24. Where k // 32 is
odd, q and q + 1 change places. a × b (`crossed`): the lower byte of each half of a, followed by the
upper byte of the half of b. A score is kept if the lower 15 bits of its half are not below the
threshold.

Any three of the eight words are independent: what is added to one of a, b, c, d is made of two
others, by maps that have inverses, and no two words tell it. Each byte is the upper one of one
score: at p = 1/2, and wherever the threshold is a multiple of 2⁸, any three scores are independent.
The lower bytes count where the upper 7 bits are those of the threshold, once in 128: there a score
follows the upper byte of the next one in a round of four (a, a × b, b, b × a). Such neighbours have
a correlation of at most 1 / 257, whatever the threshold; all other pairs are independent, and the
probability of a score is exact. Four scores of a call are nearly independent: the mean product of
their deviations, in standard deviations, is at most 1 / 64 for p from 0.001 to 0.999, most at 1/2.

Why 15 bits: patterns without a sign order as numbers of 16 bits do, which tensor-core kernels
compare two at once. Why these places: threads of such kernels have k, k + 1, k + 8, k + 9 of q and
q + 8, or the same with queries for keys, and two share a call
(:mod:`nbflash.cuda.tile.wgmma.dropout`). `philox` runs on scalars and arrays of uint32, `compiled`
makes Numba compile it, and `make_round` makes its rounds of another arithmetic.
"""

import numpy as np

M0, M1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
W0, W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HIGH = np.uint64(32)
ROUNDS = 10
_HALVES = 2**15
MASK = np.uint32(_HALVES - 1)
_LOWER, _BYTE = np.uint32(0x00FF00FF), np.uint32(8)


def product(a, b):
    """The upper and the lower word of a product of two."""
    wide = np.uint64(a) * np.uint64(b)
    return np.uint32(wide >> _HIGH), np.uint32(wide)


def mix(a, b, c):
    """Three words combined by exclusive or."""
    return np.uint32(a ^ b ^ c)


def plus(a, b):
    """The sum of two words, modulo 2³²."""
    return np.uint32(np.uint64(a) + np.uint64(b))


def plus_product(a, m, x):
    """a + m x, modulo 2³²."""
    return np.uint32(np.uint64(a) + np.uint64(m) * np.uint64(x))


def make_round(product, mix):
    """``one(c0, c1, c2, c3, k0, k1)``: a round on a counter of four words and a key of two."""

    def one(c0, c1, c2, c3, k0, k1):
        (a, a_low), (b, b_low) = product(M0, c0), product(M1, c2)
        return mix(b, c1, k0), b_low, mix(a, c3, k1), a_low

    return one


def make_philox(one, plus):
    """``philox(c0, c1, c2, c3, k0, k1)``: four random words of a counter and a key."""

    def philox(c0, c1, c2, c3, k0, k1):
        for _ in range(ROUNDS):
            c0, c1, c2, c3 = one(c0, c1, c2, c3, k0, k1)
            k0, k1 = plus(k0, W0), plus(k1, W1)
        return c0, c1, c2, c3

    return philox


philox = make_philox(make_round(product, mix), plus)


def compiled(jit):
    """`philox` by a compiler for scalars: Numba's, for a CPU or for a GPU."""
    return jit(make_philox(jit(make_round(jit(product), jit(mix))), jit(plus)))


def make_key(philox):
    """The function that makes the key of a state, two uint64 of which every bit counts."""

    def key(seed, offset):
        seeds = np.uint32(seed), np.uint32(seed >> _HIGH)
        offsets = np.uint32(offset), np.uint32(offset >> _HIGH)
        k0, k1, _, _ = philox(*seeds, *offsets, np.uint32(0), np.uint32(0))
        return k0, k1

    return key


key = make_key(philox)


def threshold(p):
    """What dropout with probability ``p`` compares 15 bits with: smaller numbers are dropped."""
    return np.uint32(min(round(p * _HALVES), _HALVES - 1))


def factor(p):
    """What is kept is multiplied with: 1 / (1 − p) for the p that the threshold stands for."""
    return _HALVES / (_HALVES - int(threshold(p)))


def queries_of(q):
    """What a query is for the counter: the number of q, q + 1, q + 8 and q + 9, q even."""
    return (q >> 4 << 2) + (q >> 1 & 3)


def keys_of(kv):
    """What a key is for the counter: the number of kv, … kv + 9 and kv + 16, … kv + 25, kv even."""
    return (kv >> 5 << 2) + (kv >> 1 & 3)


def crossed(a, b):
    """Of two words the halves for keys that are 8 further on than those of ``a``."""
    return (a & _LOWER) << _BYTE | b >> _BYTE & _LOWER


def make_further(plus_product):
    """``further(x, y, z)``: the words of keys that are 16 further on than those of ``x`` and ``y``,
    two of a call, of whose others ``z`` is the exclusive or.
    """

    def further(x, y, z):
        return plus_product(x, M0, z), plus_product(y, M1, z)

    return further


def make_far(further):
    """``far(a, b, c, d)``: the four words of keys 16 further on than those of a call's."""

    def far(a, b, c, d):
        e, f = further(a, b, c ^ d)
        g, h = further(c, d, a ^ b)
        return e, f, g, h

    return far


further = make_further(plus_product)
far = make_far(further)


def compiled_far(jit):
    """`far` by a compiler for scalars, as `compiled`."""
    return jit(make_far(jit(make_further(jit(plus_product)))))


def kept(shape, p, state):
    """Which probabilities dropout keeps.

    Parameters
    ----------
    shape : (batch, heads, nq, nk)
    p : float
        Probability of being dropped.
    state : (int, int)
        Seed and offset.

    Returns
    -------
    bool array of ``shape``
    """
    batch, heads, nq, nk = shape
    rows, columns = -(-nq // 16), -(-nk // 32)
    b, h, r, i = np.indices((batch, heads, 4 * rows, 4 * columns), np.uint32, sparse=True)
    words = philox(h, i, b, r, *key(*map(np.uint64, state)))
    words = [x.reshape(batch, heads, rows, 4, columns, 4) for x in words]
    # ..., q // 16, q // 8 % 2, q % 8 // 2, q % 2,
    # kv // 32, kv // 16 % 2, kv // 8 % 2, kv % 8 // 2, kv % 2
    numbers = np.empty((batch, heads, rows, 2, 4, 2, columns, 2, 2, 4, 2), np.uint32)
    for step, four in enumerate((words, far(*words))):
        for n, own in enumerate(four):
            odd, below = divmod(n, 2)
            for right, halves in enumerate((own, crossed(own, four[n ^ 1]))):
                for e in range(2):
                    there = numbers[:, :, :, below, :, :, :, step, right, :, e]
                    drawn = halves >> np.uint32(16 * e) & MASK
                    there[..., odd, ::2, :] = drawn[..., ::2, :]
                    there[..., 1 - odd, 1::2, :] = drawn[..., 1::2, :]
    numbers = numbers.reshape(batch, heads, 16 * rows, 32 * columns)
    return numbers[..., :nq, :nk] >= threshold(p)


def kept_at(b, h, q, kv, p, state):
    """`kept` at some places: arrays of integers that broadcast."""
    b, h, q, kv = (np.asarray(x, np.uint32) for x in (b, h, q, kv))
    words = philox(h, keys_of(kv), b, queries_of(q), *key(*map(np.uint64, state)))
    words = [np.where(kv & 16, x, near) for near, x in zip(words, far(*words), strict=True)]
    n = 2 * ((q ^ kv >> 5) & 1) + (q >> 3 & 1)
    own, other = np.choose(n, words), np.choose(n ^ 1, words)
    halves = np.where(kv & 8, crossed(own, other), own)
    return (halves >> 16 * (kv & 1) & MASK) >= threshold(p)
