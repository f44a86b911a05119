"""Copies between global tensors and shared tiles, with zero fill and type conversion.

A shared tile is ``rows × width`` elements of the accumulator type with a leading
dimension ``ld``; columns past ``head_dim`` and rows past the end of the sequence are zero.
"""

import numpy as np

from nbflash.ptx._asm import inlined, ir, types
from nbflash.tile.unroll import Scalar, both, fma, load, load4, select, store, store4, unrolled

ACCUMULATOR = {
    "float16": types.float32,
    "bfloat16": types.float32,
    "float32": types.float32,
    "float64": types.float64,
}
PAD = 4  # leading dimensions are 4 mod 32 words, so that columns spread over the banks
# bfloat16 travels as its bits.
STORAGE = {
    "float16": types.float16,
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
}


def _to_accumulator(x, dtype):
    """One stored element as an accumulator element."""
    if isinstance(x, Scalar):
        b = x.builder
        if dtype == "float16":
            return x.new(types.float32, b.fpext(x.value, ir.FloatType()))
        if dtype == "bfloat16":
            i32 = ir.IntType(32)
            bits = b.shl(b.zext(x.value, i32), ir.Constant(i32, 16))
            return x.new(types.float32, b.bitcast(bits, ir.FloatType()))
        return x
    if dtype == "float16":
        return np.float32(x)
    if dtype == "bfloat16":
        return (np.uint32(x) << np.uint32(16)).view(np.float32)
    return x


def _to_storage(x, dtype):
    """One accumulator element, rounded to nearest even, as it is stored."""
    if isinstance(x, Scalar):
        b = x.builder
        if dtype == "float16":
            return x.new(types.float16, b.fptrunc(x.value, ir.HalfType()))
        if dtype == "bfloat16":
            i32, i16 = ir.IntType(32), ir.IntType(16)
            bits = b.bitcast(x.value, i32)
            odd = b.and_(b.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
            rounded = b.add(b.add(bits, ir.Constant(i32, 0x7FFF)), odd)
            half = b.trunc(b.lshr(rounded, ir.Constant(i32, 16)), i16)
            is_nan = b.fcmp_unordered("uno", x.value, x.value)
            return x.new(types.uint16, b.select(is_nan, ir.Constant(i16, 0x7FC0), half))
        return x
    if dtype == "float16":
        return np.float16(x)
    if dtype == "bfloat16":
        bits = int(np.float32(x).view(np.uint32))
        return np.uint16(0x7FC0 if np.isnan(x) else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return x


class TileCopy:
    """Copies of tiles of ``rows`` rows between a global tensor and shared memory.

    A tile is ``rows × width`` accumulator elements with leading dimension ``ld``. Columns
    from ``head_dim`` on and rows from ``valid`` on are zero. In between, the block's threads
    hold the tile in registers, so that a load may be in flight while they compute:

        fetch(source, base, stride, valid, tid) → fragment
        put(smem, at, fragment, factor, tid)           tile at ``at`` = factor · fragment
        drain(smem, at, target, base, stride, valid, factor, tid)    target = factor · tile

    With ``vectors`` four neighbouring elements move at once; rows must be aligned to that.
    With ``transposed`` the shared tile is ``width × rows`` with leading dimension
    ``rows + PAD``; a warp then takes 16 rows by two vectors, which uses whole sectors of
    global memory and meets every bank once.
    """

    def __init__(self, cfg, rows, *, transposed=False):
        dtype, head_dim, width, ld = cfg.dtype, cfg.head_dim, cfg.width, cfg.ld
        threads, ld_rows = cfg.threads, rows + PAD
        lanes = 4 if cfg.vectors else 1
        per_row = width // lanes
        count, rest = divmod(rows * per_row, threads)
        if rest:
            raise ValueError(f"{rows} × {width} elements do not divide among {threads} threads")

        def places(tid):
            """(row, column) of each piece that a thread moves."""
            for u in range(count):
                i = tid + u * threads
                if not transposed:
                    yield i // per_row, i % per_row * lanes
                elif lanes == 4:
                    yield i // 2 % rows, i // (2 * rows) * 8 + i % 2 * 4
                else:
                    yield i % rows, i // rows

        @unrolled
        def fetch(source, base, stride, valid, tid):
            out = []
            for row, column in places(tid):
                inside = row < valid
                if head_dim < width:
                    inside = both(inside, column < head_dim)
                at = select(inside, base + stride * row + column, base)
                pieces = load4(source, at) if lanes == 4 else (load(source, at),)
                out.extend(select(inside, _to_accumulator(x, dtype), 0.0) for x in pieces)
            return tuple(out)

        @unrolled
        def put(smem, at, fragment, factor, tid):
            for u, (row, column) in enumerate(places(tid)):
                pieces = [x * factor for x in fragment[lanes * u : lanes * (u + 1)]]
                if transposed:
                    for lane, x in enumerate(pieces):
                        store(smem, at + (column + lane) * ld_rows + row, x)
                    continue
                to = at + row * ld + column
                if lanes == 4:
                    store4(smem, to, pieces)
                else:
                    store(smem, to, pieces[0])

        @unrolled
        def to_storage(x):
            return _to_storage(x, dtype)

        @inlined
        def drain(smem, at, target, base, stride, valid, factor, tid):
            for i in range(tid, rows * width, threads):
                row, column = i // width, i % width
                if row < valid and column < head_dim:
                    x = to_storage(smem[at + row * ld + column] * factor)
                    target[base + row * stride + column] = x

        self.fetch, self.put, self.drain = fetch, put, drain


@unrolled
def all_finite(fragment):
    """0 if every element is finite, else NaN."""
    bad = fragment[0] * 0.0
    for x in fragment[1:]:
        bad = fma(x, 0.0, bad)
    return bad
