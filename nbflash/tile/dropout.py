"""Dropout on fragments: what `nbflash.philox` says of every element, as one bit of a number.

    Z = 1 / (1 − p) where an element is kept, 0 elsewhere
    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A fragment has its elements in runs of four along the keys that begin at a multiple of four: two
calls of Philox serve one run. What else they say is of other threads.
"""

import numpy as np

from nbflash import philox
from nbflash.ptx._asm import inlined, types
from nbflash.tile.unroll import equal, select, unrolled

# The state: seed and offset, and where two more words are that change them, or zeros.
STATE = types.Tuple((types.uint64, types.uint64, types.CPointer(types.uint64)))

#: Elements that a fragment has at most: one bit each.
KEPT_BITS = 64

_words = philox.compiled(inlined)
_key = inlined(philox.make_key(_words))


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
    NONE, ONE, TWO = (np.uint64(n) for n in (0, 1, 2))
    RUNS, ROW_STEP, COLUMN_STEP = columns // 4, row_step, column_step
    MASK, HALF = philox.MASK, np.uint32(16)

    @inlined
    def kept_pair(key, threshold, b, h, q_idx, kv):
        """Two bits, of the keys ``kv``, which is even, and the next."""
        row = np.uint32((q_idx >> 4 << 3) + (q_idx & 7))
        pair = np.uint32((kv >> 4 << 2) + (kv >> 1 & 3))
        w0, w1, w2, w3 = _words(pair, row, np.uint32(h), np.uint32(b), *key)
        upper, lower = (w2, w3) if kv & 8 else (w0, w1)
        word = lower if q_idx & 8 else upper
        first = ONE if word & MASK >= threshold else NONE
        return first | (TWO if word >> HALF & MASK >= threshold else NONE)

    @inlined
    def kept(key, threshold, b, h, q_idx, kv):
        bits = np.uint64(0)
        for i in range(rows - 1, -1, -1):
            row = q_idx + (i // 4 * ROW_STEP + i % 4)
            for run in range(RUNS - 1, -1, -1):
                for column in (run * COLUMN_STEP + 2, run * COLUMN_STEP):
                    bits = bits << TWO | kept_pair(key, threshold, b, h, row, kv + column)
        return bits

    @unrolled
    def drop(x, bits, factor):
        return tuple(times_kept(x, bits, 0, factor))

    return kept, drop


def times_kept(x, bits, first, factor):
    """X ∘ Z for a run of elements of which the bits begin at ``first``, within unrolled code."""
    dropped = [equal(bits >> first + n & 1, 0) for n in range(len(x))]
    return [select(zero, 0.0, y * factor) for zero, y in zip(dropped, x, strict=True)]
