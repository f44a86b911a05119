"""Dropout on fragments: what Philox says of every element, as one bit of a number.

    Z = 1 / (1 − p) where an element is kept, 0 elsewhere
    O = (P ∘ Z) V      dV = (P ∘ Z)ᵀ dO      dP = dO Vᵀ ∘ Z

A fragment has its elements in runs of four keys of four queries, both of which begin at a multiple
of four: four calls of Philox serve 16 elements. What else they say is of other threads.

A configuration's ``dropout`` is False, True, or PLACED: then its queries and keys are those of a
longer sequence, of which each `DROPOUT_BLOCK` that begins at a multiple of its size lies together,
and two tables tell by block what is added to the number of a token.
"""

import numpy as np

from nbflash.cuda.kinds import pointer, several, uint32, uint64
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import equal, load, select, unrolled
from nbflash.definitions import philox
from nbflash.definitions.constants import DROPOUT_BLOCK

# The state: seed and offset, and where two more words are that change them, or zeros.
STATE = several((uint64, uint64, pointer(uint64)))

#: ``dropout`` of a configuration whose tokens are at places of a longer sequence.
PLACED = "placed"

# What is added to the number of a query, and of a key, by block.
_SHIFTS = (pointer(uint32),) * 2
_LOG_BLOCK = DROPOUT_BLOCK.bit_length() - 1

#: Elements that a fragment has at most: one bit each.
KEPT_BITS = 64

_words, _far = philox.compiled(inlined), philox.compiled_far(inlined)
_key = inlined(philox.make_key(_words))
_queries_of, _keys_of, _crossed = map(inlined, (philox.queries_of, philox.keys_of, philox.crossed))


def dropout_of(spec):
    """``dropout`` of the configurations that run an `AttentionSpec`."""
    return PLACED if spec.dropout and spec.positions is not None else bool(spec.dropout)


def dropout_signatures(dropout, real):
    """Types of the kernel's arguments ``state`` and ``drop`` (threshold, 1 / (1 − p)), or ()."""
    if not dropout:
        return (several(()),) * 2
    state = several((*STATE.parts, *_SHIFTS)) if dropout == PLACED else STATE
    return state, several((uint32, real))


@inlined
def key_of(state):
    """The key of a state, the same for all blocks of a launch."""
    return _key(state[0] ^ state[2][0], state[1] ^ state[2][1])


def make_shifts(dropout):
    """``shifts_of(state)``, and ``query_at(shifts, q), key_at(shifts, kv)``: places of the
    sequence.
    """
    if dropout != PLACED:

        @inlined
        def no_shifts(state):
            return types.int32(0)

        @inlined
        def same(shifts, token):
            return token

        return no_shifts, same, same

    @inlined
    def shifts_of(state):
        return state[3], state[4]

    @inlined
    def query_at(shifts, q):
        return types.int32(q + shifts[0][q >> _LOG_BLOCK])

    @inlined
    def key_at(shifts, kv):
        return types.int32(kv + shifts[1][kv >> _LOG_BLOCK])

    return shifts_of, query_at, key_at


def make_starts(n, side):
    """``starts(shifts, first)``: the places of every 32nd of ``n`` queries (``side`` 0) or keys (1)
    from one on, all in blocks of 32.
    """

    @unrolled
    def places(table, first):
        tokens = [first + i for i in range(0, n, 32)]
        return tuple(token + load(table, token >> _LOG_BLOCK) for token in tokens)

    @inlined
    def starts(shifts, first):
        return places(shifts[side], first)

    return starts


def make_dropout(dropout, rows, columns, row_step, column_step):
    """The steps for fragments whose element (4 i + r, 4 j + c) is ``i · row_step + r`` rows and
    ``j · column_step + c`` columns from the first; ``dropout``: of a configuration.

    Returns ``draws_of, kept, drop``. ``draws_of(state)`` is of a launch; ``kept(draws, threshold,
    b, h, q_idx, kv)``, of the fragment that begins there, has the bit ``i · columns + j`` where the
    element (i, j) is kept; ``drop(x, bits, factor)`` is X ∘ Z.
    """
    shifts_of, query_at, key_at = make_shifts(dropout)
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
    def draws_of(state):
        return key_of(state), shifts_of(state)

    @inlined
    def kept(draws, threshold, b, h, q_idx, kv):
        (key, shifts), bits = draws, NONE
        for i in range(rows - 2, -1, -2):
            row = query_at(shifts, q_idx + (i // 4 * ROW_STEP + i % 4))
            upper, lower = NONE, NONE
            for run in range(RUNS - 1, -1, -1):
                for column in (run * COLUMN_STEP + 2, run * COLUMN_STEP):
                    place = key_at(shifts, kv + column)
                    one, next_one = kept_pairs(key, threshold, b, h, row, place)
                    upper, lower = upper << TWO | one, lower << TWO | next_one
            bits = (bits << ROW | lower) << ROW | upper
        return bits

    @unrolled
    def drop(x, bits, factor):
        return tuple(times_kept(x, bits, 0, factor))

    return draws_of, kept, drop


def times_kept(x, bits, first, factor):
    """X ∘ Z for a run of elements of which the bits begin at ``first``, within unrolled code."""
    dropped = [equal(bits >> first + n & 1, 0) for n in range(len(x))]
    return [select(zero, 0.0, y * factor) for zero, y in zip(dropped, x, strict=True)]
