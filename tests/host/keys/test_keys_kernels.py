"""Kernels: what a cubin and a tensor map are known by."""

import dataclasses
import inspect
import types
from types import SimpleNamespace

import numpy as np
import pytest
from keyed import check_cached, check_keyed, each

from nbflash.backends.sm80 import row_kernels
from nbflash.cuda import kernel_key, launch, pause, side_by_side, tensor_map
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.disk_cache.content import Content

CONFIG = row_kernels.RowConfig("float16", 64)


def halved(s, b, h, q, kv):
    return s / 2


def doubled(s, b, h, q, kv):
    return s * 2


def parameters(fn):
    return [name for name in inspect.signature(fn).parameters if name != "self"]


SPEC = {
    "name": "kernel",
    "make": pause.make_pause,
    "config": (CONFIG, halved, doubled),
    "signature": ("int32", "float32"),
    "maps": 1,
    "whole_program": False,
    "launch_bounds": (128, 2),
    "compute_capability": (9, 0),
}
SPECS = {
    "name": ["kernel_"],
    "make": [row_kernels.make_convert_dq_sm80, halved, doubled],
    "config": [
        (dataclasses.replace(CONFIG, head_dim=72), halved, doubled),
        (CONFIG, doubled, halved),
        (CONFIG, halved, halved),
        (CONFIG, doubled, doubled),
        (CONFIG, halved),
        (CONFIG, halved, doubled, halved),
        (halved, CONFIG, doubled),
    ],
    "signature": [("int64", "float32"), ("float32", "int32"), ("int32",)],
    "maps": [0, 2],
    "whole_program": [True],
    "launch_bounds": [(256, 2), (128, 1)],
    "compute_capability": [(8, 0), (9, 1), (10, 0)],
}


def test_kernels(monkeypatch):
    """All fields of a spec, the architecture and the sources."""
    fields = {field.name for field in dataclasses.fields(KernelSpec)}
    digest = ["sources"]
    monkeypatch.setattr(kernel_key, "_digest_of_sources", lambda roots: (*digest, roots))

    def key(compute_capability, **given):
        return kernel_key.of(SimpleNamespace(**given), compute_capability)

    check_keyed(key, SPEC, SPECS, names={*fields, "launch_bounds", "compute_capability"})
    before = key(**SPEC)
    digest.append("changed")
    assert key(**SPEC) != before


def test_the_sources_of_a_kernel(monkeypatch):
    roots = ("nbflash.a", "x"), ("nbflash.b", "y")
    own = kernel_key.name_of_sources(roots)
    assert kernel_key.name_of_sources(roots) == own
    for other in ((roots[0],), roots[::-1], (("nbflash.a", "z"), roots[1])):
        assert kernel_key.name_of_sources(other) != own
    monkeypatch.setattr(kernel_key.sources, "file_digest", lambda name: "another")
    assert kernel_key.name_of_sources(roots) != own


def test_the_toolchain(monkeypatch):
    """Each version counts, ptxas where it assembles and nvJitLink where that one does."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    from cuda.bindings import nvvm

    versions = {"numba-cuda": "1", "nvvm": (1, 0), "nvjitlink": (1, 0), "ptxas": "1"}
    monkeypatch.setattr(kernel_key.importlib.metadata, "version", lambda name: versions[name])
    monkeypatch.setattr(nvvm, "version", lambda: versions["nvvm"])
    monkeypatch.setattr(nvjitlink, "version", lambda: versions["nvjitlink"])
    monkeypatch.setattr(kernel_key.ptxas, "ptxas_version", lambda: versions["ptxas"])

    def keys(**changed):
        kernel_key._toolchain.cache_clear()
        versions.update(changed)
        kinds = SimpleNamespace(whole_program=False), SimpleNamespace(whole_program=True)
        found = [kernel_key.with_toolchain(key, x) for key in ("key", "other") for x in kinds]
        kernel_key._toolchain.cache_clear()
        return found

    before = keys()
    assert len(set(before)) == 4
    assert keys() == before
    for name, linked, whole in (
        ("numba-cuda", True, True),
        ("nvvm", True, True),
        ("nvjitlink", True, False),
        ("ptxas", False, True),
    ):
        after = keys(**{name: ("2", 2)})
        assert (after[0] != before[0], after[1] != before[1]) == (linked, whole), name
        before = after


def test_users_functions(monkeypatch):
    """By content, versions and whatever else decides."""
    versions = {"numba": "1", "numba-cuda": "1"}
    monkeypatch.setattr(kernel_key.importlib.metadata, "version", lambda name: versions[name])

    def key(function, decided_by, **changed):
        versions.update({"numba": "1", "numba-cuda": "1"} | changed)
        return kernel_key.of_function(function, *decided_by)

    base = {"function": halved, "decided_by": ("int32", (9, 0))}
    changes = {"function": [doubled], "decided_by": [("int64", (9, 0)), ("int32", (8, 0)), ()]}
    check_keyed(key, base, changes)
    own = key(**base)
    for name in versions:
        assert key(**base, **{name: "2"}) != own, name
    without_module = {}
    exec("def f(): return 1", without_module)
    assert kernel_key.of_function(without_module["f"]) is None


class _Array:
    def __init__(self, shape, strides):
        dtype = np.dtype(np.float16)
        self.shape, self.dtype = shape, dtype
        self.itemsize = dtype.itemsize
        self.strides = tuple(dtype.itemsize * s for s in (*strides, 1))
        self.data = SimpleNamespace(ptr=2**40)


LAYOUT = {"shape": (2, 6, 4, 64), "strides": (2048, 256, 64), "rows": 64}
LAYOUTS = {
    "shape": [tuple(x) for x in each((2, 6, 4, 64))],
    "strides": [(2056, 256, 64), (2048, 264, 64), (2048, 256, 72)],
    "rows": [128],
}


def test_tensor_maps(monkeypatch):
    """The words of a layout: all that the driver is told but the address."""
    made = lambda address, *given: [address, *map(repr, given)]
    monkeypatch.setattr(tensor_map, "encode", made)
    maps = tensor_map.Maps("float16")
    check_cached(maps.layout, LAYOUT, LAYOUTS, names=parameters(maps.layout))
    by_array = lambda shape, strides, rows: maps(_Array(shape, strides), rows)[1]
    check_cached(by_array, LAYOUT, LAYOUTS)
    assert by_array(**LAYOUT) is maps.layout(*LAYOUT.values())
    base = {"dtype": "float16", "fetched": 256}
    changes = {"dtype": ["bfloat16"], "fetched": [128]}

    def words(**given):
        return tuple(tensor_map.Maps(**given).layout(**LAYOUT))

    check_keyed(words, base, changes, names=parameters(tensor_map.Maps))


def test_kernels_in_memory_and_those_that_are_compiled_beside(monkeypatch):
    """A cubin is taken by the kernel, and for the architecture, that it was compiled for."""
    specs = [
        KernelSpec("kernel", make, CONFIG, (), whole_program=whole)
        for make in (lambda config: 1, lambda config: 2)
        for whole in (False, True)
    ]
    monkeypatch.setattr(side_by_side, "_coming", {})
    monkeypatch.setattr(side_by_side, "_bound", {})
    monkeypatch.setattr(launch, "is_cold", lambda *given: False)
    monkeypatch.setattr(launch, "cached_cubin", lambda *given: given)
    for spec in specs:
        for capability in ((8, 0), (9, 0)):
            side_by_side.expect(spec, capability)
            found = SimpleNamespace(result=lambda *given, at=(spec, capability): ("beside", at))
            side_by_side._coming[spec, capability] = found
    assert len(side_by_side._bound) == 8
    for spec in specs:
        for capability in ((8, 0), (9, 0)):
            assert side_by_side.cubin_of(spec, capability) == ("beside", (spec, capability))
            assert side_by_side.cubin_of(spec, capability) == (spec, capability)
    assert not side_by_side._bound
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(jit=lambda fn: types.SimpleNamespace()))
    check_cached(launch._simulated, {"spec": specs[0]}, {"spec": specs[1:]})
    launch._simulated.cache_clear()


class Jitted:
    """A function of Numba's."""

    overloads = ()


@pytest.mark.parametrize("other", ["a", "c", None])
def test_content_counts_if_it_is_what_was_there_first(other, monkeypatch):
    """Before Numba compiled a function of a user, whichever digest is larger."""
    inner, outer, now = Jitted(), Jitted(), ["b"]

    def content_of(function):
        if function is outer:
            return Content("outer", (inner,))
        return now[0] and Content(now[0], ())

    monkeypatch.setattr(kernel_key, "content_of", content_of)
    assert kernel_key.fresh_content(outer) == "outer"
    now[0] = other
    assert kernel_key.fresh_content(outer) is None
    now[0] = "b"
    assert kernel_key.fresh_content(outer) == "outer"
    inner = Jitted()  # compiled before anybody looked
    inner.overloads = ("compiled",)
    assert kernel_key.fresh_content(outer) is None
