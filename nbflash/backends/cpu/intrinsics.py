"""LLVM instructions that Numba does not expose: powers of two, an atomic counter, code by address.

Every function here has one LLVM body.
"""

import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_INT32, _CHAR = ir.IntType(32), ir.IntType(8)
_FLOATS = {types.float32: (ir.IntType(32), 127, 23), types.float64: (ir.IntType(64), 1023, 52)}


@intrinsic
def power_of_two(typingctx, t):
    """2**n for ``t = n + 1.5 * 2**mantissa_bits``, whose low bits hold the integer n."""
    integer, bias, mantissa_bits = _FLOATS[t]

    def codegen(context, builder, signature, args):
        n = builder.bitcast(args[0], integer)
        biased = builder.add(n, ir.Constant(integer, bias))
        bits = builder.shl(biased, ir.Constant(integer, mantissa_bits))
        return builder.bitcast(bits, context.get_value_type(t))

    return t(t), codegen


@intrinsic
def take(typingctx, counter):
    """Atomically increment the int64 at the start of an array and return its old value."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        one = context.get_constant(types.int64, 1)
        place = builder.bitcast(array.data, one.type.as_pointer())
        return builder.atomic_rmw("add", place, one, "monotonic")

    return types.int64(counter), codegen


#: What the counter of a work list holds, at the least, from when its call is given up.
GIVEN_UP = 1 << 62


@intrinsic
def given_up(typingctx, counter):
    """Whether the call of this counter was given up, by another thread."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        limit = context.get_constant(types.int64, GIVEN_UP)
        place = builder.bitcast(array.data, limit.type.as_pointer())
        taken = builder.load_atomic(place, "monotonic", 8)
        return builder.icmp_signed(">=", taken, limit)

    return types.boolean(counter), codegen


@intrinsic
def pointer(typingctx, address, like):
    """A pointer to elements of ``like``'s dtype, for ``numba.carray``."""
    target = types.CPointer(like.dtype)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(types.int64, like), codegen


def _fortran(context, builder, real, kinds, args):
    """Call the Fortran function at the address ``args[0]``, whose arguments are all pointers.

    ``kinds`` of the others: c a character, n an int32, s a scalar of the type ``real``, all put in
    memory first; p an address.
    """
    wanted = {"c": _CHAR, "n": _INT32, "s": context.get_value_type(real)}
    pointers = []
    for kind, value in zip(kinds, args[1:], strict=True):
        if kind == "p":
            pointers.append(builder.inttoptr(value, _CHAR.as_pointer()))
            continue
        if kind in "cn":
            value = builder.trunc(value, wanted[kind])
        pointers.append(cgutils.alloca_once_value(builder, value))
    function = ir.FunctionType(ir.VoidType(), [p.type for p in pointers])
    builder.call(builder.inttoptr(args[0], function.as_pointer()), pointers)
    return context.get_dummy_value()


@intrinsic
def call_gemm(typingctx, blas, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Fortran ``xGEMM`` at the address ``blas``: C = α op(A) op(B) + β C, column-major.

    Matrices are addresses, ``trans_*`` character codes; α and β have the type of the matrices.
    """
    real, i64 = alpha, types.int64

    def codegen(context, builder, signature, args):
        return _fortran(context, builder, real, "ccnnnspnpnspn", args)

    sig = types.void(i64, i64, i64, i64, i64, i64, real, i64, i64, i64, i64, real, i64, i64)
    return sig, codegen


@intrinsic
def call_gemv(typingctx, blas, trans, m, n, alpha, a, lda, x, incx, beta, y, incy):
    """Fortran ``xGEMV`` at the address ``blas``: y = α op(A) x + β y; arguments as `call_gemm`."""
    real, i64 = alpha, types.int64

    def codegen(context, builder, signature, args):
        return _fortran(context, builder, real, "cnnspnpnspn", args)

    sig = types.void(i64, i64, i64, i64, real, i64, i64, i64, i64, real, i64, i64)
    return sig, codegen


@intrinsic
def call(typingctx, address, arguments):
    """Call a function that Numba compiled for as many int64; the caller raises what it raises."""
    kinds = (types.int64,) * len(arguments)

    def codegen(context, builder, signature, args):
        convention = context.call_conv
        callee = convention.get_function_type(types.none, kinds).as_pointer()
        callee = builder.inttoptr(args[0], callee)
        values = cgutils.unpack_tuple(builder, args[1], len(kinds))
        status, _ = convention.call_function(builder, callee, types.none, kinds, values)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


def read(kind):
    """``at(address)``: the value of a type, of words of eight bytes one after the other.

    One word for a number; for a C-contiguous array its address and the elements along each axis.
    """

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            words = builder.inttoptr(args[0], context.get_value_type(types.int64).as_pointer())
            places = (cgutils.gep_inbounds(builder, words, i) for i in itertools.count())
            return _read(context, builder, kind, places)

        return kind(types.int64), codegen

    return at


def _read(context, builder, kind, places):
    if isinstance(kind, types.BaseTuple):
        parts = [_read(context, builder, part, places) for part in kind]
        return context.make_tuple(builder, kind, parts)
    if not isinstance(kind, types.Array):
        place = builder.bitcast(next(places), context.get_data_type(kind).as_pointer())
        return context.unpack_value(builder, kind, place)
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(builder.load(next(places)), array.data.type)
    shape = [builder.load(next(places)) for _ in range(kind.ndim)]
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [context.get_constant(types.intp, itemsize)]
    for n in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], n))
    populate_array(array, data, shape, strides, strides[-1], None)
    return array._getvalue()


@intrinsic
def larger(typingctx, a, b):
    """The larger of two floats, either one if one is NaN; LLVM vectorises a loop of it."""

    def codegen(context, builder, signature, args):
        flags = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", *args, flags=flags), *args, flags=flags)

    return a(a, a), codegen
