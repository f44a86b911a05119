"""The seam to Numba: every ``numba.cuda`` import and every inline PTX string passes here.

Instructions are data (PTX text, constraints, types), so that a move to another Numba
back end touches this file and ``nbflash.sim`` only.
"""

import contextlib
from types import SimpleNamespace

from numba import cuda
from numba.cuda import types
from numba.cuda.core import config

SIM = bool(config.ENABLE_CUDASIM)

if SIM:
    ir = intrinsic = cgutils = cuda_target = None
else:
    from llvmlite import ir
    from numba.cuda import cgutils
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.extending import intrinsic

__all__ = [
    "SIM",
    "asynchrony",
    "cgutils",
    "compiling_for",
    "cuda",
    "cuda_target",
    "inline_ptx",
    "inlined",
    "intrinsic_of_arity",
    "ir",
    "types",
]

# A device function that LLVM inlines.
inlined = cuda.jit(device=True, forceinline=True)


def asynchrony():
    """The simulator's asynchronous copies."""
    from nbflash.sim import asynchrony

    return asynchrony


@contextlib.contextmanager
def compiling_for(compute_capability):
    """Compile for a device that need not be there.

    Numba asks the current device when it types a call of a device function.
    """
    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device
    device = SimpleNamespace(compute_capability=compute_capability)
    dispatcher.get_current_device = lambda: device
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


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


def intrinsic_of_arity(arity, build):
    """Make a Numba intrinsic with ``arity`` arguments.

    Numba reads the number of arguments off the Python signature, so the function is
    made from source; ``build(*argtypes)`` returns ``(signature, codegen)``.
    """
    names = ", ".join(f"a{i}" for i in range(arity))
    namespace = {"build": build}
    exec(f"def f(typingctx, {names}):\n    return build({names})\n", namespace)
    return intrinsic(namespace["f"])
