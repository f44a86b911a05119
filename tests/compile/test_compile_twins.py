"""Functions with a body for the simulator and one for the compiler: the second one is what it says.

Each is found in the source. What LLVM has a name for is run on the CPU beside the simulator's body;
of what is emitted as PTX the text is looked at, and which operands are constants.
"""

import ast
import importlib
import types as python
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir
from numba.cuda.types import CPointer, boolean, float32, float64, int32, int64, uint32
from test_compile_traced import on_cpu, traced

import nbflash
from nbflash.cuda.ptx import _asm
from nbflash.cuda.ptx.traced import Memory
from nbflash.cuda.tile import float_bits, score_math, tracing, warp_math

ROOT = Path(nbflash.__file__).parent / "cuda"
INSTRUCTIONS = Path(__file__).parent / "ptx_instructions.txt"
INTEGERS = [0, 1, 5, 2**31 - 1, -1, -7, -(2**31)]
FLOATS = [0.0, -1.5, 2.0, 1e-3, 65504.0, np.inf]
WORDS = [0x3F80C000, 0xC1203F81, 0x00003C00, 0xBC000001]
OTHERS = {float32: FLOATS, float64: FLOATS, int32: INTEGERS, int64: INTEGERS, uint32: WORDS}
NUMPY = {kind: getattr(np, str(kind)) for kind in OTHERS}


def halves(dtype, i):
    return lambda word: warp_math.unpack_half(dtype, word)[i]


# By name: a function, and the types of its arguments; both bodies give the same numbers.
RUN = {
    "tile.tracing.maximum": [(tracing.maximum, int32, int32), (tracing.maximum, float32, float32)],
    "tile.tracing.reciprocal": [(tracing.reciprocal, float64)],
    "tile.tracing.select": [
        (lambda a, b: tracing.select(a < b, a, b), int32, int32),
        (lambda a: tracing.select(a < 1.0, 2.0 * a, a), float32),
    ],
    "tile.tracing.equal": [
        (lambda a, b: tracing.select(tracing.equal(a, b), a, b + 1), int32, int32)
    ],
    "tile.tracing.both": [
        (lambda a, b: tracing.select(tracing.both(a < b, a > -5), a, b), int32, int32)
    ],
    "tile.tracing.either": [
        (lambda a, b: tracing.select(tracing.either(a < b, a > 4), a, b), int32, int32)
    ],
    "tile.warp_math.unpack_half": [
        (halves(dtype, i), uint32) for dtype in ("bfloat16", "float16") for i in range(2)
    ],
    "tile.float_bits.bits_float": [(float_bits.bits_float, uint32)],
    "tile.float_bits.float_bits": [(float_bits.float_bits, float32)],
    "tile.float_bits.unsigned": [(float_bits.unsigned, int32)],
    "tile.float_bits.signed": [(float_bits.signed, uint32)],
    "tile.score_math.to_int32": [(score_math.to_int32, int32)],
    "tile.score_math.to_float": [
        (lambda x, model: score_math.to_float(x, model) + model, int32, float32)
    ],
}


def memory_of(x):
    return Memory(x.context, x.builder, x.type, x.value)


def at(name):
    """A function of memory, whose first argument is a pointer."""
    return lambda module, pointer, *given: getattr(module, name)(memory_of(pointer), *given)


def copied(module, to, source, i, inside):
    module.cp_async16(to, memory_of(source), i, inside)


WORDS_AT = CPointer(int32), int64, int32
VOTE = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
# By name: a call, the types of its arguments, the PTX, and which of its operands are constants.
EMITTED = {
    "tile.atomic_int.fetch_add": (
        *(at("fetch_add"), WORDS_AT, "atom.relaxed.gpu.add.s32 $0, [$1], $2;", []),
    ),
    "tile.atomic_int.set_bits": (
        *(at("set_bits"), WORDS_AT, "red.relaxed.cta.or.b32 [$0], $1;", []),
    ),
    "ptx.cp_async.cp_async16": (
        *(copied, (uint32, CPointer(int32), int64, boolean)),
        *("cp.async.cg.shared.global [$0], [$1], 16, $2;", []),
    ),
    "tile.tracing.exp2": (
        *(lambda module, x: module.exp2(x), (float32,), "ex2.approx.ftz.f32 $0, $1;", []),
    ),
    "tile.warp_math.log2": (
        *(lambda module, x: module.log2(x), (float32,), "lg2.approx.ftz.f32 $0, $1;", []),
    ),
    "tile.warp_math.approximate_reciprocal": (
        *(lambda module, x: module.approximate_reciprocal(x), (float32,)),
        *("rcp.approx.ftz.f32 $0, $1;", []),
    ),
    "tile.warp_math.ballot": (lambda module, x: module.ballot(x > 0), (int32,), VOTE, []),
    "tile.warp_math.subtract_float16": (
        *(lambda module, a, b: module.subtract_float16(a, b), (uint32, uint32)),
        *("sub.rn.f16x2 $0, $1, $2;", []),
    ),
    "tile.warp_math.permute": (
        *(lambda module, a, b: module.permute(a, b, 0x5410), (uint32, uint32)),
        *("prmt.b32 $0, $1, $2, $3;", [2]),
    ),
    "tile.score_math.approximate_tanh": (
        *(lambda module, x: module.approximate_tanh(x), (float32,), "tanh.approx.f32 $0, $1;", []),
    ),
}
TRACED, TEXTS = "test_compile_traced.py", "the PTX of kernels is looked at, and runs on devices"
ELSEWHERE = {
    **dict.fromkeys(("_to_accumulator", "_from_e4m3", "widened", "as_stored"), TRACED),
    **dict.fromkeys(("shuffle_xor", "kept_halves", "selected", "across_lanes"), TRACED),
    **dict.fromkeys(("product", "plus", "plus_product", "uniform"), "test_compile_dropout.py"),
    **dict.fromkeys(("load", "load2", "store", "store4", "opaque_value", "unrolled"), TEXTS),
    **dict.fromkeys(("shared_address", "global_address", "cp_async4", "wait"), TEXTS),
    **dict.fromkeys(("_widened", "pack_half", "any_lane", "atomic_add", "atomic_add4"), TEXTS),
    **dict.fromkeys(("cp_async_wait", "ldmatrix", "mma", "stmatrix4"), TEXTS),
    **dict.fromkeys(("wgmma_wait", "wgmma", "settle"), TEXTS),
    **dict.fromkeys(("inlined", "instruction", "compile_errors"), "how the others are made"),
    **dict.fromkeys(("absolute", "tanh", "fma", "call"), "of LLVM, libdevice or the user, by name"),
}


def own(node):
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from own(child)


def has_two_bodies(node):
    asked = [ast.unparse(x.args[1]) for x in own(node) if isinstance(x, ast.Call) and x.args[1:]]
    switches = (ast.unparse(x.test) for x in own(node) if isinstance(x, ast.If | ast.IfExp))
    return bool({"Scalar", "Memory"} & {*asked}) or "SIM" in switches


def test_every_function_with_two_bodies_is_declared():
    """In `RUN` or `EMITTED`, or by its name in `ELSEWHERE`."""
    found = set()
    for path in [*(ROOT / "tile").rglob("*.py"), *(ROOT / "ptx").rglob("*.py")]:
        if path.stem == "traced":
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        functions = (x for x in ast.walk(ast.parse(path.read_text())) if has_two_bodies_of(x))
        found |= {f"{module}.{node.name}" for node in functions}
    names = {name for name in found if name.rpartition(".")[2] not in ELSEWHERE}
    assert names == {*RUN, *EMITTED}
    assert {*ELSEWHERE} <= {name.rpartition(".")[2] for name in found}


def has_two_bodies_of(node):
    return isinstance(node, ast.FunctionDef) and has_two_bodies(node)


@pytest.mark.parametrize("name", RUN)
def test_both_bodies_give_the_same(name):
    for fn, *kinds in RUN[name]:
        compiled = on_cpu(fn, *kinds)
        arguments = [[NUMPY[kind](x) for x in OTHERS[kind]] for kind in kinds]
        for each in np.ndindex(*map(len, arguments)):
            given = [values[i] for values, i in zip(arguments, each, strict=True)]
            with np.errstate(all="ignore"):
                expected = fn(*given)
            np.testing.assert_array_equal(compiled(*(x.item() for x in given)), expected)


def untraced(name, monkeypatch):
    """A copy of a module, its functions as they are written."""
    original = importlib.import_module(f"nbflash.cuda.{name}")
    monkeypatch.setattr(tracing, "unrolled", lambda fn: fn)
    module = python.ModuleType(original.__name__)
    exec(compile(Path(original.__file__).read_text(), original.__file__, "exec"), vars(module))
    return module


@pytest.mark.parametrize("name", EMITTED)
def test_what_is_emitted(name, monkeypatch):
    call, kinds, expected, constants = EMITTED[name]
    module, found = untraced(name.rpartition(".")[0], monkeypatch), []

    def note(text, operands, result=None, **_):
        found.append((" ".join(text.split()), [isinstance(x.value, ir.Constant) for x in operands]))
        if result is not None:
            first = operands[0]
            kind = first.context.get_value_type(result)
            return first.new(result, ir.Constant(kind, ir.Undefined))
        return None

    module.emit = note
    traced(lambda *given: (call(module, *given), given[0])[1], *kinds)
    text, are_constant = found[0]
    assert text == expected
    assert [i for i, x in enumerate(are_constant) if x] == constants


def test_what_is_past_the_end_is_not_read(monkeypatch):
    """Of 16 bytes all, or none: zeros take their place."""
    module, sizes = untraced("ptx.cp_async", monkeypatch), []
    module.emit = lambda text, operands, **_: sizes.append(str(operands[2].value))
    kinds = uint32, CPointer(int32), int64, boolean
    traced(lambda *given: (copied(module, *given), given[0])[1], *kinds)
    assert sizes[0].endswith("i32 16, i32 0")


@pytest.mark.parametrize(("of_a", "of_b"), [(False, True), (True, False)])
def test_transposed_operands_of_wgmma(of_a, of_b, monkeypatch):
    """imm-trans-a comes before imm-trans-b."""
    module, texts = untraced("ptx.wgmma", monkeypatch), []
    module._in_place = lambda acc, text, values, **_: texts.append(text) or acc
    options = {"accumulate": True, "transpose_a": of_a, "transpose_b": of_b}

    def product(x, low):
        return module.wgmma("float16", [x] * 4, (low, 1), (low, 2), **options)[0]

    traced(product, float32, uint32)
    assert texts[0].endswith(f"b, p, 1, 1, {int(of_a)}, {int(of_b)}; }}")


def test_instructions(monkeypatch):
    """Those with one body for the compiler, by PTX ISA's chapters on data movement and barriers."""
    found = {}
    monkeypatch.setattr(
        _asm, "instruction", lambda name, text, *_: found.update({name: " ".join(text.split())})
    )
    for path in sorted((ROOT / "ptx").glob("*.py")):
        if not path.stem.startswith("_") and path.stem != "traced":
            untraced(f"ptx.{path.stem}", monkeypatch)
    expected = dict(line.split(": ", 1) for line in INSTRUCTIONS.read_text().splitlines())
    assert found == expected
