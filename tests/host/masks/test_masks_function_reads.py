"""Masks of functions that read what is not copied, and what nobody changes."""

import functools
import math
import operator
import types
from functools import reduce

import numpy as np
import pytest

import masks
import nbflash
from nbflash.testing import make_qkv

N = 12
WIDTH = 3
SETTINGS = types.ModuleType("settings")
SETTINGS.width = 3
PACKAGE = types.ModuleType("package")
PACKAGE.settings, PACKAGE.table, PACKAGE.widths = SETTINGS, np.full(N, 3), {"w": 3}
LIBRARIES = np, math, operator


class Config:
    width = 3

    @staticmethod
    def keeps(q, kv):
        return abs(q - kv) < Config.width


def helper(q, kv):
    return abs(q - kv) < WIDTH


PACKAGE.helper = helper
near = np.frompyfunc(lambda distance: abs(distance) < WIDTH, 1, 1)
near_too = functools.partial(helper)
near_too.width = 3
read = eval
widths = [3]


def made(fn):
    return masks.from_function(fn, N)


def of_class_around():
    cls = Config
    return lambda q, kv: abs(q - kv) < cls.width


def of_module_and_its_attribute():
    """In a class body variables are read in another way."""
    settings = SETTINGS

    def fn(q, kv):
        class Own:
            module = settings

        return abs(q - kv) < Own.module.width + settings.width * 0

    return fn


def of_masked_array():
    widths = np.ma.array(np.full(N, 3))
    return lambda q, kv: abs(q - kv) < widths.data[q]


def of_list_that_holds_itself():
    widths = [3]
    widths.append(widths)
    return lambda q, kv: abs(q - kv) < widths[1][1][0]


def imports(q, kv):
    import sys

    return abs(q - kv) < sys.modules[__name__].WIDTH


def imports_within(q, kv):
    def width():
        import sys

        return sys.modules[__name__].WIDTH

    return abs(q - kv) < width()


OTHERS = {
    "class": lambda q, kv: abs(q - kv) < Config.width,
    "class around": of_class_around(),
    "static method": Config.keeps,
    "submodule": lambda q, kv: abs(q - kv) < PACKAGE.settings.width,
    "array of a module": lambda q, kv: abs(q - kv) < PACKAGE.table[q],
    "collection of a module": lambda q, kv: abs(q - kv) < PACKAGE.widths["w"],
    "function of a module": lambda q, kv: PACKAGE.helper(q, kv),
    "module itself": lambda q, kv: abs(q - kv) < getattr(SETTINGS, "width") + 0 * SETTINGS.width,  # noqa: B009
    "module in a class": of_module_and_its_attribute(),
    "attribute of a partial function": lambda q, kv: abs(q - kv) < near_too.width,
    "ufunc of one's own": lambda q, kv: near(q - kv).astype(bool),
    "masked array": of_masked_array(),
    "all globals": lambda q, kv: abs(q - kv) < globals()["WIDTH"],
    "globals of a function": lambda q, kv: abs(q - kv) < helper.__globals__["WIDTH"],
    "text": lambda q, kv: abs(q - kv) < eval("WIDTH"),
    "text in an inner function": lambda q, kv: (lambda: abs(q - kv) < eval("WIDTH"))(),
    "text by another name": lambda q, kv: abs(q - kv) < read("3"),
    "import": imports,
    "import in an inner function": imports_within,
    "list that holds itself": of_list_that_holds_itself(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_copied_makes_a_mask_equal_to_itself_only(what):
    fn = OTHERS[what]
    mask = made(fn)
    assert mask == mask
    assert mask != made(fn)
    assert mask.dense().tolist() == masks.window(N, left=2, right=2).dense().tolist()


def test_the_globals_of_a_function_that_may_read_any_are_left_alone():
    before = widths
    made(lambda q, kv: abs(q - kv) < eval("WIDTH") + 0 * widths[0])
    assert widths is before


def test_attention_after_an_attribute_of_a_class_has_changed(monkeypatch):
    q, k, v, _ = make_qkv(1, N, N, 1, 1, 8)
    nbflash.attention(q, k, v, made(Config.keeps))
    monkeypatch.setattr(Config, "width", 5)
    out = nbflash.attention(q, k, v, made(Config.keeps))
    exact = nbflash.attention(q, k, v, masks.window(N, left=4, right=4))
    np.testing.assert_array_equal(out, exact)


def of_libraries():
    numpy, math, operator = LIBRARIES

    def fn(q, kv):
        near = numpy.logical_and(numpy.abs(q - kv) < 3, operator.ge(q, kv))
        return near & (kv >= math.floor(math.pi)) & (kv < numpy.linalg.norm([6.0, 8.0]))

    return fn


linalg = np.linalg
SAME = {
    "libraries": lambda: made(of_libraries()),
    "a library": lambda: made(lambda q, kv: np.minimum(np.abs(q - kv), np.int32(3)) < math.pi),
    "library in a call": lambda: made(lambda q, kv: (lambda xp: xp.less(q, kv))(np)),
    "functions of libraries": lambda: made(lambda q, kv: reduce(np.logical_or, [q > kv, q < 2])),
    "types": lambda: made(lambda q, kv: isinstance(q, np.ndarray) & (q.astype(int) >= kv)),
    "ufunc": lambda: made(np.less),
    "part of a library": lambda: made(lambda q, kv: (q > kv) & (linalg.norm([3, 4]) < 6)),
    "masks": lambda: made(lambda q, kv: masks.causal(N).dense()[q, kv]),
    "function of one's own": lambda: made(lambda q, kv: helper(q, kv)),
}


@pytest.mark.parametrize("what", SAME)
def test_what_libraries_hold_is_constant(what):
    assert SAME[what]() == SAME[what]()


def test_a_module_in_the_place_of_a_library():
    """Of the same name, or a class that says that it is one's."""
    found = types.ModuleType("math")
    found.width = [3]
    of_its_name = lambda q, kv: abs(q - kv) < found.width[0]
    assert made(of_its_name) != made(of_its_name)
    cls = type("float32", (), {"__module__": "numpy", "width": 3})
    of_its_type = lambda q, kv: abs(q - kv) < cls.width
    assert made(of_its_type) != made(of_its_type)
