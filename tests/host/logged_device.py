"""A device that notes every launch, by the names of its kernel's parameters."""

import dataclasses
import functools
import inspect
import itertools

import numpy as np
from cuda_arrays import DeviceArray

from nbflash.cuda import launch, tensor_map
from nbflash.cuda.device import Recording
from nbflash.inputs import arrays

_addresses = itertools.count(2**50, 2**24)


class Array(DeviceArray):
    """A `DeviceArray` with what executors do besides reading it."""

    itemsize = property(lambda self: self.dtype.itemsize)

    def copy(self, order="C"):
        return Array(self.shape, self.dtype)

    def reshape(self, *shape):
        return Array(shape, self.dtype, address=self.data.ptr)


class OwnArray(Array):
    """One that can be written."""

    def __setitem__(self, index, value):
        assert index is Ellipsis
        assert value.shape == self.shape


def padded(shape, dtype=np.float16, more=16):
    """An array with gaps: no other has its strides."""
    steps, size = [np.dtype(dtype).itemsize], [*shape[1:-1], shape[-1] + more]
    for n in reversed(size):
        steps.insert(0, steps[0] * n)
    return Array(shape, dtype, strides=tuple(steps))


@functools.cache
def _parameters(spec):
    kernel = spec.make(spec.config)
    return tuple(inspect.signature(getattr(kernel, "py_func", kernel)).parameters)


def _check_types(spec):
    """Flags, whole numbers and words of a configuration are what its fields say.

    1 and True, or 0.25 and True where only whether counts, would be two kernels, or one too few.
    """
    kinds = {"bool": bool, "int": int, "str": str}
    for field in dataclasses.fields(spec.config):
        name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        value = getattr(spec.config, field.name)
        assert kinds.get(name, type(value)) is type(value), (
            f"{spec.name}: {field.name} is {value!r}"
        )


class Launch:
    """One launch: ``kernel``, ``blocks``, ``config``, and values by the names of parameters.

    Those of tuples are lists, those of tensor maps pairs of an address and a geometry.
    """

    def __init__(self, spec, blocks, words, maps):
        self.kernel, self.blocks, self.config = spec.name, blocks, spec.config
        _check_types(spec)
        names, words = _parameters(spec), list(words)
        assert len(names) == len(spec.signature)
        assert len(maps) == spec.maps
        self.values = dict(zip(names, maps, strict=False))
        self.kinds = dict(zip(names[spec.maps :], spec.signature[spec.maps :], strict=True))
        for name, kind in self.kinds.items():
            parts = launch._words_of(kind)
            count = len(parts)
            own, words = words[:count], words[count:]
            assert len(own) == count, f"{spec.name} has too few words for {name}"
            for word, part in zip(own, parts, strict=True):
                whole = isinstance(word, int | np.integer | np.bool_)
                if part.name.startswith(("int", "uint")):
                    limits = np.iinfo(part.name)
                    fits = whole and limits.min <= word <= limits.max
                    assert fits, f"{spec.name}: {name} is {word!r}"
            self.values[name] = own[0] if count == 1 and kind.name != "Tuple" else own
        assert not words, f"{spec.name} has {len(words)} words that no parameter takes"

    def __getitem__(self, name):
        return self.values[name]


class Logged(Recording):
    """Kernels are noted in ``launches`` when they run, and in ``specs`` when they are bound."""

    def __init__(self, capability=(9, 0)):
        super().__init__(capability)
        self.launches, self._no_state = [], 77
        self.encoded = []  # what tensor maps were asked for: dtype, bytes fetched at once

    empty = Array

    @staticmethod
    def address(x):
        return x if isinstance(x, int) else x.data.ptr

    def params(self, given):
        """Arrays of numbers as arrays of the device."""
        if isinstance(given, tuple):
            return tuple(map(self.params, given))
        return Array(given.shape, given.dtype) if getattr(given, "ndim", 0) else given

    @staticmethod
    def resident(tables):
        return [Array(x.shape, x.dtype) for x in tables]

    def scratch(self, shapes, dtype):
        return lambda: (None, [next(_addresses) for _ in shapes])

    def integers(self, sizes):
        return [Array((n,), np.int32) for n in sizes]

    def stream(self):
        return 0, False

    def clear(self, address, nbytes, stream):
        """Nothing is there."""

    def rows(self, x):
        return range(x.data.ptr, x.data.ptr + x.shape[0] * x.strides[0], x.strides[0])

    def maps(self, dtype, fetched=256):
        self.encoded.append((dtype, fetched))
        return Maps()

    def bind(self, spec, blocks, constants=(), tables=(), more=()):
        super().bind(spec)
        constants, more = launch.numbers(constants), launch.flattened(more)

        def run(leading, maps=(), lists=()):
            words = tables
            if callable(tables):
                words, _ = tables(lists)
                assert len(words) == tables.count
            given = [*leading, *constants, *words, *more]
            self.launches.append(Launch(spec, blocks, given, maps))

        run.is_cold = lambda: False
        return run


class Maps:
    """As `nbflash.cuda.tensor_map.Maps`, with the geometry in the place of the driver's words."""

    layout = staticmethod(tensor_map.geometry)

    def __call__(self, x, rows):
        return x.data.ptr, self.layout(x.shape, arrays.strides(x), rows)
