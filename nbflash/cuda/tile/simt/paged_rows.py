"""Rows of a paged cache, straight from global memory into registers.

``lanes`` neighbouring lanes share a row of ``width`` columns. Lane c holds the columns

    4 c + 4 lanes p + {0 … 3}        for p = 0 … parts − 1

so that each load of four by these lanes is contiguous. Columns from ``head_dim`` on are zero.
"""

from nbflash.cuda.tile.convert import widened
from nbflash.cuda.tile.tracing import load, load4, select, unrolled

PAGED = 4  # what is paged: k, v, k_scale, v_scale


def make_locate(cfg):
    """``locate(table, at, page_size, first, length, head, strides)``.

    The places, in elements, of the keys of a lane's group in k, v and, of a quantised cache, in
    k_scale and v_scale: ``cfg.keys`` each, ``cfg.slots`` keys apart from ``first`` on. Keys from
    ``length`` on are the last one. The pages of a sequence are in ``table`` from ``at`` on;
    ``strides`` are those of a page, a token and a head, of each array.
    """
    keys, slots, used = cfg.keys, cfg.slots, PAGED if cfg.quantised else PAGED // 2

    @unrolled
    def locate(table, at, page_size, first, length, head, strides):
        wanted = [first + u * slots for u in range(keys)]
        wanted = [select(k < length, k, length - 1) for k in wanted]
        pages = [load(table, at + k // page_size) for k in wanted]
        return tuple(
            of_page * page + of_token * (k % page_size) + of_head * head
            for of_page, of_token, of_head in strides[:used]
            for k, page in zip(wanted, pages, strict=True)
        )

    return locate, used * keys


def _row(cfg, memory, place, column):
    """A lane's elements of the row at ``place``, as they are stored; of column 0 past the end."""

    def at(offset):
        inside = cfg.head_dim == cfg.width
        return (
            column + offset
            if inside
            else select(column + offset < cfg.head_dim, column + offset, 0)
        )

    for c in range(0, cfg.width, 4 * cfg.lanes):
        if cfg.vectors:
            yield from load4(memory, place + at(c))
        else:
            yield from (load(memory, place + at(c + e)) for e in range(4))


def _inside(cfg, column, values):
    """``values``, but 0 in the columns from ``head_dim`` on."""
    if cfg.head_dim == cfg.width:
        return values
    offsets = [c + e for c in range(0, cfg.width, 4 * cfg.lanes) for e in range(4)]
    return [select(column + o < cfg.head_dim, x, 0.0) for o, x in zip(offsets, values, strict=True)]


def make_load_rows(cfg, which):
    """``load_rows(memory, scales, places, column)``: the keys (``which`` 0) or values (1).

    A lane's ``cfg.keys`` rows one after the other, times their scales if the cache is quantised.
    """
    keys, dtype, real = cfg.keys, cfg.cache_dtype, cfg.accumulator.numba

    @unrolled
    def load_rows(memory, scales, places, column):
        stored = [
            list(_row(cfg, memory, place, column))
            for place in places[which * keys : (which + 1) * keys]
        ]
        rows = [[widened(x, dtype, real) for x in row] for row in stored]
        if cfg.quantised:
            of_scale = places[(2 + which) * keys : (3 + which) * keys]
            factors = [widened(load(scales, place), "float32", real) for place in of_scale]
            rows = [[x * f for x in row] for row, f in zip(rows, factors, strict=True)]
        return tuple(x for row in rows for x in _inside(cfg, column, row))

    return load_rows


def make_load_queries(cfg):
    """``load_queries(q, base, of_token, of_head, last, factor, column)``: a lane's part of Q.

    Of ``cfg.rows`` rows one after the other; tokens past ``last`` repeat it.
    """

    @unrolled
    def load_queries(q, base, of_token, of_head, last, factor, column):
        found = []
        for r in range(cfg.rows):
            token = select(last < r // cfg.pack, last, r // cfg.pack)
            row = _row(cfg, q, base + of_token * token + of_head * (r % cfg.pack), column)
            values = [widened(x, cfg.dtype, cfg.accumulator.numba) * factor for x in row]
            found += _inside(cfg, column, values)
        return tuple(found)

    return load_queries
