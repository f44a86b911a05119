"""Dropout's random numbers: Philox-4x32-10, a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Every score
has a number of 15 bits, which its place and the caller's seed alone determine, so that no mask is
stored: each tile of any size, in each pass and implementation, makes its part. One call serves 16
scores, those of four queries and four keys:

    philox(h, pair_of(kv), b, pair_of(q), *key(seed, offset))

              keys     k, k + 1    k + 8, k + 9    pair_of is 4 (x // 16) + x % 8 // 2; k and q are
    query q            word 0      word 0 × 1      the lower ones, even, and the lower half of
    query q + 8        word 1      word 1 × 0      a word is for key k or k + 8
    query q + 1        word 2      word 2 × 3
    query q + 9        word 3      word 3 × 2      where k // 16 is odd, q and q + 1 change places

a × b (`crossed`): the lower byte of each half of a, followed by the upper byte of the half of b. A
score is kept if the lower 15 bits of its half are not below the threshold. Each byte is the upper
one of one score: at p = 1/2, and wherever the threshold is a multiple of 2⁸, all scores are
independent. The lower bytes count where the upper 7 bits are those of the threshold, once in 128:
there a score follows the upper byte of the next one in a round of four (word 0, 0 × 1, word 1,
1 × 0). Such neighbours have a correlation of at most 1 / 257, whatever the threshold; all other
pairs are independent, and the probability of a score is exact.

Why 15 bits: patterns without a sign order as numbers of 16 bits do, which tensor-core kernels
compare two at once. Why these places: threads of such kernels have k, k + 1, k + 8, k + 9 of q and
q + 8, or the same with queries for keys, and two share a call (:mod:`nbflash.tile.dropout_wgmma`).
`philox` runs on scalars and arrays of uint32, `compiled` makes Numba compile it, and `make_round`
makes its rounds of another arithmetic.
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


def pair_of(x):
    """What a query or a key is for the counter: the number of x, x + 1, x + 8 and x + 9, x even."""
    return (x >> 4 << 2) + (x >> 1 & 3)


def crossed(a, b):
    """Of two words the halves for keys that are 8 further on than those of ``a``."""
    return (a & _LOWER) << _BYTE | b >> _BYTE & _LOWER


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
    rows, columns = -(-nq // 16), -(-nk // 16)
    b, h, r, i = np.indices((batch, heads, 4 * rows, 4 * columns), np.uint32, sparse=True)
    words = philox(h, i, b, r, *key(*map(np.uint64, state)))
    words = [x.reshape(batch, heads, rows, 4, columns, 4) for x in words]
    # ..., q // 16, q // 8 % 2, q % 8 // 2, q % 2, kv // 16, kv // 8 % 2, kv % 8 // 2, kv % 2
    numbers = np.empty((batch, heads, rows, 2, 4, 2, columns, 2, 4, 2), np.uint32)
    for n, own in enumerate(words):
        odd, below = divmod(n, 2)
        for right, halves in enumerate((own, crossed(own, words[n ^ 1]))):
            for e in range(2):
                there = numbers[:, :, :, below, :, :, :, right, :, e]
                drawn = halves >> np.uint32(16 * e) & MASK
                there[..., odd, ::2, :] = drawn[..., ::2, :]
                there[..., 1 - odd, 1::2, :] = drawn[..., 1::2, :]
    numbers = numbers.reshape(batch, heads, 16 * rows, 16 * columns)
    return numbers[..., :nq, :nk] >= threshold(p)


def kept_at(b, h, q, kv, p, state):
    """`kept` at some places: arrays of integers that broadcast."""
    b, h, q, kv = (np.asarray(x, np.uint32) for x in (b, h, q, kv))
    words = philox(h, pair_of(kv), b, pair_of(q), *key(*map(np.uint64, state)))
    n = 2 * ((q ^ kv >> 4) & 1) + (q >> 3 & 1)
    own, other = np.choose(n, words), np.choose(n ^ 1, words)
    halves = np.where(kv & 8, crossed(own, other), own)
    return (halves >> 16 * (kv & 1) & MASK) >= threshold(p)
