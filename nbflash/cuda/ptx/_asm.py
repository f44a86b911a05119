"""The seam to Numba: every ``numba.cuda`` import and every inline PTX string passes here.

Instructions are data (PTX text, constraints, types), so that a move to another Numba
back end touches this file and ``nbflash.cuda.simulator`` only.
"""

import contextlib
import functools
from types import SimpleNamespace

from numba import cuda
from numba.core.errors import NumbaError
from numba.cuda import types
from numba.cuda.core import config

from nbflash.cuda.ptx._shared import shared

SIM = bool(config.ENABLE_CUDASIM)

if SIM:
    ir = intrinsic = cgutils = cuda_target = None
    COMPILE_ERRORS = (NumbaError,)
else:
    from llvmlite import ir
    from numba.cuda import cgutils
    from numba.cuda.core import errors
    from numba.cuda.core.targetconfig import TargetConfig

    COMPILE_ERRORS = (NumbaError, errors.NumbaError)
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.extending import intrinsic

__all__ = [
    "COMPILE_ERRORS",
    "SIM",
    "asynchrony",
    "cgutils",
    "compiling_for",
    "cuda",
    "cuda_target",
    "hopper",
    "inline_ptx",
    "inlined",
    "instruction",
    "intrinsic_of_arity",
    "ir",
    "letter_of",
    "types",
]

_jit_inlined = cuda.jit(device=True, forceinline=True)


def inlined(fn):
    """A device function that LLVM inlines."""
    return _jit_inlined(fn) if SIM else shared(fn, _jit_inlined)


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


@contextlib.contextmanager
def compiling_for(compute_capability):
    """Compile for a device that need not be there.

    Numba asks the current device when it types a call of a device function.
    """
    from numba.cuda import dispatcher

    device = SimpleNamespace(compute_capability=compute_capability)
    asked = _replaced(dispatcher, "get_current_device", lambda: device)
    with asked, _replaced(TargetConfig, "values", _values):
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


_LETTERS = {types.float32: "f", types.float64: "d", types.int64: "l", types.uint64: "l"}


def letter_of(kind):
    """LLVM's letter for the registers of a Numba type."""
    return _LETTERS.get(kind, "r")


def instruction(name, text, operands, result=None):
    """One PTX instruction as device code, with its double for the simulator.

    Parameters
    ----------
    name : str
        Name of the function in :mod:`nbflash.cuda.simulator.hopper` that says what it does.
    text : str
        PTX with ``$0`` for the result, if there is one, and the operands after it.
    operands : tuple of Numba types
        Arguments of other integer types are converted.
    result : Numba type, optional
    """
    if SIM:
        return getattr(hopper(), name)
    letters = [letter_of(kind) for kind in operands]
    outputs = [] if result is None else ["=" + letter_of(result)]
    constraints = ",".join([*outputs, *letters, "~{memory}"])

    def build(*_):
        def codegen(context, builder, signature, args):
            kind = ir.VoidType() if result is None else context.get_value_type(result)
            value = inline_ptx(builder, text, constraints, kind, args, side_effect=True)
            return context.get_dummy_value() if result is None else value

        return (result or types.void)(*operands), codegen

    return intrinsic_of_arity(len(operands), build)


def intrinsic_of_arity(arity, build):
    """Make a Numba intrinsic with ``arity`` arguments.

    Numba reads the number of arguments off the Python signature, so the function is
    made from source; ``build(*argtypes)`` returns ``(signature, codegen)``.
    """
    names = ", ".join(f"a{i}" for i in range(arity))

    def make(build):
        namespace = {"build": build}
        exec(f"def f(typingctx, {names}):\n    return build({names})\n", namespace)
        return intrinsic(namespace["f"])

    return shared(build, make)
