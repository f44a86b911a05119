"""A number for each row of a warp's tile, from the lanes of a quad, which all have them."""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import equal, select, unrolled


def make_store_numbers(rows):
    """``store_numbers(target, at, values, row, valid, thread)``: a lane of a quad stores one.

    ``rows`` numbers, at most four; the quad's first row is ``at`` + ``row``.
    """

    @unrolled
    def mine(values, quad):
        value = values[0]
        for i in range(1, rows):
            value = select(equal(quad, i), values[i], value)
        return value

    @unrolled
    def place_of(row, quad):
        return row + quad // 2 * 16 + quad % 2 * 8

    @inlined
    def store_numbers(target, at, values, row, valid, thread):
        quad = types.int32(thread & 3)
        value, place = mine(values, quad), place_of(row, quad)
        if quad < rows and place < valid:
            target[at + place] = value

    return store_numbers
