"""What stands in for a GPU where the kernels of decode are bound and not run."""

from types import SimpleNamespace

import numpy as np

from nbflash.cuda import launch
from nbflash.cuda.device import Gpu


class Array:
    """What the executor asks of an array on the device."""

    def __init__(self, x):
        self.shape, self.strides, self.ndim = x.shape, x.strides, x.ndim
        self.itemsize, self.data = x.itemsize, SimpleNamespace(ptr=x.__array_interface__["data"][0])


class Device(Gpu):
    """A GPU as far as what is bound can tell."""

    multiprocessors, _id, capability, _stream = 132, 0, (9, 0), None
    smem_limit = 227 * 1024

    def __init__(self):
        pass

    def resident(self, tables):
        return [Array(np.asarray(x)) for x in tables]

    def maps(self, *_):
        return None


def recorded(monkeypatch):
    """A list of what is bound from now on, (spec, trailing words), and run, (words, maps)."""
    found = []

    class Recorder:
        def __init__(self, spec, blocks, trailing, *of_device):
            found.append((spec, trailing))

        def __call__(self, words, maps=()):
            found.append((words, maps))

    monkeypatch.setattr(launch, "bind", Recorder)
    return found


def words_of(spec):
    """The kinds of all words that a kernel takes."""
    return [word for kind in spec.signature for word in launch._words_of(kind)]
