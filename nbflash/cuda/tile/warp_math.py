"""For ``@unrolled`` functions of tensor-core kernels: packed halves, a fast log2, votes."""

from struct import Struct

import numpy as np

from nbflash.cuda.ptx._asm import cuda, inline_ptx, inlined, ir, types
from nbflash.cuda.tile.tracing import FULL_WARP, Scalar, select, unrolled

_HALVES, _HALF_FLOATS, _FLOATS = Struct("=2H"), Struct("=2e"), Struct("=2f")
_WORD, _WORDS = Struct("=I"), Struct("=2I")


def log2(x):
    """``log2(x)``, 0 of 1, else within 2^-22 · max(|log2 x|, 1) of it: ``lg2.approx.ftz.f32``."""
    if not isinstance(x, Scalar):  # as far off as the instruction may be
        y = np.log2(x)
        return y if x == 1 or not np.isfinite(y) else y + max(abs(y), 1) * np.float32(2**-22)
    value = inline_ptx(x.builder, "lg2.approx.ftz.f32 $0, $1;", "=f,f", x.value.type, [x.value])
    return x.new(x.type, value)


def approximate_reciprocal(x):
    """``1 / x`` within an ulp: ``rcp.approx.ftz.f32``."""
    if not isinstance(x, Scalar):
        return np.float32(1) / x
    value = inline_ptx(x.builder, "rcp.approx.ftz.f32 $0, $1;", "=f,f", x.value.type, [x.value])
    return x.new(x.type, value)


def pack_half(dtype, low, high):
    """Two float32 rounded to ``dtype`` and packed: ``cvt.rn.f16x2.f32`` or ``bf16x2``."""
    if not isinstance(low, Scalar):
        if dtype == "float16":
            return np.array((low, high), np.float16).view(np.uint32)[0]
        return np.uint32(_bfloat16_bits(low) | _bfloat16_bits(high) << 16)
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    text, word = f"cvt.rn.{kind}.f32 $0, $1, $2;", ir.IntType(32)
    value = inline_ptx(low.builder, text, "=r,f,f", word, [high.value, low.value])
    return low.new(types.uint32, value)


def _bfloat16_bits(x):
    """A float32 as the bits of a bfloat16, rounded to nearest even."""
    (bits,) = _WORD.unpack(x)
    return 0x7FC0 if x != x else bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _vote(condition, text):
    b, i32 = condition.builder, ir.IntType(32)
    return inline_ptx(b, text, "=r,r", i32, [b.zext(condition.value, i32)], side_effect=True)


def any_lane(condition):
    """Whether the condition holds in any lane of the warp: ``vote.sync.any``."""
    if not isinstance(condition, Scalar):
        return bool(cuda.any_sync(FULL_WARP, condition))
    text = """{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, -1;
    selp.b32 $0, 1, 0, q; }"""
    b, zero = condition.builder, ir.Constant(ir.IntType(32), 0)
    return condition.new(types.boolean, b.icmp_signed("!=", _vote(condition, text), zero))


def ballot(condition):
    """The lanes in which the condition holds, as the bits of an int32: ``vote.sync.ballot``."""
    if not isinstance(condition, Scalar):
        return np.uint32(cuda.ballot_sync(FULL_WARP, condition)).astype(np.int32)
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return condition.new(types.int32, _vote(condition, text))


def unpack_half(dtype, word):
    """The two float32 that :func:`pack_half` packed, low half first."""
    if not isinstance(word, Scalar):
        if dtype == "float16":
            return tuple(map(np.float32, _HALF_FLOATS.unpack(word)))
        low, high = _HALVES.unpack(word)
        return tuple(map(np.float32, _FLOATS.unpack(_WORDS.pack(low << 16, high << 16))))
    b, i32 = word.builder, ir.IntType(32)
    if dtype == "bfloat16":
        words = (
            b.shl(word.value, ir.Constant(i32, 16)),
            b.and_(word.value, ir.Constant(i32, 0xFFFF0000)),
        )
        return tuple(word.new(types.float32, b.bitcast(x, ir.FloatType())) for x in words)
    i16 = ir.IntType(16)
    halves = b.trunc(word.value, i16), b.trunc(b.lshr(word.value, ir.Constant(i32, 16)), i16)
    return tuple(
        word.new(types.float32, b.fpext(b.bitcast(x, ir.HalfType()), ir.FloatType()))
        for x in halves
    )


def subtract_float16(a, b):
    """The differences of two packed pairs of float16: ``sub.rn.f16x2``."""
    if not isinstance(a, Scalar):
        pairs = zip(*(unpack_half("float16", np.uint32(x)) for x in (a, b)), strict=True)
        return pack_half("float16", *(x - y for x, y in pairs))
    words = [a.value, a.like(b).value]
    text = "sub.rn.f16x2 $0, $1, $2;"
    return a.new(a.type, inline_ptx(a.builder, text, "=r,r,r", ir.IntType(32), words))


def permute(a, b, selector):
    """Four bytes of two words, by the nibbles of a uint32: ``prmt.b32``."""
    if not isinstance(a, Scalar):
        both = int(a) | int(b) << 32
        taken = (both >> 8 * (int(selector) >> 4 * i & 7) & 0xFF for i in range(4))
        return np.uint32(sum(byte << 8 * i for i, byte in enumerate(taken)))
    words = [a.value, a.like(b).value, a.like(selector).value]
    text = "prmt.b32 $0, $1, $2, $3;"
    return a.new(a.type, inline_ptx(a.builder, text, "=r,r,r,r", ir.IntType(32), words))


@unrolled
def lanes_of(condition):
    """:func:`ballot` as device code."""
    return ballot(condition)


def make_warpgroup_of(count):
    """``warpgroup_of(thread)``, of ``count``.

    By votes: the compiler then knows it to be the same across a warp.
    """

    @unrolled
    def warpgroup_of(thread):
        number = thread * 0
        for i in range(1, count):
            number = number + select(any_lane(thread >= 128 * i), number * 0 + 1, number * 0)
        return number

    return warpgroup_of


@inlined
def row_of_thread(thread):
    """The upper one of a thread's two rows of a fragment, over warpgroups; the other is 8 below."""
    return thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4
