"""What the compiler alone sees of ``@unrolled`` code, run on the CPU: the simulator's numbers.

A function is traced as for a kernel, and its LLVM IR compiled for this machine. Functions that emit
PTX are not run: what they emit is looked at.
"""

import ctypes

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from numba.cuda.types import float32, float64, int8, int32, int64, uint8, uint32

from nbflash.cuda.ptx._asm import descriptor
from nbflash.cuda.ptx.traced import Scalar
from nbflash.cuda.tile import tracing
from nbflash.cuda.tile.convert import as_stored, widened
from nbflash.cuda.tile.tracing import equal, maximum, select, shuffle_xor
from nbflash.cuda.tile.wgmma import dropout

C_TYPES = {
    float32: ctypes.c_float,
    float64: ctypes.c_double,
    int8: ctypes.c_int8,
    int32: ctypes.c_int32,
    int64: ctypes.c_int64,
    uint8: ctypes.c_uint8,
    uint32: ctypes.c_uint32,
}
NUMBERS = [np.nan, -np.inf, -1.5, -0.0, 0.0, 1e-40, 1.0, 2.0, np.inf]


def traced(fn, *kinds):
    """The LLVM IR of ``fn`` of Scalars of these types, and the type of its result."""
    context, module = descriptor.cuda_target.target_context, ir.Module()

    def build(result):
        arguments = [context.get_value_type(kind) for kind in kinds]
        name = "result" if isinstance(result, ir.VoidType) else "traced"
        function = ir.Function(module, ir.FunctionType(result, arguments), name)
        builder = ir.IRBuilder(function.append_basic_block())
        pairs = zip(kinds, function.args, strict=True)
        return fn(*(Scalar(context, builder, *pair) for pair in pairs)), builder

    found, builder = build(ir.VoidType())  # to learn its type
    builder.ret_void()
    made, builder = build(found.value.type)
    builder.ret(made.value)
    return str(module), found.type


def on_cpu(fn, *kinds):
    """``fn`` as the compiler has it, of Python's numbers."""
    text, result = traced(fn, *kinds)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    types = [C_TYPES[kind] for kind in (result, *kinds)]
    function = ctypes.CFUNCTYPE(*types)(engine.get_function_address("traced"))
    function.engine = engine  # alive as long as its code
    return function


def pairs():
    return [(np.float32(a), np.float32(b)) for a in NUMBERS for b in NUMBERS]


COMPARED = {
    "less": lambda a, b: select(a < b, 1.0, a * 0.0 + 2.0),
    "more": lambda a, b: select(a > b, 1.0, a * 0.0 + 2.0),
    "at-least": lambda a, b: select(a >= b, 1.0, a * 0.0 + 2.0),
    "equal": lambda a, b: select(equal(a, b), 1.0, a * 0.0 + 2.0),
}


@pytest.mark.parametrize("name", COMPARED)
def test_nothing_compares_with_nan(name):
    """As in the simulator."""
    compare = COMPARED[name]
    compiled = on_cpu(compare, float32, float32)
    for a, b in pairs():
        if np.isnan(a) or np.isnan(b):
            assert compiled(a, b) != 1
        elif not np.isinf(a):
            assert compiled(a, b) == compare(a, b)


def test_a_nan_loses():
    compiled = on_cpu(maximum, float32, float32)
    for a, b in pairs():
        np.testing.assert_array_equal(np.float32(compiled(a, b)), maximum(a, b))


def test_bfloat16_is_rounded_to_even():
    """Whole numbers, ties below and above them, and what is next to ties."""
    high = np.arange(0x3F80, 0x3F90, dtype=np.uint32)[:, None] << 16
    bits = (high + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    values = [*bits.view(np.float32), *map(np.float32, NUMBERS)]
    compiled = on_cpu(lambda x: as_stored(x, "bfloat16").converted(uint32), float32)
    assert [compiled(x) for x in values] == [as_stored(x, "bfloat16") for x in values]


@pytest.mark.parametrize("real", [float32, float64], ids=str)
def test_every_number_of_8_bits(real):
    codes = np.arange(256, dtype=np.uint8)
    compiled = on_cpu(lambda x: widened(x, "float8_e4m3fn", real), uint8)
    found = np.array([compiled(x) for x in codes])
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    assert np.isnan(found[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize("real", [float32, float64], ids=str)
def test_int8_has_a_sign(real):
    compiled = on_cpu(lambda x: widened(x, "int8", real), int8)
    assert [compiled(x) for x in range(-128, 128)] == [*range(-128, 128)]


@pytest.mark.parametrize("kind", [int32, uint32], ids=str)
@pytest.mark.parametrize("name", ["less", "more", "at-least", "equal"])
def test_whole_numbers_compare_by_the_sign_of_their_type(kind, name):
    """The upper half of a uint32 is larger than the lower one."""
    numpy_type, bits = getattr(np, str(kind)), [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    numbers = [int(np.uint32(x).view(numpy_type)) for x in bits]
    compare = {
        "less": lambda a, b: a < b,
        "more": lambda a, b: a > b,
        "at-least": lambda a, b: a >= b,
        "equal": equal,
    }[name]
    compiled = on_cpu(lambda a, b: select(compare(a, b), a * 0 + 1, 0), kind, kind)
    for a in numbers:
        for b in numbers:
            assert compiled(a, b) == compare(a, b)


def test_every_nan_stays_one_as_bfloat16():
    """Rounding would carry out of the last ones, and cut off the first ones."""
    compiled = on_cpu(lambda x: as_stored(x.bits_as(float32), "bfloat16").converted(uint32), uint32)
    for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000):
        assert np.isnan(np.uint16(compiled(bits)).view(ml_dtypes.bfloat16))


def test_powers_of_float64_are_those_of_2():
    """The device library has e^x and 10^x, too."""
    text, _ = traced(tracing.exp2, float64)
    assert '@"__nv_exp2"(double' in text


def test_a_shift_of_a_signed_number_keeps_its_sign():
    for kind, expected in ((int32, -3), (int64, -3), (uint32, (2**32 - 5) >> 1)):
        assert on_cpu(lambda x: x >> 1, kind)(-5) == expected


def test_a_shuffle_of_64_bits_keeps_the_order_of_its_words(monkeypatch):
    """The words of another lane here are one's own."""
    monkeypatch.setattr(tracing, "emit", lambda text, operands, *_, **__: operands[0])
    compiled = on_cpu(lambda x: shuffle_xor(x, 1), float64)
    assert [compiled(x) for x in (1.1, -2e300)] == [1.1, -2e300]


def test_dropout_keeps_patterns_of_nan_in_both_directions(monkeypatch):
    """They are above every threshold: comparisons are unordered."""
    texts = []

    def note(text, operands, *_, **__):
        texts.append(text)
        return operands[0]

    monkeypatch.setattr(dropout, "emit", note)
    traced(dropout.kept_halves, uint32, uint32)
    traced(lambda word, x: dropout.selected(word, word, (x, x), (x, x)), uint32, float32)
    assert ["set.geu.u32.f16x2" in text for text in texts[:2]] == [True, True]
    assert ["setp.geu.f16x2" in text for text in texts[2:]] == [True, True]
