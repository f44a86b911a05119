"""Attention over parts of the keys becomes one: a row of it by one warp (FlashDecoding).

    m = max_s LSE_s      w_s = exp(LSE_s − m)      l = Σ_s w_s
    O = Σ_s w_s O_s / l            LSE = m + log l

An empty part has LSE_s = −∞ and O_s = 0: its weight is 0.
"""

import math

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.guarded_max import guarded
from nbflash.cuda.tile.tracing import exp2, fma, load, maximum, select, unrolled
from nbflash.cuda.tile.warp_reduce import warp_max, warp_sum
from nbflash.definitions.constants import LN2, LOG2_E, WARP


def weight_of(lse, m):
    """w of a part."""
    return exp2((lse - guarded(m)) * LOG2_E)


def make_statistics(accumulator):
    """``statistics(part_lse, rows, at, splits, lane)``, ``lse_of(m, l)``: m and l of a row, LSE."""
    ZERO, NEG_INF = accumulator(0), accumulator(-math.inf)
    larger, weight = unrolled(maximum), unrolled(weight_of)

    @inlined
    def statistics(part_lse, rows, at, splits, lane):
        m, l = NEG_INF, ZERO
        for s in range(lane, splits, WARP):
            m = larger(m, part_lse[s * rows + at])
        m = warp_max(m)
        for s in range(lane, splits, WARP):
            l += weight(part_lse[s * rows + at], m)
        return m, warp_sum(l)

    @inlined
    def lse_of(m, l):
        value = NEG_INF
        if l != ZERO:
            value = m + accumulator(math.log2(l)) * accumulator(LN2)
        return value

    return statistics, lse_of


def make_join(head_dim, accumulator, step, ahead):
    """``join(part_o, part_lse, rows, row, at, splits, split, lane)``.

    It gives Σ w_s O_s of the parts ``split``, ``split + step``, …, a column of every 32 a
    lane, and m and l of all. part_o is (splits, rows, head_dim), part_lse (splits, rows); this row
    is ``row`` of the one and ``at`` of the other. The O of ``ahead`` parts are under way at a time.
    """
    ZERO, (statistics, _) = accumulator(0), make_statistics(accumulator)
    COLUMNS = range(0, head_dim, WARP)
    O_START = (ZERO,) * len(COLUMNS)

    def row_of(part_o, at, lane):
        """A lane's columns of the row at ``at``; in place of one behind its end column 0."""
        columns = [lane + c for c in COLUMNS]
        if head_dim % WARP:
            columns[-1] = select(columns[-1] < head_dim, columns[-1], 0)
        return [load(part_o, at + c) for c in columns]

    @unrolled
    def add(acc, part_o, part_lse, m, split, splits, place, lane):
        """``O += w_s O_s`` for ``ahead`` parts, ``step`` apart, or as many as there are.

        All loads come first; in place of those behind the last one ``split`` itself is read.
        """
        rows, row, at = place
        there = [split + step * u < splits for u in range(ahead)]
        steps = [select(t, u * step * rows, 0) for u, t in enumerate(there)]
        first = rows * split  # 64 bits, as the left one has
        weights = [weight_of(load(part_lse, first + at + s), m) for s in steps]
        parts = [row_of(part_o, (first + row + s) * head_dim, lane) for s in steps]
        for t, w, o in zip(there, weights, parts, strict=True):
            o = [select(t, x, ZERO) for x in o]
            acc = tuple(fma(w, x, total) for x, total in zip(o, acc, strict=True))
        return acc

    @inlined
    def join(part_o, part_lse, rows, row, at, splits, split, lane):
        acc, place = O_START, (types.int64(rows), types.int64(row), types.int64(at))
        m, l = statistics(part_lse, rows, at, splits, lane)
        while split < splits:
            acc = add(acc, part_o, part_lse, m, split, splits, place, lane)
            split += ahead * step
        return acc, m, l

    return join
