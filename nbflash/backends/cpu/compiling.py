"""How Numba compiles this backend: kernels, what becomes part of them, and functions by address.

All are kept on disk in the directory that Numba chooses for the kernels.
"""

import functools
import hashlib
import pickle
import warnings
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from numba import njit
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from nbflash.definitions import philox, score_chain
from nbflash.disk_cache import sealed
from nbflash.disk_cache.content import content_of

_files = [
    *sorted(Path(__file__).parent.glob("*.py")),
    *map(Path, (philox.__file__, score_chain.__file__)),
]
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _files)).hexdigest()[:16]
# Numba's disk cache watches the file of a kernel and keys on the types of its arguments: this type
# makes it follow every file that they are made of.
COUNTER = np.dtype([(f"taken_{SOURCES}", np.int64)])

#: ``njit`` for what only compiled code calls: a third less to compile.
inlined = functools.partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compiled(kernel):
    """``njit`` without the GIL, cached on disk where there is a directory to write to."""
    try:
        return njit(nogil=True, cache=True, no_cfunc_wrapper=True)(kernel)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return njit(nogil=True, no_cfunc_wrapper=True)(kernel)


class Compiled(NamedTuple):
    """Code in memory: where it is, as long as ``held`` is."""

    address: int
    held: object


def compiled_at_address(make, signature, *decided_by):
    """Compile the function that ``make()`` returns, or find it on disk.

    Parameters
    ----------
    make : callable
        Without arguments; returns a function by `inlined`.
    signature : tuple of Numba types
        Of its arguments.
    decided_by : plain values, tuples and functions
        What is compiled follows from them, and from the files of this backend.
    """
    target = cpu_target.target_context
    target.refresh()
    tools = numba.__version__, target.codegen().magic_tuple(), SOURCES
    content, folder = content_of(tools, str(signature), decided_by), directory()
    path = content and folder and folder / f"function-{content.digest}.nbc"
    found = path and sealed.read(path)
    if found:
        result = CompileResult._rebuild(target, *pickle.loads(found))
    else:
        # Has a function that is called been compiled before, then of globals as they were.
        fresh = path and not any(function.overloads for function in content.jitted)
        result = _compile(make(), signature)
        is_content = fresh and content_of(tools, str(signature), decided_by) == content
        if is_content and not result.library.has_dynamic_globals:
            _keep(path, result)
    address = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    return Compiled(address, result)


def _compile(function, signature):
    function.compile(signature)
    return function.overloads[signature]


@compiled
def _nothing():
    pass


def directory():
    """Where Numba keeps the kernels; None where nothing can be written."""
    return _nothing.stats.cache_path and Path(_nothing.stats.cache_path)


def _keep(path, result):
    try:
        sealed.write(path, dumps(result._reduce()))
    except OSError as error:
        warnings.warn(f"compiled functions are not cached: {error}", stacklevel=2)
