"""The seam to Numba: every ``numba.cuda`` import and every inline PTX string passes here.

Instructions are data (PTX text, constraints, types), so that a move to another Numba
back end touches this file, `._deferred`, `.traced`, ``nbflash.cuda.kinds`` and
``nbflash.cuda.simulator`` only. Numba is imported when a kernel is compiled: modules of kernels get
deferred stand-ins for it (`._deferred`), except in the simulator.
"""

import contextlib
import functools
import threading
from types import SimpleNamespace

from nbflash.cuda.ptx._deferred import Callee, Module
from nbflash.cuda.ptx._shared import shared
from nbflash.cuda.simulated import simulator

SIM = simulator()

if SIM:
    from numba import cuda
    from numba.cuda import types
else:
    cuda, types = Module("numba.cuda"), Module("numba.cuda.types")
ir, cgutils = Module("llvmlite.ir"), Module("numba.cuda.cgutils")
descriptor = Module("numba.cuda.descriptor")

__all__ = [
    "SIM",
    "asynchrony",
    "cgutils",
    "compile_errors",
    "compiling_for",
    "cuda",
    "descriptor",
    "hopper",
    "inline_ptx",
    "inlined",
    "instruction",
    "intrinsic_of_arity",
    "ir",
    "letter_of",
    "types",
]


def inlined(fn):
    """A device function that LLVM inlines."""
    return _jit_inlined(fn) if SIM else shared(fn, functools.partial(Callee, _jit_inlined))


def _jit_inlined(fn):
    return cuda.jit(device=True, forceinline=True)(fn)


def compile_errors():
    """The errors that Numba raises for what it cannot compile."""
    from numba.core.errors import NumbaError

    if SIM:
        return (NumbaError,)
    from numba.cuda.core import errors

    return NumbaError, errors.NumbaError


@functools.cache
def asynchrony():
    """The simulator's asynchronous copies."""
    from nbflash.cuda.simulator import asynchrony

    return asynchrony


@functools.cache
def hopper():
    """The simulator's doubles of Hopper's instructions."""
    from nbflash.cuda.simulator import hopper

    return hopper


_compiling = threading.Lock()


@contextlib.contextmanager
def compiling_for(compute_capability):
    """Compile for a device that need not be there; one thread at a time.

    Numba asks the current device when it types a call of a device function.
    """
    from numba.cuda import dispatcher
    from numba.cuda.core.targetconfig import TargetConfig

    device = SimpleNamespace(compute_capability=compute_capability)
    asked = _replaced(dispatcher, "get_current_device", lambda: device)
    with _compiling, asked, _replaced(TargetConfig, "values", _values):
        yield


@contextlib.contextmanager
def _replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _values(flags):
    """``TargetConfig.values``: all options of a compilation by name.

    Numba asks each one for its value, whenever it compares the flags of two compilations: a
    quarter of the time that it takes to compile a kernel.
    """
    return _defaults(type(flags)) | flags._values


@functools.cache
def _defaults(kind):
    return {name: option.default for name, option in kind.options.items()}


def inline_ptx(builder, text, constraints, result, args, *, side_effect=False):
    """Emit one PTX instruction.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    text : str
        PTX with ``$0`` for the result and ``$1…`` for the operands.
    constraints : str
        LLVM constraint string, for instance ``"=f,f"``.
    result : llvmlite.ir.Type
    args : sequence of llvmlite.ir.Value
    side_effect : bool
        Keep the instruction where it stands even if its result is unused.
    """
    signature = ir.FunctionType(result, [a.type for a in args])
    asm = ir.InlineAsm(signature, text, constraints, side_effect=side_effect)
    return builder.call(asm, args)


_LETTERS = {"float32": "f", "float64": "d", "int64": "l", "uint64": "l"}


def letter_of(kind):
    """LLVM's letter for the registers of a number: of a Numba type, or a `Kind`."""
    return _LETTERS.get(kind.name, "r")


def instruction(name, text, operands, result=None):
    """One PTX instruction as device code, with its double for the simulator.

    Parameters
    ----------
    name : str
        Name of the function in :mod:`nbflash.cuda.simulator.hopper` that says what it does.
    text : str
        PTX with ``$0`` for the result, if there is one, and the operands after it.
    operands : tuple of Kind
        Arguments of other integer types are converted.
    result : Kind, optional
    """
    if SIM:
        return getattr(hopper(), name)
    letters = [letter_of(kind) for kind in operands]
    outputs = [] if result is None else ["=" + letter_of(result)]
    constraints = ",".join([*outputs, *letters, "~{memory}"])

    def build(*_):
        returned = types.void if result is None else result.numba

        def codegen(context, builder, signature, args):
            kind = ir.VoidType() if result is None else context.get_value_type(returned)
            value = inline_ptx(builder, text, constraints, kind, args, side_effect=True)
            return context.get_dummy_value() if result is None else value

        return returned(*(kind.numba for kind in operands)), codegen

    return intrinsic_of_arity(len(operands), build)


def intrinsic_of_arity(arity, build):
    """Make a Numba intrinsic with ``arity`` arguments.

    Numba reads the number of arguments off the Python signature, so the function is
    made from source; ``build(*argtypes)`` returns ``(signature, codegen)``.
    """
    names = ", ".join(f"a{i}" for i in range(arity))

    def make(build):
        from numba.cuda.extending import intrinsic

        namespace = {"build": build}
        exec(f"def f(typingctx, {names}):\n    return build({names})\n", namespace)
        return intrinsic(namespace["f"])

    return shared(build, functools.partial(Callee, make))
