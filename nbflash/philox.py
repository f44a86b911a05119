"""Dropout's random numbers: Philox-4x32-10, a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Every score
has half a word of its own, which its place and the caller's seed alone determine, so that no mask
is stored: each tile of any size, in each pass and implementation, makes its part. One call serves
eight scores, those of two queries and four keys:

    philox(4 (kv // 16) + kv % 8 // 2, 8 (q // 16) + q % 8, h, b, *key(seed, offset))

              keys      k, k + 1     k + 8, k + 9     k % 16 in 0, 2, 4, 6;  q % 16 below 8
    query q             word 0       word 2           the lower half of a word is for the lower key
    query q + 8         word 1       word 3

These are the four words that a thread has of P as one wgmma step takes it, two scores each. A score
is kept if the lower 15 bits of its half are not below the threshold: 15, because patterns without a
sign order as numbers of 16 bits do, which tensor-core kernels compare two at once.
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
    b, h, r, i = np.indices((batch, heads, 8 * rows, 4 * columns), np.uint32, sparse=True)
    words = philox(i, r, h, b, *key(*map(np.uint64, state)))
    halves = np.stack([x for word in words for x in (word & MASK, word >> 16 & MASK)], axis=-1)
    # ..., q // 16, q % 8, kv // 16, kv % 8 // 2, kv // 8 % 2, q // 8 % 2, kv % 2
    halves = halves.reshape(batch, heads, rows, 8, columns, 4, 2, 2, 2)
    halves = halves.transpose(0, 1, 2, 7, 3, 4, 6, 5, 8)
    halves = halves.reshape(batch, heads, 16 * rows, 16 * columns)
    return halves[..., :nq, :nk] >= threshold(p)


def kept_at(b, h, q, kv, p, state):
    """`kept` at some places: arrays of integers that broadcast."""
    b, h, q, kv = (np.asarray(x, np.uint32) for x in (b, h, q, kv))
    place = 4 * (kv // 16) + kv % 8 // 2, 8 * (q // 16) + q % 8, h, b
    word = np.choose(2 * (kv // 8 % 2) + q // 8 % 2, philox(*place, *key(*map(np.uint64, state))))
    return (word >> 16 * (kv % 2) & MASK) >= threshold(p)
