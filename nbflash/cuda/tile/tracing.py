"""``@unrolled``: straight-line code over fragments from a plain Python function.

A fragment is a tuple of scalars that lives in registers. Numba cannot promise that it
unrolls a loop over one, and a run-time index would move it to local memory. An
``@unrolled`` function is therefore *traced*: on the GPU its Python loops run once, at
compile time, over symbolic scalars, and what they do is emitted as LLVM instructions.
In the simulator the same function simply runs, on NumPy scalars.

    add = unrolled(lambda a, b: tuple(x + y for x, y in zip(a, b)))

Arguments and results are scalars or tuples of scalars of one type; arrays and pointers
may be passed to :func:`load`, :func:`load4`, :func:`store` and :func:`store4`.
"""

import operator

import numpy as np

from nbflash.cuda.ptx._asm import SIM, cuda, types
from nbflash.cuda.ptx.traced import Memory, Scalar, emit, traced

FULL_WARP = 0xFFFFFFFF


def equal(a, b):
    """``a == b`` as a condition for :func:`select`."""
    return a.equals(b) if isinstance(a, Scalar) else a == b


def both(a, b):
    """Logical and of two conditions."""
    return a & b if isinstance(a, Scalar) else a and b


def either(a, b):
    """Logical or of two conditions."""
    return a | b if isinstance(a, Scalar) else a or b


def select(condition, a, b):
    """``a if condition else b`` without a branch."""
    if not isinstance(condition, Scalar):
        chosen, other = (a, b) if condition else (b, a)
        if (
            type(chosen) is not type(other)
            and isinstance(other, np.generic)
            and not isinstance(chosen, np.generic)
        ):
            return type(other)(chosen)  # a number takes the type of what it stands beside
        return chosen
    return condition.choose(a, b)


def _libm(name, x, *others):
    """``llvm.<name>`` of x and of others as x."""
    return x.call(f"llvm.{name}.f{x.type.bitwidth}", *map(x.like, others))


def fma(a, b, c):
    """``a * b + c``, rounded once on the GPU."""
    return _libm("fma", a, b, c) if isinstance(a, Scalar) else a * b + c


def maximum(a, b):
    """The larger of two numbers; a NaN loses."""
    if isinstance(a, Scalar):
        if isinstance(a.type, types.Integer):
            return select(a < b, b, a)
        return _libm("maxnum", a, b)
    return a if a >= b or b != b else b


def exp2(x):
    """``2 ** x``: ``ex2.approx.ftz.f32``, or libdevice for float64."""
    if not isinstance(x, Scalar):
        return np.exp2(x)
    if x.type.bitwidth == 32:
        return emit("ex2.approx.ftz.f32 $0, $1;", [x], x.type)
    return x.call("__nv_exp2")


def reciprocal(x):
    """``1 / x``; infinite at zero."""
    if not isinstance(x, Scalar):
        return type(x)(1) / x
    return x.constant(1.0) / x


def shuffle_xor(x, lane_mask):
    """The value of ``x`` in lane ``lane ^ lane_mask``: ``shfl.sync.bfly.b32``."""
    if not isinstance(x, Scalar):
        return cuda.shfl_xor_sync(FULL_WARP, x, lane_mask)

    def move(word):
        text = f"shfl.sync.bfly.b32 $0, $1, {lane_mask}, 31, -1;"
        return emit(text, [word], types.uint32, keep=True)

    if x.type.bitwidth == 32:
        return move(x.bits_as(types.uint32)).bits_as(x.type)
    bits = x.bits_as(types.uint64)
    low = move(bits.converted(types.uint32)).converted(types.uint64)
    high = move((bits >> 32).converted(types.uint32)).converted(types.uint64)
    return (low | high << 32).bits_as(x.type)


def opaque_value(x):
    """``x``, with its origin hidden from the compiler: it is neither hoisted nor merged."""
    if not isinstance(x, Scalar):
        return x
    kind = "f" if isinstance(x.type, types.Float) else "b"
    return emit(f"mov.{kind}{x.type.bitwidth} $0, $1;", [x], x.type, keep=True)


def load(memory, index):
    """``memory[index]``."""
    return memory.load(index) if isinstance(memory, Memory) else memory[index]


def check_quad(index, lanes=4):
    """A GPU traps on a vector access whose address is no multiple of its size."""
    if index % lanes:
        raise IndexError(f"element {index} is not aligned to a vector of {lanes}")


def load4(memory, index):
    """Four consecutive elements as one vector load (16 bytes for float32).

    ``index`` must be a multiple of four and the base 16-byte aligned.
    """
    return load2(memory, index, 4)


def load2(memory, index, lanes=2):
    """Two consecutive elements; see :func:`load4`."""
    if not isinstance(memory, Memory):
        check_quad(index, lanes)
        return memory.vector(index, lanes)
    return memory.load_vector(index, lanes)


def store(memory, index, value):
    """``memory[index] = value``."""
    if not isinstance(memory, Memory):
        memory[index] = value
    else:
        memory.store(index, value)


def store4(memory, index, values):
    """Four consecutive elements as one vector store, or as many; alignment as :func:`load4`."""
    lanes = len(values)
    if not isinstance(memory, Memory):
        check_quad(index, lanes)
        memory[index : index + lanes] = values
        return
    memory.store_vector(index, values)


def unrolled(fn):
    """Turn a Python function over scalars and fragments into straight-line device code."""
    return fn if SIM else traced(fn)


def total(values):
    """Sum left to right."""
    values = list(values)
    result = values[0]
    for value in values[1:]:
        result = operator.add(result, value)
    return result


@unrolled
def opaque(x):
    """:func:`opaque_value` as device code."""
    return opaque_value(x)
