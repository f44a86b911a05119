"""Infinities and NaN in shared memory: 0 times one of them is no 0."""

import math

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import equal, load4, opaque, select, store4, unrolled

SIGNS = 0x80008000  # where a carry out of an exponent of ones ends up


def not_finite_in(dtype):
    """``not_finite(words)``, for use within ``@unrolled`` functions: not 0 if words of two numbers
    hold an infinity or a NaN, an exponent of ones in either half.
    """
    EXPONENTS, LOWEST_EXPONENTS = {
        "float16": (0x7C007C00, 0x04000400),
        "bfloat16": (0x7F807F80, 0x00800080),
    }[dtype]

    def not_finite(words):
        found = None
        for x in words:
            carried = (x & EXPONENTS) + LOWEST_EXPONENTS
            found = carried if found is None else found | carried
        return found & (SIGNS - 2**32)

    return not_finite


def make_not_finite(dtype):
    """``not_finite(smem, at)``, of the 16 bytes at word ``at``."""
    of_words = not_finite_in(dtype)

    @unrolled
    def not_finite(smem, at):
        return of_words(load4(smem, at))

    return not_finite


@unrolled
def clear(smem, at, zero):
    """16 bytes of zeros."""
    store4(smem, at, (zero,) * 4)


def make_clean_row(dtype, panels, panel_words):
    """``clean_row(smem, at, key)``: whether the row at word ``at`` of a tile's first panel holds
    anything but numbers; it becomes zeros then.

    Others wait for it: its numbers have 32 bits, and the compiler may have a few loads under way.
    """
    CHUNKS, not_finite = 8 * panels, make_not_finite(dtype)

    @inlined
    def place(at, chunk, key):
        """The n-th of a row's 16 bytes; eight keys meet every bank once."""
        panel = types.int32(chunk >> 3) * panel_words
        return types.int32(at + panel + types.int32((chunk ^ key) & 7) * 4)

    @inlined
    def clean_row(smem, at, key):
        found, chunks = types.int32(0), opaque(types.int32(CHUNKS))  # a loop: registers are few
        for i in range(chunks):
            found = types.int32(found | not_finite(smem, place(at, types.int32(i), key)))
        if found != 0:
            for i in range(chunks):
                clear(smem, place(at, types.int32(i), key), types.int32(0))
        return found != 0

    return clean_row


@unrolled
def poisoned(l, bad):
    """NaN for the rows that attend a key that is not finite."""
    return tuple(select(equal(b, 0), x, math.nan) for x, b in zip(l, bad, strict=True))
