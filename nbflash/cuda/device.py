"""A CUDA device, or the simulator in its place: what binds kernels, allocates and makes maps.

Executors know no difference. What a kernel takes is a list of *words*, in the order of its
signature: numbers, and addresses as :meth:`Gpu.address` gives them.
"""

import itertools
import math
import operator
import sys
from functools import cache, partial
from types import SimpleNamespace

import numpy as np

from nbflash.cuda import launch, tensor_map
from nbflash.cuda.ptx._asm import SIM
from nbflash.inputs import arrays, tensors

_NO_NUMBER = -0x5A5A5A5B  # of memory of the simulator that nobody has written


@cache
def cuda_device(device_id, of_torch=False):
    """The CUDA device of that number, with torch's memory and streams; or the simulator."""
    return Simulated() if SIM else (TorchGpu if of_torch else Gpu)(device_id)


class _Device:
    """What follows from ``address``, ``resident`` and ``_no_state``, two zeros that are."""

    def words(self, tensors, *tuples):
        """The words of arrays (or of addresses), and then those of tuples of numbers."""
        found = [self.address(x) for x in tensors]
        for numbers in tuples:
            found += numbers
        return found

    def state(self, seed):
        """Dropout's two integers and where what changes them is: zeros, or the user's array."""
        if isinstance(seed, tuple):
            return *seed, self._no_state
        return 0, 0, self.address(seed)

    def places(self, sums):
        """The words of arrays with their shapes."""
        return [word for x in sums for word in (self.address(x), *x.shape)]


class Gpu(_Device):
    """One CUDA device, with CuPy's memory and streams."""

    def __init__(self, device_id):
        import cupy

        device = cupy.cuda.Device(device_id)
        self._id = device_id
        self.empty = cupy.ndarray  # cupy.empty takes twice as long
        self._alloc, current = cupy.cuda.alloc, cupy.cuda.get_current_stream
        self._stream = lambda: current().ptr
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._memset = cupy.cuda.runtime.memsetAsync
        self.smem_limit = device.attributes["MaxSharedMemoryPerBlockOptin"]
        self.vector_red = int(device.compute_capability) >= 90
        self.cp_async = int(device.compute_capability) >= 80
        self.capability = divmod(int(device.compute_capability), 10)
        self.multiprocessors = device.attributes["MultiProcessorCount"]
        with device:
            (self._zeros,) = self.resident([np.zeros(2, np.uint64)])
        self._no_state = self._zeros.data.ptr

    @staticmethod
    def address(x):
        """Where an array is; an address stays one."""
        return x if type(x) is int else x.data.ptr

    def scratch(self, shapes, dtype):
        """What allocates memory for arrays of these shapes, in the pool of the current stream.

        It returns the memory, which is free when nobody holds it, and where each array is. An
        array of CuPy's own would cost a microsecond or two.
        """
        alloc, itemsize, at = self._alloc, np.dtype(dtype).itemsize, self._at
        sizes = [-(-math.prod(shape) * itemsize // 16) * 16 for shape in shapes]
        *starts, total = itertools.accumulate(sizes, initial=0)

        def allocate():
            memory = alloc(total)
            first = at(memory)
            return memory, [first + start for start in starts]

        return allocate

    _at = staticmethod(operator.attrgetter("ptr"))  # where allocated memory is

    def rows(self, x):
        """Where each row of an array is."""
        return range(x.data.ptr, x.data.ptr + x.shape[0] * x.strides[0], x.strides[0])

    def integers(self, sizes):
        """int32 arrays of these sizes that nobody has written."""
        return [self.empty((n,), np.int32) for n in sizes]

    def stream(self):
        """The current stream, and whether a CUDA graph records it: never the legacy one."""
        stream = self._stream()
        return stream, bool(stream) and self._is_capturing(stream)

    def clear(self, address, nbytes, stream):
        """Set memory to 0."""
        self._memset(address, 0, nbytes, stream)

    def resident(self, tables):
        """NumPy arrays where the kernels of any stream read them."""
        return arrays.resident(tables)

    def params(self, given):
        """A score's parameters as the kernels read them."""
        return arrays.resident_params(given)

    def maps(self, dtype, fetched=256):
        """What makes tensor maps: see `nbflash.cuda.tensor_map.Maps`."""
        return tensor_map.Maps(dtype, fetched)

    def bind(self, spec, blocks, constants=(), tables=(), more=()):
        """A kernel whose last arguments are bound: constants, tables, and ``more``.

        Parameters
        ----------
        spec : nbflash.cuda.kernel_spec.KernelSpec
        blocks : int
        constants : tuple
            Numbers, and tuples of them.
        tables : sequence of numpy.ndarray, or callable
            Copied to the device. A callable makes them anew for every call: ``tables(lists)`` is
            a pair of their words, ``tables.count`` of them, and what keeps them alive.
        more : tuple
            Numbers and arrays in tuples, those of `params` among them.

        Returns
        -------
        callable
            ``run(leading, maps=(), lists=())`` with the words of the first arguments, the tensor
            maps that the kernel begins with, and what ``tables`` are made of.
        """
        constants, more_words = launch.flattened(constants), launch.flattened(more)
        of_device = self._id, self.capability, self._stream
        if callable(tables):
            trailing, late = (*constants, *[0] * tables.count, *more_words), len(constants)
            run = launch.bind(spec, blocks, trailing, *of_device, late)
            return _with_tables_of_a_call(run, tables, more)
        held = self.resident(tables)
        trailing = (*constants, *(t.data.ptr for t in held), *more_words)
        run = launch.bind(spec, blocks, trailing, *of_device)
        run.tables = held, more  # alive as long as the kernel that reads them
        return run


class TorchGpu(Gpu):
    """One CUDA device, with the memory and the streams of torch, which has been imported."""

    def __init__(self, device_id):
        super().__init__(device_id)
        torch = sys.modules["torch"]
        new = {"dtype": torch.uint8, "device": torch.device("cuda", device_id)}
        self.empty, self._alloc = tensors.allocator(device_id), partial(torch.empty, **new)
        self._stream = partial(torch._C._cuda_getCurrentRawStream, device_id)

    _at = staticmethod(operator.methodcaller("data_ptr"))


#: Bytes of shared memory that a block may have, by compute capability.
SHARED_MEMORY = {
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}


class Recording(_Device):
    """A device that need not be there: it notes the kernels that an executor binds, in ``specs``.

    Parameters
    ----------
    capability : (int, int)
        One of `SHARED_MEMORY`.
    """

    multiprocessors = 132  # decides how many blocks there are, not which kernels

    def __init__(self, capability):
        self.capability, self.smem_limit = capability, SHARED_MEMORY[capability]
        self.vector_red, self.cp_async = capability >= (9, 0), capability >= (8, 0)
        self.specs = {}

    @staticmethod
    def params(given):
        return given

    @staticmethod
    def maps(dtype, fetched=256):
        """Nothing runs, and so no driver encodes layouts."""
        return SimpleNamespace(layout=lambda *_: None)

    @staticmethod
    def resident(tables):
        return [None for _ in tables]

    @staticmethod
    def address(x):
        """Nothing runs, and so nothing is read."""

    @staticmethod
    def scratch(shapes, dtype):
        """Nothing runs, and so nothing is allocated."""

    def bind(self, spec, *_):
        self.specs[spec] = True


class Simulated(_Device):
    """The simulator: kernels run on NumPy arrays. An address is all memory from an element on."""

    smem_limit = 227 * 1024
    vector_red = cp_async = True
    capability = 9, 0
    multiprocessors = 4
    _no_state = np.zeros(2, np.uint64)

    @staticmethod
    def empty(shape, dtype):
        return np.full(shape, np.nan, dtype)

    @staticmethod
    def address(x):
        """All memory that an array reaches, from its first element on, as one axis."""
        if not isinstance(x, np.ndarray) or not x.size:
            return x
        if min(x.strides) < 0:
            raise ValueError(
                f"the simulator takes no negative strides, got {x.strides}; copy it first"
            )
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
        span = 1 + reach // x.itemsize
        return np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,))

    def scratch(self, shapes, dtype):
        return lambda: (None, [self.empty(shape, dtype) for shape in shapes])

    def integers(self, sizes):
        return [np.full(n, _NO_NUMBER, np.int32) for n in sizes]

    @staticmethod
    def rows(x):
        return x

    @staticmethod
    def stream():
        return 0, False

    @staticmethod
    def clear(address, nbytes, stream):
        address.view(np.uint8).reshape(-1)[:nbytes] = 0

    @staticmethod
    def resident(tables):
        return [np.ascontiguousarray(t) for t in tables]

    @staticmethod
    def params(given):
        return given

    @staticmethod
    def maps(dtype, fetched=256):
        return _SimulatedMaps()

    def bind(self, spec, blocks, constants=(), tables=(), more=()):
        from nbflash.cuda.simulator.arguments import arguments

        constants, more_words = launch.numbers(constants), launch.numbers(more)
        held = [] if callable(tables) else [self.address(t) for t in self.resident(tables)]

        def run(leading, maps=(), words=()):
            given = [*leading, *constants, *(words or held), *more_words]
            launch.simulate(spec, blocks, arguments(spec.signature, given, maps))

        return _with_tables_of_a_call(run, tables, more) if callable(tables) else run


def _with_tables_of_a_call(run, tables, more):
    """``run`` of a kernel whose tables are made when it is called."""

    def run_with(leading, maps=(), lists=()):
        words, held = tables(lists)
        run(leading, maps, words)
        del held  # not before the launch: its memory goes to what comes next on the stream

    run_with.tables, run_with.is_cold = (tables, more), getattr(run, "is_cold", None)
    return run_with


class _SimulatedMaps:
    """As `nbflash.cuda.tensor_map.Maps`; the simulator takes the geometry of a map as it is."""

    layout = staticmethod(tensor_map.geometry)

    def __call__(self, x, rows):
        return Simulated.address(x), self.layout(x.shape, arrays.strides(x), rows)
