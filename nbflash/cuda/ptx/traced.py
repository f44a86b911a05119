"""Scalars and memory while a function is traced: what they do is emitted as LLVM instructions.

Every call of LLVM's builder for device code is here. Functions that are traced are written in
:mod:`nbflash.cuda.tile.tracing`, with a body for the simulator; instructions that LLVM has no name
for are emitted as PTX, by `emit`.
"""

import inspect

from nbflash.cuda.ptx._asm import (
    cgutils,
    descriptor,
    inline_ptx,
    intrinsic_of_arity,
    ir,
    letter_of,
    types,
)

_SHARED = 3  # LLVM's number of the address space


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

    def converted(self, type_):
        """The same number in another type: rounded to nearest even, or the low bits of an integer.

        A float16 is held as its 16 bits.
        """
        b, kind, value = self.builder, self.context.get_value_type(type_), self.value
        if self.type == types.boolean:
            return self.new(type_, b.zext(value, kind))
        if isinstance(type_, types.Integer):
            return self.new(type_, ir.Constant(kind, 0)).like(self)
        if isinstance(self.type, types.Integer):
            return self.new(type_, b.sitofp(value, kind))
        if self.type == types.float16:
            return self.new(type_, b.fpext(b.bitcast(value, ir.HalfType()), kind))
        if type_ == types.float16:
            return self.new(type_, b.bitcast(b.fptrunc(value, ir.HalfType()), kind))
        return self.new(type_, b.fpext(value, kind))

    def low_word(self):
        """The low 32 bits, for `emit`: no instruction of LLVM, which would sum in 32 bits."""
        return self.new(types.uint32, self.value)

    def bits_as(self, type_):
        """The same bits in another type; no instruction."""
        return self.new(type_, self.builder.bitcast(self.value, self.context.get_value_type(type_)))

    def is_nan(self):
        return self.new(types.boolean, self.builder.fcmp_unordered("uno", self.value, self.value))

    def call(self, symbol, *others):
        """A function of LLVM or libdevice of this number and others of its type."""
        kind = self.value.type
        signature = ir.FunctionType(kind, [kind] * (1 + len(others)))
        function = cgutils.get_or_insert_function(self.builder.module, signature, symbol)
        values = [self.value, *(x.value for x in others)]
        return self.new(self.type, self.builder.call(function, values))

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

    def __truediv__(self, other):
        return self.new(self.type, self.builder.fdiv(self.value, self.like(other).value))

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

    def differs(self, other):
        return self._compare("!=", other)

    def choose(self, a, b):
        """``a`` where this condition holds, else ``b``; one of them may be a number."""
        model = a if isinstance(a, Scalar) else b
        values = self.value, model.like(a).value, model.like(b).value
        return model.new(model.type, self.builder.select(*values))


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

    def new(self, type_, value):
        return Scalar(self.context, self.builder, type_, value)

    def pointer_to(self, index):
        """The address of the element at ``index``, for `emit`."""
        return self.new(None, self.address(index, 1))

    def shared_word_of(self, index):
        """The address of an element in shared memory as a uint32."""
        b, shared = self.builder, ir.PointerType(ir.FloatType(), _SHARED)
        pointer = b.addrspacecast(self.address(index, 1), shared)
        return self.new(types.uint32, b.ptrtoint(pointer, ir.IntType(32)))

    def word_of(self, index=None):
        """The address of an element, or of the first, as a uint64."""
        pointer = self.pointer if index is None else self.address(index, 1)
        return self.new(types.uint64, self.builder.ptrtoint(pointer, ir.IntType(64)))

    def load(self, index):
        """The element at ``index``."""
        return self.new(self.type, self.builder.load(self.address(index, 1)))

    def load_vector(self, index, lanes):
        """So many elements at once."""
        b = self.builder
        vector = b.load(self.address(index, lanes), align=min(16, lanes * self.itemsize))
        parts = (b.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(lanes))
        return tuple([self.new(self.type, part) for part in parts])

    def store(self, index, value):
        """Put a Scalar at ``index``."""
        self.builder.store(value.value, self.address(index, 1))

    def store_vector(self, index, values):
        """Put so many Scalars there at once."""
        b, lanes = self.builder, len(values)
        at = self.address(index, lanes)
        vector = ir.Constant(at.type.pointee, ir.Undefined)
        for i, value in enumerate(values):
            vector = b.insert_element(vector, value.value, ir.Constant(ir.IntType(32), i))
        b.store(vector, at, align=min(16, lanes * self.itemsize))

    @property
    def itemsize(self):
        return self.type.bitwidth // 8


def emit(text, operands, result=None, *, beside=None, keep=False, memory=False, tied=()):
    """Emit one PTX instruction while a function is traced.

    Parameters
    ----------
    text : str
        PTX with ``$0…`` for the results and, after them, for ``tied`` and ``operands``.
    operands : sequence of Scalar
        Of `Memory.pointer_to`, too.
    result : Numba type, or tuple of Numba types, optional
    beside : Scalar or Memory, optional
        Where to emit an instruction without operands.
    keep : bool
        The instruction stays where it is, even if its result is unused.
    memory : bool
        It reads or writes memory that the compiler does not see; implies ``keep``.
    tied : sequence of Scalar
        What the results take the registers of, one each.

    Returns
    -------
    Scalar, tuple of Scalar, or None
    """
    operands, tied = list(operands), list(tied)
    first = beside or (operands + tied)[0]
    kinds = result if isinstance(result, tuple) else () if result is None else (result,)
    llvm = [first.context.get_value_type(kind) for kind in kinds]
    if result is None:
        whole = ir.VoidType()
    else:
        whole = ir.LiteralStructType(llvm) if isinstance(result, tuple) else llvm[0]
    letters = ["=" + letter_of(kind) for kind in kinds] + [str(i) for i in range(len(tied))]
    letters += ["l" if x.type is None else letter_of(x.type) for x in operands]
    constraints = ",".join([*letters, "~{memory}"] if memory else letters)
    values = [x.value for x in (*tied, *operands)]
    made = inline_ptx(first.builder, text, constraints, whole, values, side_effect=keep or memory)
    if isinstance(result, tuple):
        parts = (first.builder.extract_value(made, i) for i in range(len(kinds)))
        return tuple(first.new(kind, part) for kind, part in zip(kinds, parts, strict=True))
    return None if result is None else first.new(result, made)


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
    context = descriptor.cuda_target.target_context
    signature = ir.FunctionType(ir.VoidType(), [context.get_value_type(t) for t in argtypes])
    function = ir.Function(ir.Module(), signature, "trace")
    builder = ir.IRBuilder(function.append_basic_block())
    pairs = zip(argtypes, function.args, strict=True)
    return _type_of(fn(*(_wrap(context, builder, t, a) for t, a in pairs)))


def traced(fn):
    """An intrinsic that emits what a function does when it is called with `Scalar` and `Memory`."""

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


def call_device(function, model, arguments):
    """Call device code that Numba compiles; the result in the type of a Scalar ``model``."""
    pairs = [x.whole if isinstance(x, Memory) else (x.type, x.value) for x in arguments]
    kinds, values = zip(*pairs, strict=True)
    typing = descriptor.cuda_target.typing_context
    callee = typing.resolve_value_type(function)
    signature = typing.resolve_function_type(callee, kinds, {})
    context = model.context
    if context.fndesc is None:  # only typed so far: there is nothing to call from
        return model
    value = context.get_function(callee, signature)(model.builder, values)
    value = context.cast(model.builder, value, signature.return_type, model.type)
    return model.new(model.type, value)
