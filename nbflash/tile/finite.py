"""Infinities and NaN in shared memory: 0 times one of them is no 0."""

from nbflash.tile.unroll import load4, store4, unrolled

SIGNS = 0x80008000  # where a carry out of an exponent of ones ends up


def make_not_finite(dtype):
    """``not_finite(smem, at)``, of the 16 bytes at word ``at``."""
    EXPONENTS, LOWEST_EXPONENTS = {
        "float16": (0x7C007C00, 0x04000400),
        "bfloat16": (0x7F807F80, 0x00800080),
    }[dtype]

    @unrolled
    def not_finite(smem, at):
        """Not 0 if 16 bytes hold an infinity or a NaN: an exponent of ones, in either half."""
        found = None
        for x in load4(smem, at):
            carried = (x & EXPONENTS) + LOWEST_EXPONENTS
            found = carried if found is None else found | carried
        return found & (SIGNS - 2**32)

    return not_finite


@unrolled
def clear(smem, at, zero):
    """16 bytes of zeros."""
    store4(smem, at, (zero,) * 4)
