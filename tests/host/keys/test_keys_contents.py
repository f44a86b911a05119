"""Functions by their content, and code for the CPU that is kept by it."""

import inspect

import numpy as np
import pytest
from keyed import check_cached, check_keyed, others

from nbflash.backends.cpu import compiling, dropout, score, score_gradient, tile_function
from nbflash.disk_cache.content import content_of


def halved(s, b, h, q, kv):
    return s / 2


def doubled(s, b, h, q, kv):
    return s * 2


def parameters(fn):
    return list(inspect.signature(fn).parameters)


# Of code objects: another value of whatever is executed; the others with the reason.
_CODE = halved.__code__
_CHANGED = {
    "co_argcount": _CODE.co_argcount - 1,
    "co_posonlyargcount": 1,
    "co_kwonlyargcount": 1,
    "co_code": doubled.__code__.co_code,
    "co_consts": (None, 3),
    "co_names": ("math",),
    "co_varnames": (*_CODE.co_varnames[:-1], "k"),
    "co_freevars": ("x",),
    "co_cellvars": ("x",),
    "co_flags": _CODE.co_flags | 0x2000,
    "co_exceptiontable": b"\x01\x01\x01\x01",
}
_NOT_EXECUTED = {
    "co_name": "a name",
    "co_qualname": "a name",
    "co_filename": "counts where something is raised, which shows it",
    "co_firstlineno": "counts where something is raised, which shows it",
    "co_linetable": "counts where something is raised, which shows it",
    "co_lnotab": "the same as the table of lines",
    "co_stacksize": "follows from the code",
    "co_nlocals": "follows from the names",
}


def _attributes(code):
    names = {name for name in dir(code) if name[:3] == "co_"}
    return {name for name in names - {"co_lnotab"} if not callable(getattr(code, name))}


def test_all_of_a_function_that_is_executed_is_in_its_content():
    assert _attributes(_CODE) - set(_NOT_EXECUTED) == set(_CHANGED)
    own = content_of(_CODE).digest
    for name, value in _CHANGED.items():
        try:
            other = _CODE.replace(**{name: value})
        except ValueError:  # a code that cannot be: names and counts belong together
            continue
        assert content_of(other).digest != own, name


VALUES = [None, True, 1, 1.0, 1j, "1", b"1", (1,), [1], {1}, {1: 2}, (1, 2), (2, 1), ((1, 2), 3)]
VALUES += [(1, (2, 3)), {1: 3}, {2: 2}, {1, 2}, np.float32(1), np.float64(1), np.int32(1), len, max]
VALUES += [np.sqrt, np.exp, halved, doubled, (halved, doubled), (doubled, halved), -0.0, 0.0, "11"]


def test_values_have_contents_of_their_own():
    digests = [content_of(x).digest for x in VALUES]
    for i, one in enumerate(digests):
        assert content_of(VALUES[i]).digest == one
        for j, other in enumerate(digests[:i]):
            assert one != other, (VALUES[i], VALUES[j])
    assert content_of(1, 2) != content_of((1, 2)) != content_of(1)


@pytest.mark.parametrize("x", [np.float32(1), np.int64(1), np.bool_(True), 1, 1.0, (1, 2.0), "a"])
def test_all_of_a_value_is_in_its_content(x):
    for other in others(x):
        assert content_of(other).digest != content_of(x).digest, other


def test_defaults_and_variables_of_a_function():
    def made(width, default, keyword):
        fn = eval("lambda w: lambda x, y=0, *, z=0: x + y + z + w", globals())(width)
        fn.__defaults__, fn.__kwdefaults__ = (default,), {"z": keyword}
        return fn

    digests = {content_of(made(*x)).digest for x in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}
    assert len(digests) == 4


class _Asked(Exception):
    """With what a content is asked for."""


def _asked(make, *given):
    """What decides about code for the CPU: compiled by a function without its cache."""
    with pytest.raises(_Asked) as found:
        make(*given)
    return found.value.args


CPU = {
    score._compiled: (
        {"functions": ((halved, doubled),), "kinds": "kinds", "real": np.float32},
        {
            "functions": [((doubled, doubled),), ((halved, halved),), ((halved, None),)],
            "kinds": ["others"],
            "real": [np.float64],
        },
    ),
    score_gradient._compiled: (
        {
            "functions": ((halved, doubled, (halved,)),),
            "params": "params",
            "sums": "sums",
            "real": np.float32,
        },
        {
            "functions": [((doubled, doubled, (halved,)),), ((halved, doubled, (doubled,)),)],
            "params": ["sums"],
            "sums": ["params"],
            "real": [np.float64],
        },
    ),
    dropout._compiled_once: ({"real": np.float32}, {"real": [np.float64]}),
}


def test_compiled_functions_of_the_cpu(monkeypatch):
    """All arguments, the versions of tools, the signature, and which kind of function it is."""

    def asked(*values):
        raise _Asked(content_of(*values).digest)

    monkeypatch.setattr(compiling, "content_of", asked)
    found = []
    for compiled, (base, changes) in CPU.items():
        uncached = compiled.__wrapped__

        def key(*, uncached=uncached, **given):
            return _asked(uncached, *given.values())

        check_keyed(key, base, changes, names=parameters(uncached))
        check_in_cache(monkeypatch, compiled, base, changes)
        found.append(key(**base))
    assert len(set(found)) == len(found)
    own = _asked(tile_function.compile_tile_function, None, "a")
    signature = _asked(compiling.compiled_at_address, None, tile_function.SIGNATURE, "a")
    assert signature == own
    for other in (tile_function.SIGNATURE[1:], tile_function.SIGNATURE[::-1][:3], ()):
        assert _asked(compiling.compiled_at_address, None, other, "a") != own
    monkeypatch.setattr(compiling, "SOURCES", "others")
    assert _asked(tile_function.compile_tile_function, None, "a") != own


def check_in_cache(monkeypatch, compiled, base, changes):
    """What is held in memory, too."""
    module = inspect.getmodule(compiled.__wrapped__)
    with monkeypatch.context() as patch:
        patch.setattr(module, "compile_tile_function", lambda *_: object())
        compiled.cache_clear()
        check_cached(compiled, base, changes)
        compiled.cache_clear()


def test_a_set_has_one_content_in_every_process():
    """Its order is that of hashes, which differ from process to process, and of what came first."""
    orders = {0, 8}, {8, 0}
    assert [*orders[0]] != [*orders[1]]
    assert content_of(orders[0]) == content_of(orders[1])
