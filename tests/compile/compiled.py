"""PTX of kernels and what assemblers say of it, kept in pytest's cache.

A kernel's PTX is known by the sources that its module imports, directly or not, by its
configuration and by the versions of the compiler; a report by the PTX and the assembler.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import time
import zlib
from pathlib import Path

from cuda.bindings import nvjitlink, nvvm
from suites import observe

from nbflash.cuda import launch, ptxas

DAYS = 14  # that something is kept without being used
_folder = _list = None


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


def _imports(name, source):
    """Modules of nbflash and masks that the source of module ``name`` may import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = importlib.util.resolve_name("." * node.level + module, name + ".x")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def _source(name):
    """The source of a module of ours, or None."""
    if name.partition(".")[0] not in ("nbflash", "masks"):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name of a module that is no package
        return None
    return spec and Path(spec.origin).read_text()


@functools.cache
def source_digest(module):
    """A digest of a module and of all of ours that it imports, directly or not."""
    found, left = {}, [module]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _source(name)
            left += _imports(name, found[name]) if found[name] else ()
    digest = hashlib.sha256()
    for name in sorted(name for name, source in found.items() if source):
        digest.update(name.encode() + found[name].encode())
    return digest.hexdigest()


def compile_ptx(spec, capability):
    """:func:`nbflash.cuda.launch.compile_ptx`, kept, but for a user's own functions."""
    observe(f"{spec.name} {launch.arch_of(capability)}")
    ptx = _kept_ptx(spec, capability) if spec.on_disk else launch.compile_ptx(spec, capability)
    if _list:
        digest = hashlib.sha256(_code(ptx).encode()).hexdigest()[:16]
        with open(_list, "a") as out:
            out.write(f"{spec.name} {launch.arch_of(capability)} {spec.config} {digest}\n")
    return ptx


def _code(ptx):
    """Of PTX what is code: no names that count the functions that a process has compiled."""
    lines = (line for line in ptx.splitlines() if "NumbaEnv" not in line)
    return re.sub(r"_cudapy_smem_\d+", "smem", "\n".join(lines))


def _kept_ptx(spec, capability):
    versions = importlib.metadata.version("numba-cuda"), nvvm.version()
    sources = source_digest(spec.make.__module__), source_digest("nbflash.cuda.launch")
    return cached(
        lambda: launch.compile_ptx(spec, capability),
        *(spec.name, repr(spec.config), repr(capability), repr(versions), *sources),
    )


def report_of(ptx, arch):
    """:func:`nbflash.cuda.ptxas.report`: what ``ptxas -v`` says."""
    key = str(ptxas.ptxas_version()), arch, ptx
    return cached(lambda: ptxas.report(ptx, arch), *key)


def linker_log(ptx, arch, link):
    """``link(ptx, arch)``: what nvJitLink says."""
    return cached(lambda: link(ptx, arch), repr(nvjitlink.version()), arch, ptx)
