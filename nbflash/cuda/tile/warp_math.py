"""For ``@unrolled`` functions of tensor-core kernels: packed halves, a fast log2, votes."""

from struct import Struct

import numpy as np

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.traced import Scalar, emit
from nbflash.cuda.tile.cells import as_uint32, bytes_by, float32_of, pack_float16
from nbflash.cuda.tile.tracing import FULL_WARP, select, unrolled
from nbflash.definitions.constants import WARP

_WORD = Struct("=I")


def log2(x):
    """``log2(x)``, 0 of 1, else within 2^-22 · max(|log2 x|, 1) of it: ``lg2.approx.ftz.f32``."""
    if not isinstance(x, Scalar):  # as far off as the instruction may be
        y = np.log2(x)
        return y if x == 1 or not np.isfinite(y) else y + max(abs(y), 1) * np.float32(2**-22)
    return emit("lg2.approx.ftz.f32 $0, $1;", [x], x.type)


def approximate_reciprocal(x):
    """``1 / x`` within an ulp: ``rcp.approx.ftz.f32``."""
    if not isinstance(x, Scalar):
        return np.float32(1) / x
    return emit("rcp.approx.ftz.f32 $0, $1;", [x], x.type)


def pack_half(dtype, low, high):
    """Two float32 rounded to ``dtype`` and packed: ``cvt.rn.f16x2.f32`` or ``bf16x2``."""
    if not isinstance(low, Scalar):
        if dtype == "float16":
            return pack_float16(low, high)
        return as_uint32(_bfloat16_bits(low) | _bfloat16_bits(high) << 16)
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    return emit(f"cvt.rn.{kind}.f32 $0, $1, $2;", [high, low], types.uint32)


def _bfloat16_bits(x):
    """A float32 as the bits of a bfloat16, rounded to nearest even."""
    (bits,) = _WORD.unpack(x)
    return 0x7FC0 if x != x else bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _vote(condition, text):
    return emit(text, [condition.converted(types.int32)], types.int32, keep=True)


def any_lane(condition):
    """Whether the condition holds in any lane of the warp: ``vote.sync.any``."""
    if not isinstance(condition, Scalar):
        return bool(cuda.any_sync(FULL_WARP, condition))
    text = """{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, -1;
    selp.b32 $0, 1, 0, q; }"""
    return _vote(condition, text).differs(0)


def ballot(condition):
    """The lanes in which the condition holds, as the bits of an int32: ``vote.sync.ballot``."""
    if not isinstance(condition, Scalar):
        return np.uint32(cuda.ballot_sync(FULL_WARP, condition)).astype(np.int32)
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return _vote(condition, text)


def unpack_half(dtype, word):
    """The two float32 that :func:`pack_half` packed, low half first."""
    if not isinstance(word, Scalar):
        bits, values = int(word), float32_of(dtype)
        return values[bits & 0xFFFF], values[bits >> 16 & 0xFFFF]
    word = word.bits_as(types.uint32)
    if dtype == "bfloat16":
        return tuple(x.bits_as(types.float32) for x in (word << 16, word & 0xFFFF0000))
    halves = (x.converted(types.uint16) for x in (word, word >> 16))
    return tuple(x.bits_as(types.float16).converted(types.float32) for x in halves)


def subtract_float16(a, b):
    """The differences of two packed pairs of float16: ``sub.rn.f16x2``."""
    if not isinstance(a, Scalar):
        (a_low, a_high), (b_low, b_high) = unpack_half("float16", a), unpack_half("float16", b)
        return pack_float16(a_low - b_low, a_high - b_high)
    return emit("sub.rn.f16x2 $0, $1, $2;", [a, a.like(b)], a.type)


def permute(a, b, selector):
    """Four bytes of two words, by the nibbles of a uint32: ``prmt.b32``."""
    if not isinstance(a, Scalar):
        both = int(a) & 0xFFFFFFFF | (int(b) & 0xFFFFFFFF) << 32
        taken = map(both.to_bytes(8, "little").__getitem__, bytes_by(selector))
        return as_uint32(int.from_bytes(bytes(taken), "little"))
    return emit("prmt.b32 $0, $1, $2, $3;", [a, a.like(b), a.like(selector)], a.type)


@unrolled
def lanes_of(condition):
    """:func:`ballot` as device code."""
    return ballot(condition)


@inlined
def sums_of_lanes(own, lane):
    """The sum of the values of this lane and of those before it, int32; all lanes call it."""
    total, step = types.int32(own), types.int32(1)
    while step < WARP:
        x = cuda.shfl_up_sync(FULL_WARP, total, step)
        if lane >= step:
            total = types.int32(total + x)
        step = types.int32(2 * step)
    return total


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
