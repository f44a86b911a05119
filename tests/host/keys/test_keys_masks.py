"""Masks: every argument of every class counts, each element of its arrays, and nothing that a mask
has computed is taken for something else.
"""

import types
from functools import partial

import numpy as np
import pytest
from keyed import assert_apart, assert_same, check_keyed, each, others

import masks
from masks import algebra, block, functions, interval, leaves, planes, restriction, token, trees
from masks.base import Mask, digest

A, B, C = masks.causal(6, 8), masks.window(6, 8, left=1, right=1), masks.dense(6, 8)
SEEN = np.arange(36).reshape(6, 6) % 5 < 2
BITS = np.packbits(np.arange(60).reshape(6, 10) % 5 < 2, axis=1)
FACTOR, TABLE = 3, np.arange(4)


def thirds(q, kv):
    return (q + kv) % 3 == 0


def quarters(q, kv):
    return (q + kv) % 4 == 0


def _array(*x):
    return np.array(x)


# Of every class arguments, and of each argument others with which all other parts stay the same.
CLASSES = {
    interval.Interval: (
        {"nk": 6, "lo": _array(0, 1, 2), "hi": _array(3, 4, 5)},
        {"nk": [7], "lo": each(_array(0, 1, 2)), "hi": each(_array(3, 4, 5))},
    ),
    block.BlockSparse: (
        {"nq": 6, "nk": 6, "block": (3, 3), "rows": _array(0, 1), "cols": _array(0, 1)},
        {
            "nq": [5],
            "nk": [5],
            "block": [(4, 3), (3, 4)],
            "rows": [_array(0, 0), _array(1, 1), _array(1, 0)],
            "cols": [_array(0, 0), _array(1, 1), _array(1, 0)],
        },
    ),
    leaves.Diagonals: (
        {"nq": 6, "nk": 8, "offsets": _array(-2, 0, 3)},
        {"nq": [5], "nk": [9], "offsets": [*each(_array(-2, 0, 3)), _array(-2, 0)]},
    ),
    leaves.Columns: (
        {"nq": 6, "chosen": SEEN[0]},
        {"nq": [5], "chosen": [*each(SEEN[0]), np.append(SEEN[0], False)]},
    ),
    leaves.Predicate: (
        {"fn": thirds, "nq": 6, "nk": 8},
        {"fn": [quarters], "nq": [5], "nk": [9]},
    ),
    leaves.Bitmap: (
        {"nq": 6, "nk": 10, "packed": BITS},
        {"nq": [5], "nk": [9], "packed": each(BITS)},
    ),
    algebra.Union: (
        {"operands": (A, B)},
        {"operands": [(A, C), (C, B), (A, B, C), (A, A)]},
    ),
    algebra.Intersection: (
        {"operands": (A, B)},
        {"operands": [(A, C), (C, B), (A, B, C), (A, A)]},
    ),
    algebra.Complement: ({"inner": A}, {"inner": [B, C]}),
    algebra.Transposed: ({"inner": A}, {"inner": [B, C]}),
    restriction.Restricted: (
        {"inner": A, "q": _array(0, 2, 3), "kv": _array(1, 3, 4, 6)},
        {
            "inner": [B, C],
            "q": [_array(1, 2, 3), _array(0, 1, 3), _array(0, 2, 4), _array(0, 2)],
            "kv": [_array(0, 3, 4, 6), _array(1, 2, 4, 6), _array(1, 3, 5, 6), _array(1, 3, 4, 7)],
        },
    ),
    planes.Planes: (
        {"planes": (A, B), "plane_index": _array([0, 1])},
        {
            "planes": [(A, C), (C, B), (B, A)],
            "plane_index": [_array([0], [1]), _array([0, 1], [0, 1]), _array([0, 1, 1])],
        },
    ),
    token.Neighborhood: (
        {"sizes": (6, 8), "kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1)},
        {
            "sizes": [(8, 6), (4, 12)],
            "kernel": [(2, 3), (3, 2)],
            "stride": [(2, 1), (1, 2)],
            "dilation": [(2, 1), (1, 2)],
        },
    ),
    trees.Tree: (
        {"nk": 8, "prefix": 2, "parents": _array(-1, 0, 0, 1)},
        {"nk": [9], "prefix": [1, 3], "parents": [_array(-1, -1, 0, 1), _array(-1, 0, 0, 2)]},
    ),
}
ABSTRACT = {algebra._Nary, leaves._Opaque}


def _subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def test_every_class_of_masks_is_declared():
    found = {x for x in _subclasses(Mask) if x.__module__.partition(".")[0] == "masks"}
    assert found - ABSTRACT == set(CLASSES), "add it to CLASSES: arguments and others of each"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_argument_of_a_mask_counts(cls):
    base, changes = CLASSES[cls]
    check_keyed(cls, base, changes, names=cls._fields)


def test_the_class_of_a_mask_counts():
    """Of the same parts, too."""
    made = [cls(**base) for cls, (base, _) in CLASSES.items()]
    square = masks.causal(6)
    made += [algebra.Complement(square), algebra.Transposed(square)]
    for i, one in enumerate(made):
        for other in made[:i]:
            assert_apart(one, other)


def test_the_order_of_operands_does_not_count():
    for cls in (algebra.Union, algebra.Intersection):
        assert_same(cls((A, B)), cls((B, A)))


# Larger ones, so that grids of tiles differ.
LARGE = {
    "interval": masks.window(29, 37, left=4, right=2),
    "blocks": masks.bigbird(36, 4, n_random=1),
    "diagonals": masks.toeplitz(31, (0, 5, 11)),
    "columns": leaves.Columns(23, np.arange(31) % 7 < 2),
    "predicate": masks.from_function(thirds, 23, 31),
    "bitmap": masks.from_dense(np.arange(23 * 31).reshape(23, 31) % 11 < 3),
    "union": masks.causal(36) | masks.from_function(quarters, 36),
    "intersection": masks.bigbird(36, 4, n_random=1) & masks.from_function(quarters, 36),
    "complement": ~masks.neighborhood((5, 7), 3),
    "transposed": masks.neighborhood((6, 7), 3).T,
    "restricted": masks.restrict(masks.neighborhood((6, 8), 3), range(8, 48), range(16, 40)),
    "neighborhood": masks.neighborhood((6, 7), 3),
    "tree": masks.tree([-1, 0, 0, 1, 3, 3, 5, 2], 13),
}
GRIDS = [(3, 3), (4, 3), (3, 4), (8, 8), (8, 4), (16, 8), (64, 64)]


def _tiled(mask, tile_m, tile_n):
    tiles = mask.tiles(tile_m, tile_n)
    kinds = tiles.kinds
    parts = kinds.indptr, kinds.indices, kinds.data, tiles.lo, tiles.hi, tiles.bits
    live = mask.live_tiles(tile_m, tile_n)
    counts = tiles.tile_counts()
    return [x.tolist() for x in map(np.asarray, (*parts, live, counts, mask(0, 1)))]


def test_every_class_is_among_the_large_ones():
    """But for planes, each of which has its own tiles."""
    assert {type(x) for x in LARGE.values()} == set(CLASSES) - {planes.Planes}


@pytest.mark.parametrize("name", LARGE)
def test_what_a_mask_remembers_is_of_the_tiles_that_are_asked_for(name):
    """One that was asked for all other sizes before answers as a new one does."""
    new = lambda: type(LARGE[name])(*LARGE[name]._arguments())
    alone = {grid: _tiled(new(), *grid) for grid in GRIDS}
    for order in (GRIDS, GRIDS[::-1]):
        mask = new()
        for grid in order:
            assert _tiled(mask, *grid) == alone[grid], grid


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int32, np.int64, np.float32, np.float64])
def test_all_of_an_array_is_in_its_digest(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    assert digest(x) == digest(x.copy()) == digest(np.asfortranarray(x))
    for other in others(x):
        assert digest(other) != digest(x), other


def _reads_factor(q, kv):
    return (q + kv) % FACTOR == 0


def _reads_table(q, kv):
    return TABLE[q % 4] <= kv


def _has_default(q, kv, width=3):
    return q - kv < width


def _has_keyword(q, kv, *, width=3):
    return q - kv < width


def _closed(width):
    return lambda q, kv: q - kv < width


def _changed(fn, **changes):
    """A function with other globals, defaults or code."""
    space = changes.pop("space", fn.__globals__)
    copy = types.FunctionType(changes.get("code", fn.__code__), space, fn.__name__)
    copy.__defaults__ = changes.get("defaults", fn.__defaults__)
    copy.__kwdefaults__ = changes.get("kwdefaults", fn.__kwdefaults__)
    return copy


FUNCTIONS = {
    "code": (thirds, quarters),
    "a global": (_reads_factor, _changed(_reads_factor, space=globals() | {"FACTOR": 4})),
    "a table": (_reads_table, _changed(_reads_table, space=globals() | {"TABLE": np.arange(1, 5)})),
    "a default": (_has_default, _changed(_has_default, defaults=(4,))),
    "a keyword": (_has_keyword, _changed(_has_keyword, kwdefaults={"width": 4})),
    "a variable": (_closed(3), _closed(4)),
    "an argument": (partial(_has_default, width=3), partial(_has_default, width=4)),
    "a place": (partial(thirds, 1), partial(thirds, 2)),
    "whose": (partial(thirds, 1), partial(quarters, 1)),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_all_that_a_function_reads_is_in_its_key(what):
    one, other = FUNCTIONS[what]
    key = functions.snapshot(one)[1]
    assert key == functions.snapshot(one)[1]
    assert key != functions.snapshot(other)[1]
    assert_apart(*(leaves.Predicate(fn, 6, 8) for fn in (one, other)))


VALUES = [None, True, 3, 0.5, 2j, "a", b"a", (1, 2), [1, 2], {1, 2}, frozenset((1, 2)), {"a": 1}]
VALUES += [range(3), np.arange(3), np.float32(3), np.float64(3), np.int64(3), (1.0, 2.0), ((1,), 2)]
VALUES += [(True, 2), {"b": 1}, {"a": 2}, {"a": 1, "b": 1}, np.arange(3.0), np.float32, len, A, B]
VALUES += [np.dtype(np.float32), *(np.zeros(3, [(x, int), (y, int)]) for x, y in ("ab", "ba"))]
VALUES += [0.0, -0.0, 1, 1.0, "1", b"1", (1, (2,)), (None,), {2, 3}, np.arange(3, dtype=np.int32)]


@pytest.mark.parametrize(
    "x", [np.arange(6).reshape(2, 3), np.ones(3, np.float32), np.float32(1), np.int64(1), (1, 2.0)]
)
def test_all_of_a_value_that_a_function_reads_is_in_its_key(x):
    key = functions.snapshot(x)[1]
    for other in others(x):
        assert functions.snapshot(other)[1] != key, other


def test_values_that_a_function_reads_are_told_apart():
    """Numbers that are equal and of several types, too."""
    keys = [functions.snapshot(x)[1] for x in VALUES]
    for i, one in enumerate(keys):
        assert one == functions.snapshot(VALUES[i])[1]
        for j, other in enumerate(keys[:i]):
            assert one != other, (VALUES[i], VALUES[j])
