"""From a kernel to a launch: compile, cache the cubin on disk, load, pack arguments.

Numba compiles, nvJitLink (ptxas for whole programs) assembles, the driver loads and launches, CuPy
owns the memory. A kernel that is kept on disk needs neither Numba nor ``cuda.core``: they are
imported to compile. Under the simulator the same kernel object is called the ordinary way.
"""

import ctypes
import functools
import itertools
import re
import struct
import threading
import warnings

from nbflash.cuda import bundled, kernel_key, ptxas
from nbflash.cuda.availability import arch_of, cubin_dir
from nbflash.cuda.collector import collector_off
from nbflash.cuda.kinds import float32, float64, int64, numba_type
from nbflash.cuda.ptx._asm import compiling_for, cuda, types
from nbflash.disk_cache import sealed

MAP_WORDS = 16  # eight bytes each: a tensor map
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
KERNELS = 1024  # remembered; a plan holds its own
# Whose cubins a device runs besides its own: of older ones of its generation, but not for Tegra.
_RUNS_TOO = {(8, 6): [(8, 0)], (8, 9): [(8, 6), (8, 0)]}


def compile_ptx(spec, compute_capability):
    """The kernel of ``spec`` as PTX text whose entry is called ``spec.name``."""
    major, minor = compute_capability
    target = (major, minor, "a") if major >= 9 else (major, minor)
    # Collecting makes a fifth of the time that Numba compiles.
    with compiling_for(target), collector_off():
        ptx, _ = cuda.compile_ptx(
            spec.make(spec.config),
            types.void(*map(numba_type, spec.signature)),
            cc=target,
            launch_bounds=spec.launch_bounds,
        )
    entry = re.search(r"\.entry\s+(\w+)", ptx)[1]
    ptx = ptx.replace(entry, spec.name)
    for i in range(spec.maps):
        ptx = _by_value(ptx, f"{spec.name}_param_{i}")
    return ptx


def _by_value(ptx, name):
    """Turn a parameter that holds the address of a tensor map into the map itself.

    Numba knows no such parameter. What the kernel reads is the address in either case.
    """
    declared = f".param .align 64 .b8 {name}[{8 * MAP_WORDS}]"
    ptx = re.sub(rf"\.param \.u64 {name}\b", declared, ptx)
    read = rf"ld\.param\.u64\s+(%rd\d+), \[{name}\];"
    return re.sub(read, rf"mov.b64 \1, {name};\n\tcvta.param.u64 \1, \1;", ptx)


def compile_cubin(spec, compute_capability):
    """The kernel of ``spec`` as a cubin (bytes). Needs no driver and no device."""
    ptx, arch = compile_ptx(spec, compute_capability), arch_of(compute_capability)
    if spec.whole_program:
        return ptxas.assemble(ptx, arch)
    from cuda.core import Linker, LinkerOptions, ObjectCode

    code = ObjectCode.from_ptx(ptx.encode())
    return bytes(Linker(code, options=LinkerOptions(arch=arch)).link("cubin").code)


def cached_cubin(spec, compute_capability):
    """:func:`compile_cubin` behind what comes with nbflash, and a disk cache of all processes."""
    key = kernel_key.of(spec, compute_capability)
    cubin = _at_hand(spec, key, compute_capability)
    if cubin is None:
        cubin = compile_cubin(spec, compute_capability)
        # A function that was changed while it was compiled is known by neither of its contents.
        if key and kernel_key.of(spec, compute_capability) == key:
            _keep(_path(spec, key), cubin)
    return cubin


def is_cold(spec, compute_capability):
    """Whether a kernel has to be compiled before it runs."""
    return _at_hand(spec, kernel_key.of(spec, compute_capability), compute_capability) is None


def _at_hand(spec, key, compute_capability):
    """The cubin of a key that need not be compiled, or None."""
    if key is None:
        return None
    cubin = _bundled(spec, compute_capability)
    return sealed.read(_path(spec, key)) if cubin is None else cubin


def _bundled(spec, compute_capability):
    """One that comes with nbflash for an architecture whose cubins run on this one."""
    for capability in (compute_capability, *_RUNS_TOO.get(compute_capability, ())):
        cubin = bundled.find(kernel_key.of(spec, capability))
        if cubin is not None:
            return cubin
    return None


def _path(spec, key):
    """Where it is kept."""
    return cubin_dir() / f"{spec.name}-{kernel_key.with_toolchain(key, spec)[:32]}.cubin"


def _keep(path, cubin):
    try:
        sealed.write_private(path, cubin)
    except OSError as error:
        warnings.warn(
            f"compiled kernels are not cached, set NBFLASH_CACHE_DIR: {error}", stacklevel=3
        )


@functools.lru_cache(maxsize=KERNELS)
def load(spec, device_id, capability):
    """The handle of a kernel on one device, for as long as the process lives."""
    from cuda.bindings import driver

    from nbflash.cuda import side_by_side

    cubin, smem_bytes = side_by_side.cubin_of(spec, capability), spec.config.smem_bytes
    loaded = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    library = _given(loaded, f"loading {spec.name}")
    kernel = _given(driver.cuLibraryGetKernel(library, spec.name.encode()), f"finding {spec.name}")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    allowed = driver.cuKernelSetAttribute(attribute, smem_bytes, kernel, device_id)
    _given(allowed, f"{smem_bytes} bytes of shared memory for {spec.name}")
    return int(kernel)


def _given(answer, what):
    """What a call of the driver gives besides its status."""
    status, *found = answer
    if status != 0:
        raise RuntimeError(f"{what}: {status!r}")
    return found[0] if found else None


def bind(spec, blocks, trailing, device_id, capability, current_stream, late=0):
    """A kernel whose trailing arguments are bound: ``run(leading, maps=())`` gives the others.

    ``run`` launches on the current stream, from any thread; it is a function, since to call an
    object takes longer. ``leading``: the words of the first arguments behind the tensor maps;
    ``maps``: those that the kernel begins with, as `nbflash.cuda.tensor_map.Maps` gives them.
    It is compiled or read from disk, and loaded, when it is first run: what else is bound by then
    is compiled beside it. ``run.is_cold()``: whether it has to be compiled.

    Parameters
    ----------
    spec : KernelSpec
    blocks : int
    trailing : sequence of numbers
        The last values for ``spec.signature``: addresses are integers.
    device_id : int
    capability : (int, int)
        Of the device.
    current_stream : callable
        Gives the number of the stream to launch on.
    late : int
        Which of them ``run(leading, maps, words)`` may give anew: those from there on.
    """
    import cupy

    from nbflash.cuda import side_by_side

    # The driver's own call: CuPy's wrapper takes half the time of cuda.bindings'.
    driver = cupy.cuda.driver
    launch = driver.launchKernel
    side_by_side.expect(spec, capability)
    geometry = None
    kinds = [word for kind in spec.signature for word in _words_of(kind)]
    sizes = [MAP_WORDS] * spec.maps + [1] * (len(kinds) - spec.maps)
    at = list(itertools.accumulate(sizes, initial=0))
    slots = (ctypes.c_uint64 * at[-1])()
    base, size = ctypes.addressof(slots), ctypes.sizeof(ctypes.c_uint64)
    table = (ctypes.c_void_p * len(kinds))(*(base + size * i for i in at[:-1]))
    pointers, layouts, behind_maps = ctypes.addressof(table), [None] * spec.maps, at[spec.maps]
    start = len(kinds) - len(trailing)
    late_at = at[start + late]
    for i, value in enumerate(trailing, start):
        slots[at[i]] = _bits(kinds[i], value)
    lock = threading.Lock()

    def loaded():
        config, kernel = spec.config, load(spec, device_id, capability)
        return kernel, blocks, 1, 1, config.threads, 1, 1, config.smem_bytes

    def run(leading, maps=(), words=()):
        nonlocal geometry
        with lock:
            if geometry is None:
                geometry = loaded()
            for i, (address, layout) in enumerate(maps):
                first = MAP_WORDS * i
                slots[first] = address
                if layout is not layouts[i]:  # as it seldom is
                    slots[first + 1 : first + MAP_WORDS] = layouts[i] = layout
            slots[behind_maps : behind_maps + len(leading)] = leading
            if words:
                slots[late_at : late_at + len(words)] = words
            try:
                launch(*geometry, current_stream(), pointers, 0)
            except driver.CUDADriverError as error:
                if error.status != INVALID_CONTEXT:
                    raise
                # Nothing of the runtime has run in this thread: one of torch's backward pass, say.
                cupy.cuda.runtime.setDevice(device_id)
                launch(*geometry, current_stream(), pointers, 0)

    run.table = table  # alive as long as `run`, too: what `pointers` refer to
    run.is_cold = lambda: geometry is None and is_cold(spec, capability)
    return run


def _words_of(kind):
    """The types of the words that an argument is passed as."""
    if kind.name == "Tuple":
        return [word for part in kind.parts for word in _words_of(part)]
    if kind.name == "Array":  # two of Numba's own, sizes, address, shape, strides
        return [int64] * (5 + 2 * kind.ndim)
    return [kind]


def flattened(values):
    """Numbers and CuPy arrays in tuples as the words of :func:`_words_of`."""
    if isinstance(values, tuple):
        return [word for part in values for word in flattened(part)]
    if not getattr(values, "ndim", 0):
        return [values]
    x = values
    return [0, 0, x.size, x.dtype.itemsize, x.data.ptr, *x.shape, *x.strides]


def numbers(values):
    """Numbers and NumPy arrays in tuples, one after the other."""
    if isinstance(values, tuple):
        return [word for part in values for word in numbers(part)]
    return [values]


def _bits(kind, value):
    """The eight bytes whose first ones are ``value`` as the kernel reads it."""
    code = {float32: "<f", float64: "<d"}.get(kind)
    if code is None:
        return int(value) & 0xFFFFFFFFFFFFFFFF
    return int.from_bytes(struct.pack(code, value).ljust(8, b"\0"), "little")


@functools.lru_cache(maxsize=KERNELS)
def _simulated(spec):
    return cuda.jit(spec.make(spec.config))


def simulate(spec, blocks, arguments):
    """Run a kernel in the simulator; tensors are NumPy arrays of one axis."""
    config = spec.config
    _simulated(spec)[blocks, config.threads, 0, config.smem_bytes](*arguments)
