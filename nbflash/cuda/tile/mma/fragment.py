"""Fragments of mma: what a lane has of a tile of ``16 m_tiles × n``, and what it does with rows.

    element   4 (n / 8 · t + j) + 2 i + e   of a lane 4 r + q is
    row       16 t + 8 i + r                16-row tile t, i = 0, 1
    column    8 j + 2 q + e                 j = 0 … n/8 − 1,  e = 0, 1

so a lane has 2 m_tiles rows, number 2 t + i, and the four lanes of a quad share them. Packed in
pairs, a tile is the A operand of a product over its columns: words 4 k … 4 k + 3 of a 16-row tile
are step k.
"""

import functools

from nbflash.cuda.tile.tracing import unrolled
from nbflash.cuda.tile.warp_math import pack_half


class Fragment:
    """Which row and column an element is of, from the first of its lane's on."""

    def __init__(self, m_tiles, n):
        self.m_tiles, self.n, self.rows = m_tiles, n, 2 * m_tiles
        self.size = m_tiles * n // 2

    def row(self, element):
        """The number of its row among the lane's."""
        return element // (self.n // 2) * 2 + element // 2 % 2

    def column(self, element):
        return element % (self.n // 2) // 4 * 8 + element % 2

    @staticmethod
    def row_offset(i):
        """Where row number ``i`` is from the lane's first one."""
        return i // 2 * 16 + i % 2 * 8

    def places(self):
        """(row, column) of every element, from the lane's first."""
        return [(self.row_offset(self.row(x)), self.column(x)) for x in range(self.size)]

    def fold(self, values, combine, chains=4):
        """Of each row its elements combined, in chains side by side."""
        partial = {}
        for element, x in enumerate(values):
            key = self.row(element), self.column(element) // 8 * 2 % chains + element % 2
            partial[key] = combine(partial[key], x) if key in partial else x
        rows = ([x for (r, _), x in partial.items() if r == row] for row in range(self.rows))
        return [functools.reduce(combine, row) for row in rows]

    def make_scale_rows(self):
        """``scale_rows(x, factor)``: every row times its factor."""

        @unrolled
        def scale_rows(x, factor):
            return tuple(v * factor[self.row(i)] for i, v in enumerate(x))

        return scale_rows

    def make_pack(self, dtype):
        """``pack(x)``: neighbours rounded, in a word."""

        @unrolled
        def pack(x):
            return tuple(pack_half(dtype, x[i], x[i + 1]) for i in range(0, self.size, 2))

        return pack
