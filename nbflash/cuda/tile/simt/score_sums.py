"""Sums by the arrays of a score function, in global memory that holds zeros.

    d array[index] += dS' · ∂S'/∂array[index]

A thread keeps the sum for one element of each array as long as the scores that it meets are made
with that element, and adds it atomically when another one comes: a score in a column of a tile has
ALiBi's slope, a distance out of reach or a key's bias in common with the one above it. Where every
score has an element of its own, that is written, and nothing is kept.

A function that a user wrote may name an element that is not there: then the first one becomes NaN,
and nothing is written outside the array.
"""

import math

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.simt.atomic import atomic_add
from nbflash.cuda.tile.tracing import unrolled


@unrolled
def add_to(memory, at, value):
    """``memory[at] += value``, atomically."""
    atomic_add(memory, at, value)


@inlined
def from_start(i, n):
    """A place that may be counted from the end, as in the arrays that a function reads."""
    return i + n if i < 0 else i


def make_flat(axes):
    """``flat(index, shape)``: the place of an element of a C-contiguous array with so many axes.

    And whether there is such an element.
    """
    if axes == 1:

        @inlined
        def last(index, shape):
            at = from_start(index[0], shape[0])
            return at, 0 <= at < shape[0]

        return last
    before = make_flat(axes - 1)

    @inlined
    def flat(index, shape):
        row, exists = before(index[:-1], shape[:-1])
        at = from_start(index[-1], shape[-1])
        return row * shape[-1] + at, exists and 0 <= at < shape[-1]

    return flat


def make_sums(axes, alone, real):
    """The steps for arrays of so many ``axes``, of which some are ``alone``: see above.

    Returns ``start, add, finish``. ``start`` is what is kept at first, ``add(kept, pairs, sums,
    ds)`` is what is kept then, and ``finish(kept, sums)`` adds it. ``pairs`` are those of
    :func:`nbflash.definitions.score_chain.chain`; ``sums`` are pairs of a pointer and a shape, of
    one element or more.
    """
    if not axes:

        @inlined
        def keep_nothing(kept, pairs, sums, ds):
            return ()

        @inlined
        def nothing(kept, sums):
            pass

        return (), keep_nothing, nothing
    start, add_others, finish_others = make_sums(axes[1:], alone[1:], real)
    ALONE, VECTOR, flat = alone[0], axes[0] == 1, make_flat(axes[0])
    ZERO, NAN = real(0), real(math.nan)

    @inlined
    def add(kept, pairs, sums, ds):
        (at, total), (index, factor), (memory, shape) = kept[0], pairs[0], sums[0]
        new, exists = flat((index,) if VECTOR else index, shape)
        if not exists:
            new, factor = 0, NAN
        if ALONE:
            memory[new] = ds * factor
        else:
            if new != at:
                if total != ZERO:
                    add_to(memory, at, total)
                at, total = new, ZERO
            total += ds * factor
        return ((at, total), *add_others(kept[1:], pairs[1:], sums[1:], ds))

    @inlined
    def finish(kept, sums):
        (at, total), (memory, _) = kept[0], sums[0]
        if not ALONE and total != ZERO:
            add_to(memory, at, total)
        finish_others(kept[1:], sums[1:])

    return ((types.int64(0), ZERO), *start), add, finish
