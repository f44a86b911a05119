"""PTX of kernels and what assemblers say of it, kept in pytest's cache.

A kernel's PTX is known by its key and by the versions of the compiler; a report by the PTX and the
assembler.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
import zlib
from pathlib import Path

import addresses
import memory_asm
from cuda.bindings import nvjitlink, nvvm
from numba.cuda import compiler
from suites import observe

from nbflash.cuda import kernel_key, launch, ptxas
from nbflash.cuda.collector import collector_off

DAYS = 14  # that something is kept without being used
LOWERED = 4  # kernels: tests of several architectures follow each other
ANY = (8, 0)  # capability of a key that tells kernels apart whatever they run on
_folder = _list = None
_lowered = {}


def list_in(file):
    """Append a line for every kernel to ``file`` from now on, or, if it is None, to none."""
    global _list
    _list = file


def keep_in(folder):
    """Keep results in a folder from now on; what has not been used for long is deleted."""
    global _folder
    _folder = Path(folder)
    oldest = time.time() - DAYS * 24 * 3600
    for file in _folder.iterdir():
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def cached(make, *key):
    """The text of ``make()``, which strings ``key`` decide."""
    file = _folder / hashlib.sha256("\0".join(key).encode()).hexdigest()
    try:
        text = zlib.decompress(file.read_bytes()).decode()
        os.utime(file)
    except FileNotFoundError:
        text = make()
        handle, temporary = tempfile.mkstemp(dir=_folder)
        with os.fdopen(handle, "wb") as out:
            out.write(zlib.compress(text.encode(), 1))
        os.replace(temporary, file)
    return text


def compile_ptx(spec, capability):
    """:func:`nbflash.cuda.launch.compile_ptx`, kept, but for functions without a content.

    Raises AssertionError if a global address comes of a product of 32 bits, or if the compiler may
    move inline PTX past other accesses of memory.
    """
    observe(f"{spec.name} {launch.arch_of(capability)}")
    found, _, ptx = _kept_ptx(spec, capability).partition("\n")
    narrow, unordered = json.loads(found)
    assert not narrow, f"{spec.name}: addresses of 32 bits, {narrow}; see addresses.py"
    assert not unordered, f"{spec.name}: no memory clobber, {unordered}; see memory_asm.py"
    if _list:
        digest = hashlib.sha256(code_of(ptx).encode()).hexdigest()[:16]
        with open(_list, "a") as out:
            out.write(f"{spec.name} {launch.arch_of(capability)} {spec.config} {digest}\n")
    return ptx


def code_of(ptx):
    """Of PTX what is code: no names that count the functions that a process has compiled."""
    lines = (line for line in ptx.splitlines() if "NumbaEnv" not in line)
    return re.sub(r"_cudapy_smem_\d+", "smem", "\n".join(lines))


@contextlib.contextmanager
def lowering_kept(kernel):
    """Let Numba lower ``kernel`` for one architecture only: NVVM alone asks which one it is."""
    lower = compiler._compile_pyfunc_with_fixup

    def lowered(*arguments, **options):
        if kernel not in _lowered:
            while len(_lowered) >= LOWERED:
                del _lowered[next(iter(_lowered))]
            _lowered[kernel] = lower(*arguments, **options)
        return _lowered[kernel]

    compiler._compile_pyfunc_with_fixup = lowered
    try:
        yield
    finally:
        compiler._compile_pyfunc_with_fixup = lower


def _checked_ptx(spec, capability):
    """A line with what `addresses` and `memory_asm` find, and the PTX."""
    with collector_off(), addresses.read_ir() as modules:
        ptx = launch.compile_ptx(spec, capability)
        found = addresses.narrow_products(tuple(modules)), memory_asm.unordered(modules)
    return f"{json.dumps(found)}\n{ptx}"


def _kept_ptx(spec, capability):
    key = kernel_key.of(spec, capability)
    if key is None:
        return _checked_ptx(spec, capability)
    checks = [Path(x.__file__).read_text() for x in (addresses, memory_asm)]
    versions = importlib.metadata.version("numba-cuda"), nvvm.version()

    def make():
        with lowering_kept(kernel_key.of(spec, ANY)):
            return _checked_ptx(spec, capability)

    return cached(make, key, repr(versions), *checks)


def report_of(ptx, arch):
    """:func:`nbflash.cuda.ptxas.report`: what ``ptxas -v`` says."""
    key = str(ptxas.ptxas_version()), arch, ptx
    return cached(lambda: ptxas.report(ptx, arch), *key)


def linker_log(ptx, arch, link):
    """``link(ptx, arch)``: what nvJitLink says."""
    return cached(lambda: link(ptx, arch), repr(nvjitlink.version()), arch, ptx)
