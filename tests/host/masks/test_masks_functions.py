"""A mask of a function is the function as it was: what it reads is part of the mask."""

import builtins
import functools
import itertools
import types

import numpy as np
import pytest

import masks
import nbflash
from nbflash.testing import make_qkv

N = 12
WIDTH = 3
SETTINGS = types.ModuleType("settings")
SETTINGS.width = 3


def made(fn):
    return masks.from_function(fn, N)


def dense(fn):
    return np.fromfunction(lambda q, kv: fn(q, kv) & True, (N, N), dtype=np.int64)


def helper(q, kv):
    return abs(q - kv) < WIDTH


def recursive(q, kv, depth=2):
    return helper(q, kv) if depth == 0 else recursive(q, kv, depth - 1)


def of_enclosing():
    width = 3

    def change():
        nonlocal width
        width = 5

    return lambda q, kv: abs(q - kv) < width, change


def of_global():
    return lambda q, kv: abs(q - kv) < WIDTH, lambda: globals().update(WIDTH=5)


def of_inner():
    """A global that a function within the function reads."""
    return (lambda q, kv: (lambda: abs(q - kv) < WIDTH)()), lambda: globals().update(WIDTH=5)


def of_helper():
    return lambda q, kv: helper(q, kv), lambda: globals().update(WIDTH=5)


def of_recursion():
    return recursive, lambda: globals().update(WIDTH=5)


def of_default():
    def fn(q, kv, width=3):
        return abs(q - kv) < width

    return fn, lambda: setattr(fn, "__defaults__", (5,))


def of_keyword():
    def fn(q, kv, *, width=3):
        return abs(q - kv) < width

    return fn, lambda: fn.__kwdefaults__.update(width=5)


def of_array():
    widths = np.full(N, 3)
    return lambda q, kv: abs(q - kv) < widths[q], lambda: widths.fill(5)


def of_list():
    widths = [{"w": 3}]
    return lambda q, kv: abs(q - kv) < widths[0]["w"], lambda: widths[0].update(w=5)


def of_partial():
    widths = [3]
    fn = functools.partial(lambda w, q, kv: abs(q - kv) < w[0], widths)
    return fn, lambda: widths.__setitem__(0, 5)


def of_keyword_of_a_partial():
    widths = [3]
    fn = functools.partial(lambda q, kv, w: abs(q - kv) < w[0], w=widths)
    return fn, lambda: widths.__setitem__(0, 5)


def of_module():
    return lambda q, kv: abs(q - kv) < SETTINGS.width, lambda: setattr(SETTINGS, "width", 5)


def of_enclosed_module():
    settings = SETTINGS
    fn = lambda q, kv: (lambda: abs(q - kv) < settings.width)()
    return fn, lambda: setattr(SETTINGS, "width", 5)


def of_own_attribute():
    def fn(q, kv):
        return abs(q - kv) < fn.width[0]

    fn.width = [3]
    return fn, lambda: fn.width.__setitem__(0, 5)


def of_builtins():
    builtins.SOME_WIDTH = 3
    fn = lambda q, kv: abs(q - kv) < SOME_WIDTH  # noqa: F821
    return fn, lambda: setattr(builtins, "SOME_WIDTH", 5)


READS = [
    *(of_module, of_enclosed_module, of_own_attribute, of_builtins),
    *(of_enclosing, of_global, of_inner, of_helper, of_recursion, of_default, of_keyword),
    *(of_array, of_list, of_partial, of_keyword_of_a_partial),
]


@pytest.fixture(autouse=True)
def restored():
    yield
    globals().update(WIDTH=3)
    SETTINGS.width = 3
    vars(builtins).pop("SOME_WIDTH", None)


@pytest.mark.parametrize("make", READS)
def test_what_a_function_reads_is_part_of_the_mask(make):
    fn, change = make()
    mask, same = made(fn), made(fn)
    assert mask == same
    assert hash(mask) == hash(same)
    change()
    other = made(fn)
    assert other != mask
    assert mask == same
    assert (mask.dense() == dense(lambda q, kv: abs(q - kv) < 3)).all()
    assert (other.dense() == dense(lambda q, kv: abs(q - kv) < 5)).all()


@pytest.mark.parametrize("make", READS)
def test_functions_made_anew_are_equal(make):
    assert made(make()[0]) == made(make()[0])


def test_a_plan_follows_what_a_function_reads():
    q, k, v, _ = make_qkv(1, N, N, 1, 1, 8)
    fn, change = of_enclosing()
    first = nbflash.plan(q, k, v, made(fn))
    assert nbflash.plan(q, k, v, made(fn)) is first
    change()
    out = nbflash.attention(q, k, v, made(fn))
    exact = nbflash.attention(q, k, v, masks.window(N, left=4, right=4))
    np.testing.assert_array_equal(out, exact)


def test_every_turn_of_a_loop_has_its_own_variable():
    widths = [made(lambda q, kv: abs(q - kv) < w).count_nonzero() for w in (1, 2, 3)]  # noqa: B023
    several = [made(lambda q, kv: abs(q - kv) < w) for w in (1, 2, 3)]  # noqa: B023
    assert [m.count_nonzero() for m in several] == widths == [N, 3 * N - 2, 5 * N - 6]


def test_numbers_of_other_types_are_other_numbers():
    def reading(value):
        return made(lambda q, kv: (q - kv < 3) | (value is None))

    for a, b in ((1, True), (1, 1.0), (0.0, -0.0), (1, np.int64(1)), ("1", 1), ([1], (1,))):
        assert reading(a) != reading(b)
        assert reading(a) == reading(a)
    assert reading(np.arange(3)) == reading(np.arange(3))
    assert reading(np.arange(3)) != reading(np.arange(3.0))
    assert reading(masks.causal(4)) == reading(masks.causal(4))


@pytest.mark.parametrize(
    ("one", "same", "others"),
    [
        ((1, 2), (1, 2), [(2, 1), (1, 2, 2), [1, 2]]),
        ([1, 2], [1, 2], [[2, 1], [1, 1, 2]]),
        ({1, 9}, {9, 1}, [{1, 2}, frozenset({1, 9})]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, [{"a": 2, "b": 1}, {"a": 1, "c": 2}]),
        (
            np.arange(3),
            np.arange(3),
            [np.arange(3.0), np.arange(3)[::-1], np.arange(3)[:, None], [0, 1, 2]],
        ),
    ],
    ids=["tuple", "list", "set", "dict", "array"],
)
def test_collections_that_a_function_reads(one, same, others):
    """The order counts where there is one."""

    def reading(collection):
        return made(lambda q, kv: (q >= kv) & (len(collection) > 0))

    assert reading(one) == reading(same)
    assert hash(reading(one)) == hash(reading(same))
    assert all(reading(one) != reading(other) for other in others)


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, kv: abs(q - kv) < SETTINGS.width,
        lambda q, kv: (lambda: abs(q - kv) < SETTINGS.width)(),
    ],
    ids=["by itself", "in an inner function"],
)
def test_a_number_of_a_module(fn, monkeypatch):
    monkeypatch.setattr(SETTINGS, "width", 3)
    mask = made(fn)
    assert made(fn) == mask
    found = [mask]
    for width in (5, 1, True, 1.0, 0.0, -0.0):  # equal numbers are not the same
        SETTINGS.width = width
        found.append(made(fn))
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_numbers_of_a_module_by_their_names():
    fn = lambda q, kv: (kv - q < SETTINGS.width) & (q - kv < SETTINGS.height)
    found = []
    for SETTINGS.width, SETTINGS.height in ((3, 5), (5, 3)):
        found.append(made(fn))
    assert found[0] != found[1]


class Layer:
    width = 3

    def mask(self):
        return made(lambda q, kv: abs(q - kv) < self.width)

    def keeps(self, q, kv):
        return abs(q - kv) < self.width

    __call__ = keeps


@pytest.mark.parametrize("make", [Layer().mask, lambda: made(Layer().keeps), lambda: made(Layer())])
def test_a_mask_that_reads_an_object_is_equal_to_itself_only(make):
    mask = make()
    assert mask != make()
    assert mask == mask
    assert (mask & masks.causal(N)) == (mask & masks.causal(N))


def test_functions_without_code():
    assert made(np.greater_equal) == made(np.greater_equal)
    assert (made(np.greater_equal).dense() == masks.causal(N).dense()).all()
    where = lambda q, kv: np.where(q < kv, False, True)
    assert made(where) == made(where)


def test_variables_behind_one_that_is_not_assigned():
    def up_to(width, absent=True):
        def fn(q, kv):
            return kv < width if width else a_variable

        if not absent:
            a_variable = True
        return masks.from_function(fn, 3, 5)

    assert up_to(2).dense().sum(1).tolist() == [2, 2, 2]
    assert up_to(2) != up_to(3)


def test_a_variable_that_is_not_assigned_yet():
    def fn(q, kv):
        return q >= kv if q.size else later

    if made(fn) is None:
        later = True
    assert made(fn) == made(fn)
