"""What a cubin is known by: all that decides what it computes, and nothing else.

A kernel of ours is known by the definitions that it is made of (`nbflash.cuda.sources`), its
configuration, its signature and the architecture. A user's score function is known by its content
(`nbflash.disk_cache.content`). Cubins that come with nbflash need no more; in the disk cache the
compiler's versions count, too.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
import types
import weakref

from nbflash.cuda import bundled, ptxas, sources
from nbflash.cuda.availability import arch_of, cubin_dir
from nbflash.disk_cache import sealed
from nbflash.disk_cache.content import content_of

_COMPILER = "nbflash.cuda.launch", "compile_cubin"
_first_contents = weakref.WeakKeyDictionary()  # of functions jitted by Numba


def of(spec, compute_capability):
    """The key of a `KernelSpec`, 64 hexadecimal digits; None where a user's function has none.

    It is the same on every machine, and under every version of Python if all functions are ours.
    """
    parts = _Parts()
    config, make = parts.describe(spec.config), parts.describe(spec.make)
    content = fresh_content(*parts.users) if parts.users else ""
    of_sources = _digest_of_sources((_COMPILER, *sorted(parts.own)))
    if content is None or of_sources is None:
        return None
    decides = (
        of_sources,
        (spec.name, make, config, content),
        (spec.signature, spec.maps, spec.whole_program, spec.launch_bounds),
        arch_of(compute_capability),
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()


@functools.cache
def _digest_of_sources(roots):
    """Digest of the definitions that roots refer to; cached, since parsing takes 0.16 s.

    None where files were changed since they were imported: what is executed is not known.
    """
    name = name_of_sources(roots)
    path = cubin_dir() / f"sources-{name}.json"
    kept = bundled.index()["sources"].get(name), json.loads(sealed.read(path) or b"null")
    digests = (sources.Digest(*parts) for parts in kept if parts)
    found = next((digest for digest in digests if digest.is_current), None)
    if found is None:
        found = sources.digest_of(*roots)
        with contextlib.suppress(OSError):  # keeping the cubin reports the error
            sealed.write_private(path, json.dumps(found).encode())
    return found.digest if sources.are_as_imported(found.modules) else None


def roots_of(spec):
    """The definitions that a `KernelSpec` of ours is made of, by whatever they refer to."""
    parts = _Parts()
    parts.describe((spec.config, spec.make))
    return (_COMPILER, *sorted(parts.own))


def name_of_sources(roots):
    """The name under which the digest of the sources of definitions is cached."""
    decides = roots, sources.file_digest(sources.__name__)
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:32]


class _Parts:
    """Plain values that say what a configuration is, and the functions and classes in it."""

    def __init__(self):
        self.own, self.users = set(), []  # definitions of ours; functions of a user's

    def describe(self, x):
        if isinstance(x, tuple):
            return tuple(map(self.describe, x))
        if dataclasses.is_dataclass(x):
            # What does not count in comparisons does not count here: a measured speed.
            fields = [field.name for field in dataclasses.fields(x) if field.compare]
            self.own.add(_definition(type(x)))
            return type(x).__name__, [(name, self.describe(getattr(x, name))) for name in fields]
        if isinstance(x, types.FunctionType) and _is_own(x):
            self.own.add(_definition(x))
            return _definition(x)
        if isinstance(x, types.FunctionType) or hasattr(x, "py_func"):
            self.users.append(x)
            return "user's", len(self.users)
        return repr(x)


def _is_own(fn):
    """Whether a function is found at the top level of a module of ours."""
    ours = fn.__module__ and fn.__module__.partition(".")[0] in sources.OURS
    return ours and vars(sys.modules[fn.__module__]).get(fn.__name__) is fn


def _definition(x):
    return x.__module__, x.__name__


def with_toolchain(key, spec):
    """A key of `of` and the compiler's versions: 64 hexadecimal digits."""
    return hashlib.sha256(repr((key, *_toolchain(spec.whole_program))).encode()).hexdigest()


@functools.cache
def _toolchain(whole_program):
    from cuda.bindings import nvjitlink, nvvm

    linker = ptxas.ptxas_version() if whole_program else nvjitlink.version()
    return importlib.metadata.version("numba-cuda"), nvvm.version(), linker


def of_function(function, *decided_by):
    """The key of what Numba makes of a user's function; None where it has no content."""
    content = fresh_content(function)
    versions = importlib.metadata.version("numba"), importlib.metadata.version("numba-cuda")
    decides = content, versions, decided_by
    return content and hashlib.sha256(repr(decides).encode()).hexdigest()


def fresh_content(*functions):
    """The digest of functions; None where there is none, or compiled code may be of older globals.

    Numba compiles a function once, with the globals that it has then. So a function's content
    counts only if it is what nbflash saw first, before anything was compiled.
    """
    content = content_of(*functions)
    if content is None:
        return None
    for function in content.jitted:
        now = content_of(function)
        first = _first_contents.setdefault(function, None if function.overloads else now)
        if first != now or now is None:
            return None
    return content.digest
