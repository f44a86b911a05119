"""Dropout on fragments: what Philox says of every element, as one bit of a number.

    Z = 1 / (1 − p) where an element is kept, 0 elsewhere
    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A fragment has its elements in runs of four keys of four queries, both of which begin at a multiple
of four: four calls of Philox serve 16 elements. What else they say is of other threads.
"""

import numpy as np

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import equal, select, unrolled
from nbflash.definitions import philox

# The state: seed and offset, and where two more words are that change them, or zeros.
STATE = types.Tuple((types.uint64, types.uint64, types.CPointer(types.uint64)))

#: Elements that a fragment has at most: one bit each.
KEPT_BITS = 64

_words, _far = philox.compiled(inlined), philox.compiled_far(inlined)
_key = inlined(philox.make_key(_words))
_queries_of, _keys_of, _crossed = map(inlined, (philox.queries_of, philox.keys_of, philox.crossed))


def dropout_signatures(on, real):
    """Types of the kernel's arguments ``state`` and ``drop`` (threshold, 1 / (1 − p)), or ()."""
    return (STATE, types.Tuple((types.uint32, real))) if on else (types.Tuple(()),) * 2


@inlined
def key_of(state):
    """The key of a state, the same for all blocks of a launch."""
    seed, offset, more = state
    return _key(seed ^ more[0], offset ^ more[1])


def make_dropout(rows, columns, row_step, column_step):
    """The steps for fragments whose element (4 i + r, 4 j + c) is ``i · row_step + r`` rows and
    ``j · column_step + c`` columns from the first.

    Returns ``kept, drop``. ``kept(key, threshold, b, h, q_idx, kv)``, of the fragment that begins
    there, has the bit ``i · columns + j`` where the element (i, j) is kept;
    ``drop(x, bits, factor)`` is X ∘ Z.
    """
    NONE, ONE, TWO, ROW = (np.uint64(n) for n in (0, 1, 2, columns))
    RUNS, ROW_STEP, COLUMN_STEP = columns // 4, row_step, column_step
    MASK, HALF = philox.MASK, np.uint32(16)

    @inlined
    def two_bits(halves, threshold):
        first = ONE if halves & MASK >= threshold else NONE
        return first | (TWO if halves >> HALF & MASK >= threshold else NONE)

    @inlined
    def kept_pairs(key, threshold, b, h, q_idx, kv):
        """Two bits of each of the queries ``q_idx``, which is even, and the next: those of the keys
        ``kv``, which is even, and the next.
        """
        places = np.uint32(_keys_of(kv)), np.uint32(_queries_of(q_idx))
        w0, w1, w2, w3 = _words(np.uint32(h), places[0], np.uint32(b), places[1], *key)
        if kv & 16:
            w0, w1, w2, w3 = _far(w0, w1, w2, w3)
        if q_idx & 8:
            w0, w1, w2, w3 = w1, w0, w3, w2
        if kv & 8:
            w0, w2 = np.uint32(_crossed(w0, w1)), np.uint32(_crossed(w2, w3))
        if kv & 32:
            w0, w2 = w2, w0
        return two_bits(w0, threshold), two_bits(w2, threshold)

    @inlined
    def kept(key, threshold, b, h, q_idx, kv):
        bits = NONE
        for i in range(rows - 2, -1, -2):
            row = q_idx + (i // 4 * ROW_STEP + i % 4)
            upper, lower = NONE, NONE
            for run in range(RUNS - 1, -1, -1):
                for column in (run * COLUMN_STEP + 2, run * COLUMN_STEP):
                    one, next_one = kept_pairs(key, threshold, b, h, row, kv + column)
                    upper, lower = upper << TWO | one, lower << TWO | next_one
            bits = (bits << ROW | lower) << ROW | upper
        return bits

    @unrolled
    def drop(x, bits, factor):
        return tuple(times_kept(x, bits, 0, factor))

    return kept, drop


def times_kept(x, bits, first, factor):
    """X ∘ Z for a run of elements of which the bits begin at ``first``, within unrolled code."""
    dropped = [equal(bits >> first + n & 1, 0) for n in range(len(x))]
    return [select(zero, 0.0, y * factor) for zero, y in zip(dropped, x, strict=True)]
