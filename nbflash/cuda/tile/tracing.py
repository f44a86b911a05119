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

import inspect
import operator

import numpy as np

from nbflash.cuda.ptx._asm import (
    SIM,
    cgutils,
    cuda,
    cuda_target,
    inline_ptx,
    intrinsic_of_arity,
    ir,
    types,
)

FULL_WARP = 0xFFFFFFFF


class Scalar:
    """One scalar while it is traced: a Numba type, an LLVM value and where to emit."""

    __slots__ = ("builder", "context", "type", "value")

    def __init__(self, context, builder, type_, value):
        self.context, self.builder, self.type, self.value = context, builder, type_, value

    def new(self, type_, value):
        return Scalar(self.context, self.builder, type_, value)

    def constant(self, number):
        return self.new(self.type, ir.Constant(self.value.type, number))

    def like(self, other):
        """``other`` as a Scalar of this type: numbers become constants, integers convert."""
        if not isinstance(other, Scalar):
            return self.constant(other)
        if other.type == self.type:
            return other
        if not (isinstance(self.type, types.Integer) and isinstance(other.type, types.Integer)):
            raise TypeError(f"unrolled: {self.type} and {other.type} in one operation")
        if self.type.bitwidth <= other.type.bitwidth:
            return self.new(self.type, self.builder.trunc(other.value, self.value.type))
        extend = self.builder.sext if other.type.signed else self.builder.zext
        return self.new(self.type, extend(other.value, self.value.type))

    def _arithmetic(self, other, of_float, of_int):
        emit = of_float if isinstance(self.type, types.Float) else of_int
        return self.new(self.type, getattr(self.builder, emit)(self.value, self.like(other).value))

    def __add__(self, other):
        return self._arithmetic(other, "fadd", "add")

    def __sub__(self, other):
        return self._arithmetic(other, "fsub", "sub")

    def __mul__(self, other):
        return self._arithmetic(other, "fmul", "mul")

    __radd__, __rmul__ = __add__, __mul__

    def __and__(self, other):
        return self.new(self.type, self.builder.and_(self.value, self.like(other).value))

    def __or__(self, other):
        return self.new(self.type, self.builder.or_(self.value, self.like(other).value))

    def __xor__(self, other):
        return self.new(self.type, self.builder.xor(self.value, self.like(other).value))

    def __lshift__(self, other):
        return self.new(self.type, self.builder.shl(self.value, self.like(other).value))

    def __rshift__(self, other):
        shift = self.builder.ashr if self.type.signed else self.builder.lshr
        return self.new(self.type, shift(self.value, self.like(other).value))

    def __floordiv__(self, divisor):
        """Of a number that is not negative."""
        return self.new(self.type, self.builder.udiv(self.value, self.like(divisor).value))

    def __mod__(self, divisor):
        """Of a number that is not negative."""
        return self.new(self.type, self.builder.urem(self.value, self.like(divisor).value))

    def _compare(self, symbol, other):
        b, right = self.builder, self.like(other).value
        if isinstance(self.type, types.Float):
            flag = b.fcmp_ordered(symbol, self.value, right)
        else:
            emit = b.icmp_signed if self.type.signed else b.icmp_unsigned
            flag = emit(symbol, self.value, right)
        return self.new(types.boolean, flag)

    def __lt__(self, other):
        return self._compare("<", other)

    def __ge__(self, other):
        return self._compare(">=", other)

    def __gt__(self, other):
        return self._compare(">", other)

    def equals(self, other):
        return self._compare("==", other)


class Memory:
    """An array or pointer while it is traced."""

    __slots__ = ("builder", "context", "pointer", "type", "whole")

    def __init__(self, context, builder, type_, value):
        self.context, self.builder, self.type = context, builder, type_.dtype
        self.whole = type_, value
        if isinstance(type_, types.Array):
            value = context.make_array(type_)(context, builder, value).data
        self.pointer = value

    def address(self, index, lanes):
        """Pointer to ``lanes`` elements at ``index`` (a Scalar)."""
        b, element = self.builder, self.context.get_data_type(self.type)
        base = b.bitcast(self.pointer, ir.PointerType(element))
        # Not inbounds: dynamic shared memory is declared with size zero.
        at = b.gep(base, [index.value])
        vector = element if lanes == 1 else ir.VectorType(element, lanes)
        return b.bitcast(at, ir.PointerType(vector))

    @property
    def itemsize(self):
        return self.type.bitwidth // 8


def equal(a, b):
    """``a == b`` as a condition for :func:`select`."""
    return a.equals(b) if isinstance(a, Scalar) else a == b


def both(a, b):
    """Logical and of two conditions."""
    if isinstance(a, Scalar):
        return a.new(types.boolean, a.builder.and_(a.value, b.value))
    return a and b


def either(a, b):
    """Logical or of two conditions."""
    if isinstance(a, Scalar):
        return a.new(types.boolean, a.builder.or_(a.value, b.value))
    return a or b


def select(condition, a, b):
    """``a if condition else b`` without a branch."""
    if not isinstance(condition, Scalar):
        chosen, other = (a, b) if condition else (b, a)
        if isinstance(other, np.generic) and not isinstance(chosen, np.generic):
            return type(other)(chosen)  # a number takes the type of what it stands beside
        return chosen
    model = a if isinstance(a, Scalar) else b
    chosen = condition.builder.select(condition.value, model.like(a).value, model.like(b).value)
    return model.new(model.type, chosen)


def _libm(x, name, *operands):
    """Call ``llvm.<name>`` on operands of x's type."""
    suffix = "f32" if x.type.bitwidth == 32 else "f64"
    operand_types = [o.value.type for o in operands]
    function = cgutils.get_or_insert_function(
        x.builder.module,
        ir.FunctionType(x.value.type, operand_types),
        f"llvm.{name}.{suffix}",
    )
    return x.new(x.type, x.builder.call(function, [o.value for o in operands]))


def fma(a, b, c):
    """``a * b + c``, rounded once on the GPU."""
    return _libm(a, "fma", a, a.like(b), a.like(c)) if isinstance(a, Scalar) else a * b + c


def maximum(a, b):
    """The larger of two numbers; a NaN loses."""
    if isinstance(a, Scalar):
        if isinstance(a.type, types.Integer):
            return select(a < b, b, a)
        return _libm(a, "maxnum", a, b)
    return a if a >= b or b != b else b


def exp2(x):
    """``2 ** x``: ``ex2.approx.ftz.f32``, or libdevice for float64."""
    if not isinstance(x, Scalar):
        return np.exp2(x)
    if x.type.bitwidth == 32:
        value = inline_ptx(x.builder, "ex2.approx.ftz.f32 $0, $1;", "=f,f", x.value.type, [x.value])
    else:
        signature = ir.FunctionType(x.value.type, [x.value.type])
        function = cgutils.get_or_insert_function(x.builder.module, signature, "__nv_exp2")
        value = x.builder.call(function, [x.value])
    return x.new(x.type, value)


def reciprocal(x):
    """``1 / x``; infinite at zero."""
    if not isinstance(x, Scalar):
        return type(x)(1) / x
    return x.new(x.type, x.builder.fdiv(x.constant(1.0).value, x.value))


def shuffle_xor(x, lane_mask):
    """The value of ``x`` in lane ``lane ^ lane_mask``: ``shfl.sync.bfly.b32``."""
    if not isinstance(x, Scalar):
        return cuda.shfl_xor_sync(FULL_WARP, x, lane_mask)
    b, i32 = x.builder, ir.IntType(32)

    def move(word):
        text = f"shfl.sync.bfly.b32 $0, $1, {lane_mask}, 31, -1;"
        return inline_ptx(b, text, "=r,r", i32, [word], side_effect=True)

    if x.type.bitwidth == 32:
        return x.new(x.type, b.bitcast(move(b.bitcast(x.value, i32)), x.value.type))
    i64 = ir.IntType(64)
    bits = b.bitcast(x.value, i64)
    low = b.zext(move(b.trunc(bits, i32)), i64)
    high = b.zext(move(b.trunc(b.lshr(bits, ir.Constant(i64, 32)), i32)), i64)
    joined = b.or_(low, b.shl(high, ir.Constant(i64, 32)))
    return x.new(x.type, b.bitcast(joined, x.value.type))


def opaque_value(x):
    """``x``, with its origin hidden from the compiler: it is neither hoisted nor merged."""
    if not isinstance(x, Scalar):
        return x
    wide = x.type.bitwidth == 64
    if isinstance(x.type, types.Float):
        kind, letter = ("f64", "d") if wide else ("f32", "f")
    else:
        kind, letter = ("b64", "l") if wide else ("b32", "r")
    constraints, type_ = f"={letter},{letter}", x.value.type
    text = f"mov.{kind} $0, $1;"
    return x.new(
        x.type, inline_ptx(x.builder, text, constraints, type_, [x.value], side_effect=True)
    )


def load(memory, index):
    """``memory[index]``."""
    if not isinstance(memory, Memory):
        return memory[index]
    value = memory.builder.load(memory.address(index, 1))
    return Scalar(memory.context, memory.builder, memory.type, value)


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
        return tuple([memory[index + i] for i in range(lanes)])
    b = memory.builder
    vector = b.load(memory.address(index, lanes), align=min(16, lanes * memory.itemsize))
    parts = [b.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(lanes)]
    return tuple(Scalar(memory.context, b, memory.type, part) for part in parts)


def store(memory, index, value):
    """``memory[index] = value``."""
    if not isinstance(memory, Memory):
        memory[index] = value
    else:
        memory.builder.store(value.value, memory.address(index, 1))


def store4(memory, index, values):
    """Four consecutive elements as one vector store, or as many; alignment as :func:`load4`."""
    lanes = len(values)
    if not isinstance(memory, Memory):
        check_quad(index, lanes)
        memory[index : index + lanes] = values
        return
    b, at = memory.builder, memory.address(index, lanes)
    vector = ir.Constant(at.type.pointee, ir.Undefined)
    for i, value in enumerate(values):
        vector = b.insert_element(vector, value.value, ir.Constant(ir.IntType(32), i))
    b.store(vector, at, align=min(16, lanes * memory.itemsize))


def _wrap(context, builder, type_, value):
    if isinstance(type_, (types.Array, types.CPointer)):
        return Memory(context, builder, type_, value)
    if isinstance(type_, types.BaseTuple):
        parts = cgutils.unpack_tuple(builder, value, len(type_))
        pairs = zip(type_.types, parts, strict=True)
        return tuple(_wrap(context, builder, t, p) for t, p in pairs)
    return Scalar(context, builder, type_, value)


def _type_of(result):
    if result is None:
        return types.void
    if isinstance(result, Scalar):
        return result.type
    if isinstance(result[0], tuple):
        return types.Tuple(tuple(map(_type_of, result)))
    return types.UniTuple(result[0].type, len(result))


def _packed(context, builder, result):
    if isinstance(result, Scalar):
        return result.value
    if isinstance(result[0], tuple):
        parts = [_packed(context, builder, part) for part in result]
        return context.make_tuple(builder, _type_of(result), parts)
    return cgutils.pack_array(builder, [r.value for r in result])


def _result_type(fn, argtypes):
    """Trace ``fn`` into a function that is thrown away, to learn its result type."""
    context = cuda_target.target_context
    signature = ir.FunctionType(ir.VoidType(), [context.get_value_type(t) for t in argtypes])
    function = ir.Function(ir.Module(), signature, "trace")
    builder = ir.IRBuilder(function.append_basic_block())
    pairs = zip(argtypes, function.args, strict=True)
    return _type_of(fn(*(_wrap(context, builder, t, a) for t, a in pairs)))


def unrolled(fn):
    """Turn a Python function over scalars and fragments into straight-line device code."""
    if SIM:
        return fn

    def build(*argtypes):
        argtypes = [types.unliteral(t) for t in argtypes]

        def codegen(context, builder, signature, args):
            pairs = zip(signature.args, args, strict=True)
            result = fn(*(_wrap(context, builder, t, a) for t, a in pairs))
            return (
                context.get_dummy_value() if result is None else _packed(context, builder, result)
            )

        return _result_type(fn, argtypes)(*argtypes), codegen

    return intrinsic_of_arity(len(inspect.signature(fn).parameters), build)


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
