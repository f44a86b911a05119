"""Arrays as device code sees them: checked indices, poisoned contents, recorded accesses.

NumPy lets an index of -1 wrap and a slice end early; a GPU reads whatever lies there. Here
both raise. The common case, one element by integer indices, costs about 30 ns more than
NumPy. With race detection every access also goes through :class:`.race.Shadow`.
"""

import numpy as np

from nbflash.cuda.simulator.dtypes import numpy_dtype
from nbflash.cuda.simulator.errors import OutOfBounds, SimError
from nbflash.cuda.simulator.race import ATOMIC, READ, WRITE


class Allocation:
    """One memory that arrays are views of.

    Attributes
    ----------
    base : int
        Address of its first byte.
    shadow : Shadow or None
        None without race detection.
    """

    __slots__ = ("base", "shadow")

    def __init__(self, base, shadow):
        self.base, self.shadow = base, shadow


def wrap(data, home):
    """A NumPy view of ``home`` as device code may use it."""
    if home.shadow is not None:
        return TracedArray(data, home)
    if data.ndim == 1:
        return Array1(data, home)
    return (Array2 if data.ndim == 2 else DeviceArray)(data, home)


def checked(shape, key):
    """``key`` if every index and slice in it lies inside ``shape``."""
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) > len(shape):
        raise OutOfBounds(f"index {key} has more parts than the shape {shape}")
    for part, size in zip(parts, shape, strict=False):
        if isinstance(part, slice):
            _check_slice(part, size, shape)
        elif part < 0:
            raise OutOfBounds(f"negative index {key} into shape {shape}")
        elif part >= size:
            raise OutOfBounds(f"index {key} is out of bounds for shape {shape}")
    return key


def _check_slice(part, size, shape):
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    if part.step not in (None, 1):
        raise SimError(f"slice step {part.step}: device code takes contiguous slices only")
    if not 0 <= start <= stop <= size:
        raise OutOfBounds(f"slice {start}:{stop} is out of bounds for shape {shape}")


class DeviceArray:
    """A NumPy array behind device semantics. Made by the simulator only."""

    __slots__ = ("data", "home")

    def __init__(self, data, home):
        self.data, self.home = data, home

    def __getitem__(self, key):
        return self._get(key)

    def __setitem__(self, key, value):
        self.data[checked(self.data.shape, key)] = value

    def _get(self, key):
        value = self.data[checked(self.data.shape, key)]
        return wrap(value, self.home) if isinstance(value, np.ndarray) else value

    def __iter__(self):
        if self.data.ndim == 1:
            return iter(self.data)
        return (self._get(i) for i in range(len(self.data)))

    def __len__(self):
        return len(self.data)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.data, dtype=dtype, copy=copy)

    def view(self, dtype):
        """The same bytes as another dtype (a NumPy or a Numba type)."""
        return wrap(self.data.view(numpy_dtype(dtype)), self.home)

    def reshape(self, *shape):
        """The same elements in another shape."""
        return wrap(self.data.reshape(*shape), self.home)

    def update(self, key, change):
        """Replace one element by ``change(old)`` atomically and return ``old``."""
        old = self.data[checked(self.data.shape, key)]
        self.data[key] = change(old)
        return old

    def vector(self, index, count):
        """``count`` consecutive elements of a 1-D array as one access."""
        return tuple(self[index : index + count])

    def load(self, index, count):
        """``count`` consecutive elements of a 1-D array as one aligned vector access."""
        self._check_vector(index, count)
        return tuple(self[index : index + count])

    def store(self, index, values):
        """Write consecutive elements of a 1-D array as one aligned vector access."""
        self._check_vector(index, len(values))
        self[index : index + len(values)] = values

    def _check_vector(self, index, count):
        """A GPU traps on a vector access whose address is no multiple of its size."""
        nbytes = count * self.data.itemsize
        address = self.data.__array_interface__["data"][0] + int(index) * self.data.strides[0]
        if address % min(nbytes, 16) or self.data.strides[0] != self.data.itemsize:
            raise SimError(f"element {index} is not aligned to a vector of {nbytes} bytes")

    shape = property(lambda self: self.data.shape)
    strides = property(lambda self: self.data.strides)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    itemsize = property(lambda self: self.data.itemsize)
    nbytes = property(lambda self: self.data.nbytes)


class Array1(DeviceArray):
    """One axis, no race detection."""

    __slots__ = ()

    def __getitem__(self, index):
        try:
            if index >= 0:
                return self.data[index]
        except TypeError:
            pass
        return self._get(index)

    def vector(self, index, count):
        data = self.data
        if not 0 <= index <= len(data) - count:
            checked(data.shape, slice(index, index + count))
        return tuple(data[index : index + count])

    def __setitem__(self, index, value):
        if type(index) is slice:
            self.data[checked(self.data.shape, index)] = value
            return
        try:
            if index >= 0:
                self.data[index] = value
                return
        except TypeError:
            pass
        self.data[checked(self.data.shape, index)] = value


class Array2(DeviceArray):
    """Two axes, no race detection."""

    __slots__ = ()

    def __getitem__(self, key):
        try:
            i, j = key
            if i >= 0 and j >= 0:
                return self.data[key]
        except TypeError:
            pass
        return self._get(key)

    def __setitem__(self, key, value):
        try:
            i, j = key
            if i >= 0 and j >= 0:
                self.data[key] = value
                return
        except TypeError:
            pass
        self.data[checked(self.data.shape, key)] = value


class TracedArray(DeviceArray):
    """Any number of axes; element accesses are recorded in the allocation's shadow."""

    __slots__ = ("note", "offset", "strides_")

    def __init__(self, data, home):
        self.data, self.home = data, home
        self.offset = data.__array_interface__["data"][0] - home.base
        self.strides_ = data.strides
        self.note = home.shadow.note

    def _at(self, key):
        """Byte offset of one element; TypeError if ``key`` does not name one."""
        at = self.offset
        if len(self.strides_) == 1:
            if key < 0:
                raise OutOfBounds(f"negative index {key} into shape {self.data.shape}")
            return at + int(key) * self.strides_[0]
        if len(key) != len(self.strides_):
            raise TypeError
        for part, step in zip(key, self.strides_, strict=True):
            if part < 0:
                raise OutOfBounds(f"negative index {key} into shape {self.data.shape}")
            at += int(part) * step
        return at

    def __getitem__(self, key):
        try:
            at = self._at(key)
        except TypeError:
            return self._get(key)
        value = self.data[key]
        self.note(at, value.itemsize, value.itemsize, READ)
        return value

    def vector(self, index, count):
        data, (step,) = self.data, self.strides_
        if step != data.itemsize:
            return super().vector(index, count)
        if not 0 <= index <= len(data) - count:
            checked(data.shape, slice(index, index + count))
        self.note(self.offset + int(index) * step, count * step, step, READ)
        return tuple(data[index : index + count])

    def __setitem__(self, key, value):
        data = self.data
        try:
            at = self._at(key)
        except TypeError:
            self.home.shadow.note_view(data[checked(data.shape, key)], self.home.base, WRITE)
            data[key] = value
            return
        data[key] = value
        self.note(at, data.itemsize, data.itemsize, WRITE)

    def __iter__(self):
        if self.data.ndim == 1:
            self.home.shadow.note_view(self.data, self.home.base, READ)
        return super().__iter__()

    def __array__(self, dtype=None, copy=None):
        self.home.shadow.note_view(self.data, self.home.base, READ)
        return super().__array__(dtype, copy)

    def update(self, key, change):
        at = self._at(key)
        old = super().update(key, change)
        self.note(at, self.data.itemsize, self.data.itemsize, ATOMIC)
        return old
