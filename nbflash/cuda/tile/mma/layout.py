"""Tiles in shared memory as ldmatrix reads them: rows of 16-byte chunks, swizzled.

Eight lanes read a chunk each, of eight rows that follow each other; they meet every bank once:

    byte of (row, chunk) = row · row_bytes + 16 · (chunk ^ row // (8 / g) % g)

g is the largest power of two, up to 8, that divides the chunks of a row; there are no gaps. An
address is made once for a lane and a first step; a step of 16 columns further on is an exclusive or
with a constant (:meth:`SharedTile.step`), and 8 rows further on a constant more.

    operand      lane reads of its matrices' first step          of
    rows         row lane % 16, chunk lane // 16                 A; B of P V, transposed
    columns      row 8 (lane // 16) + lane % 8, chunk            B of S = Q Kᵀ;
                 lane // 8 % 2                                   A = Xᵀ, transposed
"""

CHUNK = 8  # elements of 16 bytes
CHUNK_BYTES = 16
STEP = 16  # contraction of one mma
ALIGNMENT = 128  # bytes, of a tile


class StoredTile:
    """Rows of one byte an element: panels of 128 bytes a row, as TMA's swizzle lays them."""

    def __init__(self, width, rows):
        self.chunks, self.width = width // CHUNK_BYTES, width // 2  # in elements of two bytes
        self._panel = rows * 128
        self.bytes = -(-width // 128) * self._panel

    def place(self, row, chunk):
        """Byte of a chunk, from the tile's first."""
        return chunk // 8 * self._panel + row * 128 + (chunk % 8 ^ row % 8) * CHUNK_BYTES


class SharedTile:
    """Places in a tile of ``width`` columns, a multiple of 16."""

    def __init__(self, width):
        self.width, self.chunks, self.row_bytes = width, width // CHUNK, 2 * width
        self._swizzle = min(8, self.chunks & -self.chunks)

    def place(self, row, chunk):
        """Byte of a chunk, from the tile's first."""
        g = self._swizzle
        return row * self.row_bytes + (chunk ^ row // (8 // g) % g) * CHUNK_BYTES

    def step(self, address, k):
        """What an address of columns 0 to 15 is for columns 16 k to 16 k + 15; k may be dynamic."""
        g, chunk = self._swizzle, k * 2
        return (address ^ chunk % g * CHUNK_BYTES) + chunk // g * (g * CHUNK_BYTES)

    def by_rows(self, lane):
        """A lane's byte of an operand by rows."""
        return self.place(lane % 16, lane // 16)

    def by_columns(self, lane):
        """And of one by columns."""
        return self.place(lane // 16 * 8 + lane % 8, lane // 8 % 2)
