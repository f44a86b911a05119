"""Kernels of merging and of selection, bound once for each geometry."""

import numpy as np
import pytest
from keyed import assert_answers_differ, check_transparent
from logged_device import Array, Logged, padded

from nbflash.backends.block_selection import host as selection
from nbflash.backends.merging import host as merge_host


def _merging(**changed):
    """A merge with one of its arrays laid out in another way, or of another type."""

    def call(device):
        names = {"out_a": (2, 9, 6, 64), "lse_a": (2, 6, 9), "out_b": (2, 5, 6, 64)}
        names |= {"lse_b": (2, 6, 5), "out": (2, 9, 6, 64), "lse": (2, 6, 9)}
        given = {x: Array(shape, np.float32) for x, shape in names.items()}
        given |= {name: make(names[name]) for name, make in changed.items() if name in names}
        pairs = [tuple(given[f"{x}{of}"] for x in ("out", "lse")) for of in ("_a", "_b", "")]
        before = len(device.launches)
        if changed.get("adds"):
            merge_host.add(pairs[2][0], pairs[1][0], changed.get("places"))
        else:
            merge_host.merge(*pairs, changed.get("places"))
        (found,) = device.launches[before:]
        known = ("n", "heads", *(x for x in found.values if x.endswith("_stride")))
        return found.config, found.blocks, [found[x] for x in known]

    return call


def _logged(monkeypatch):
    """A device in the place of all, in modules that have forgotten what they had bound."""
    device = Logged()
    for module in (merge_host, selection):
        monkeypatch.setattr(module, "cuda_device", lambda *_: device)
    merge_host._bound.cache_clear()
    for name in ("_bound_means", "_bound_products", "_bound_weights", "_bound_best"):
        getattr(selection, name).cache_clear()
    return device


@pytest.fixture
def forgotten(cupy, monkeypatch):
    """Makes such devices."""
    yield lambda: _logged(monkeypatch)
    _logged(monkeypatch)


def test_kernels_of_merging(forgotten):
    calls = {
        name: _merging(**{name: lambda shape: padded(shape, np.float32, 4)})
        for name in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")
    }
    half = lambda shape: Array(shape, np.float16)
    calls |= {
        "as it is": _merging(),
        "a part of another type": _merging(out_b=half),
        "all of another type": _merging(out_a=half, out_b=half, out=half),
        "fewer rows": _merging(out_b=lambda _: Array((2, 4, 6, 64), np.float32)),
        "fewer heads": _merging(out_b=lambda _: Array((2, 5, 5, 64), np.float32)),
        "fewer sequences": _merging(out_b=lambda _: Array((1, 5, 6, 64), np.float32)),
        "narrow": _merging(out_b=lambda _: Array((2, 5, 6, 32), np.float32)),
        "placed": _merging(places=Array((5,), np.int32)),
        "added": _merging(adds=True),
        "unaligned": _merging(
            out_b=lambda s: Array(s, np.float32, address=2**40 + 4),
        ),
    }
    assert_answers_differ(check_transparent(forgotten, calls))


def _weights(**changed):
    given = {"shape": (2, 6, 7, 13), "rows": 10, "columns": 5, "heads_kv": 3, "scale": 0.25}
    given |= {"size": (4, 16), "length": 8, "nk": 77} | changed

    def call(device):
        before = len(device.launches)
        batch = given["shape"][0]
        room = Array((batch, given["heads_kv"], given["rows"], given["columns"]), np.float32)
        products = Array(given["shape"], np.float32)
        how = given["scale"], given["size"], given["length"], given["nk"]
        selection.block_weights(products, room, 2, 3, *how)
        return [
            (x.kernel, x.blocks, {n: v for n, v in x.values.items() if _is_number(v)})
            for x in device.launches[before:]
        ]

    return call


def _is_number(x):
    return isinstance(x, float) or (isinstance(x, int) and x < 2**30)


def test_kernels_of_selection(forgotten):
    changes = {"shape": [(1, 6, 7, 13), (2, 3, 7, 13), (2, 6, 8, 13), (2, 6, 7, 12)]}
    changes |= {"rows": [11], "columns": [4], "heads_kv": [2, 6], "scale": [0.5]}
    changes |= {"size": [(2, 16), (4, 32)], "length": [4], "nk": [78]}
    calls = {"as it is": _weights()}
    calls |= {f"{n} {x}": _weights(**{n: x}) for n, values in changes.items() for x in values}
    assert_answers_differ(check_transparent(forgotten, calls))


def _best(columns=40, width=5, sinks=2, local=3, rows=9, last=None):
    def call(device):
        table = np.arange(rows, dtype=np.int32) if last is None else np.array(last, np.int32)
        selection.best_blocks(
            Array((2, 3, rows, columns), np.float32), table.tobytes(), width, sinks, local
        )
        found = device.launches[-1]
        numbers = {n: v for n, v in found.values.items() if _is_number(v)}
        return found.config, found.blocks, numbers, found["last"].tolist()

    return call


def test_kernels_that_choose_blocks(forgotten):
    calls = {"as it is": _best(), "columns": _best(39), "width": _best(width=4)}
    calls |= {"sinks": _best(sinks=1), "local": _best(local=2), "rows": _best(rows=8)}
    calls |= {"last": _best(last=[*range(8), 9]), "more": _best(100)}
    assert_answers_differ(check_transparent(forgotten, calls))


def _means(shape, size, x=Array):
    def call(device):
        selection.block_means(x(shape, np.float16), size)
        found = device.launches[-1]
        numbers = {n: v for n, v in found.values.items() if _is_number(v)}
        return found.config, found.blocks, numbers

    return call


def _products(q, k):
    def call(device):
        selection.block_products(Array(q, np.float32), Array(k, np.float32))
        found = device.launches[-1]
        return found.config, found.blocks, {n: v for n, v in found.values.items() if _is_number(v)}

    return call


def test_kernels_of_means_and_their_products(forgotten):
    calls = {"as it is": _means((2, 50, 6, 64), 8), "batch": _means((1, 50, 6, 64), 8)}
    calls |= {"n": _means((2, 49, 6, 64), 8), "heads": _means((2, 50, 5, 64), 8)}
    calls |= {"head_dim": _means((2, 50, 6, 32), 8), "size": _means((2, 50, 6, 64), 16)}
    calls["single"] = _means((2, 50, 6, 64), 8, lambda *of: Array(*of, address=2**40 + 2))
    assert_answers_differ(check_transparent(forgotten, calls))
    q, k = (2, 6, 7, 64), (2, 3, 13, 64)
    calls = {"as it is": _products(q, k), "planes": _products((1, *q[1:]), (1, *k[1:]))}
    calls |= {"m": _products((2, 6, 8, 64), k), "n": _products(q, (2, 3, 14, 64))}
    calls |= {
        "width": _products((2, 6, 7, 32), (2, 3, 13, 32)),
        "group": _products(q, (2, 6, 13, 64)),
    }
    assert_answers_differ(check_transparent(forgotten, calls))
