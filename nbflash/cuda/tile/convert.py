"""Copies between global tensors and shared tiles, with zero fill and type conversion.

A shared tile is ``rows × width`` elements of the accumulator type with a leading
dimension ``ld``; columns past ``head_dim`` and rows past the end of the sequence are zero.
"""

import math

import numpy as np

from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.traced import Scalar
from nbflash.cuda.tile.cp_async import cp_async4
from nbflash.cuda.tile.tracing import equal, load, load4, select, store, store4, total, unrolled

PAD = 4  # leading dimensions are 4 mod 32 words, so that columns spread over the banks


def _to_accumulator(x, dtype):
    """One stored element as an accumulator element."""
    if isinstance(x, Scalar):
        if dtype in ("float16", "int8"):
            return x.converted(types.float32)
        if dtype == "bfloat16":
            return (x.converted(types.uint32) << 16).bits_as(types.float32)
        return _from_e4m3(x) if dtype == "float8_e4m3fn" else x
    if dtype == "float16":
        return np.float32(x)
    if dtype == "bfloat16":
        return (np.uint32(x) << np.uint32(16)).view(np.float32)
    if dtype == "int8":
        return np.float32(x)
    return _from_e4m3(x) if dtype == "float8_e4m3fn" else x


def _from_e4m3(x):
    """Sign, 4 bits of exponent (bias 7) and 3 of mantissa; all ones is NaN, and infinity is none.

    The bits in their places of a float32 are too small by 2^(127 − 7), subnormal numbers too.
    """
    if not isinstance(x, Scalar):
        word = np.uint32(x)
        bits = (word & np.uint32(0x80)) << np.uint32(24) | (word & np.uint32(0x7F)) << np.uint32(20)
        is_nan = word & np.uint32(0x7F) == np.uint32(0x7F)
        return np.float32(np.nan) if is_nan else bits.view(np.float32) * np.float32(2.0**120)
    word = x.converted(types.uint32)
    rest = word & 0x7F
    bits = ((word & 0x80) << 24 | rest << 20).bits_as(types.float32)
    return select(equal(rest, 0x7F), math.nan, bits * 2.0**120)


def widened(x, dtype, accumulator):
    """One stored element of ``dtype`` in the type ``accumulator``, float32 or float64."""
    x = _to_accumulator(x, dtype)
    if accumulator != types.float64:
        return x
    if not isinstance(x, Scalar):
        return np.float64(x)
    if x.type == accumulator:
        return x
    return x.converted(accumulator)


def as_stored(x, dtype):
    """One accumulator element, rounded to nearest even, as it is stored."""
    if isinstance(x, Scalar):
        if dtype == "float16":
            return x.converted(types.float16)
        if dtype == "bfloat16":
            bits = x.bits_as(types.uint32)
            half = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).converted(types.uint16)
            return select(x.is_nan(), 0x7FC0, half)
        return x
    if dtype == "float16":
        return np.float16(x)
    if dtype == "bfloat16":
        bits = int(np.float32(x).view(np.uint32))
        return np.uint16(0x7FC0 if np.isnan(x) else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return x


def make_convert(dtype):
    """``(to_accumulator, to_storage)`` for one element."""

    @unrolled
    def to_accumulator(x):
        return _to_accumulator(x, dtype)

    @unrolled
    def to_storage(x):
        return as_stored(x, dtype)

    return to_accumulator, to_storage


class TileCopy:
    """Copies of tiles of ``rows`` rows between a global tensor and shared memory.

    A shared tile is ``rows × width`` accumulator elements with leading dimension ``ld``, or
    its transpose ``width × rows`` with leading dimension ``rows + PAD``. Rows from ``valid``
    on repeat the last valid row: their scores are masked and their outputs are not stored,
    so only NaNs would matter, and those are then in the tensor itself. Columns from
    ``head_dim`` on are never stored; up to a multiple of four they are zero, since products
    run over whole quads, and beyond that they repeat column 0.

        fill(smem, at, source, base, stride, valid, factor, tid)
            Shared tile at ``at`` = factor · global tile. Each of ``chunks`` passes has all
            its loads in flight before its first store.
        send(smem, at, source, base, stride, valid, tid)
            The same for float32 without registers and without waiting: ``cp.async``.
        drain(smem, at, target, base, stride, valid, factor, tid)
            The other way, for tiles that are not transposed.

    A thread moves pieces: single elements, or with ``cfg.vectors`` (rows aligned to four
    elements) vectors of four, and 4 × 4 blocks where a tile is transposed. Lanes are dealt
    so that a warp reads whole lines and eight lanes meet every bank once:

        row major         lanes along the row
        transposed        lane = 4 c + r  owns block row r (of 4), block column c (of 8)
    """

    def __init__(self, cfg, rows, *, transposed=False, chunks=1):
        dtype, head_dim, width, ld = cfg.dtype, cfg.head_dim, cfg.width, cfg.ld
        threads, ld_rows = cfg.threads, rows + PAD
        lanes = 4 if cfg.vectors else 1
        deep = lanes if transposed else 1
        per_row = width // lanes
        pieces = rows // deep * per_row
        total_count, rest = divmod(pieces, threads)
        if rest:
            raise ValueError(f"{rows} × {width} elements do not divide among {threads} threads")
        passes = min(chunks, total_count)
        passes = next(n for n in range(passes, total_count + 1) if total_count % n == 0)
        count = total_count // passes
        chunk = threads * count
        group = min(4, rows // deep) if deep == 4 else rows  # block rows of neighbouring lanes

        def split(i, u, period):
            """Quotient and remainder of ``i + u·threads`` by ``period``, cheap where it divides."""
            if threads % period == 0:
                return i // period + u * (threads // period), i % period
            return (i + u * threads) // period, (i + u * threads) % period

        def places(first):
            """(row, column) of the first element of each piece that a thread moves."""
            for u in range(count):
                if not transposed:
                    row, column = split(first, u, per_row)
                    yield row, column * lanes
                else:
                    outer, rest = split(first, u, group * per_row)
                    row, column = outer * group + rest % group, rest // group
                    yield row * deep, column * lanes

        def read(source, base, stride, valid, row, column):
            row = select(row < valid, row, valid - 1)
            inside = column < head_dim
            if head_dim < width:
                column = select(inside, column, 0)
            at = base + stride * row + column
            loaded = load4(source, at) if lanes == 4 else (load(source, at),)
            values = [_to_accumulator(x, dtype) for x in loaded]
            if head_dim % 4:  # products run over whole quads of columns
                values = [select(inside, x, 0.0) for x in values]
            return values

        @unrolled
        def fetch(source, base, stride, valid, first):
            return tuple(
                x
                for row, column in places(first)
                for r in range(deep)
                for x in read(source, base, stride, valid, row + r, column)
            )

        @unrolled
        def put(smem, at, fragment, factor, first):
            values = [x * factor for x in fragment]
            for row, column in places(first):
                piece, values = values[: deep * lanes], values[deep * lanes :]
                if transposed:
                    for c in range(lanes):
                        to = at + row + (column + c) * ld_rows
                        if lanes == 4:
                            store4(smem, to, piece[c::4])
                        else:
                            store(smem, to, piece[0])
                elif lanes == 4:
                    store4(smem, at + row * ld + column, piece)
                else:
                    store(smem, at + row * ld + column, piece[0])

        @inlined
        def fill(smem, at, source, base, stride, valid, factor, tid):
            for i in range(passes):
                first = tid + i * chunk
                put(smem, at, fetch(source, base, stride, valid, first), factor, first)

        @unrolled
        def send(smem, at, source, base, stride, valid, tid):
            for i in range(passes):
                for row, column in places(tid + i * chunk):
                    from_row = select(row < valid, row, valid - 1)
                    begin = base + stride * from_row + column
                    cp_async4(smem, at + row * ld + column, source, begin)

        _, to_storage = make_convert(dtype)

        @inlined
        def drain(smem, at, target, base, stride, valid, factor, tid):
            for i in range(tid, rows * width, threads):
                row, column = i // width, i % width
                if row < valid and column < head_dim:
                    x = to_storage(smem[at + row * ld + column] * factor)
                    target[base + row * stride + column] = x

        self.fill, self.send, self.drain = fill, send, drain


def make_finite(cfg, rows):
    """``finite(smem, at, tid)``: whether a row-major shared tile holds no NaN and no infinity.

    A barrier for the whole block.
    """
    zero, ld, threads = cfg.accumulator.numba(0), cfg.ld, cfg.threads
    per_row = cfg.width // 4

    @unrolled
    def probe(smem, at):
        """0 for four finite elements, else NaN."""
        return total(x * 0.0 for x in load4(smem, at))

    @inlined
    def finite(smem, at, tid):
        found = zero
        for i in range(tid, rows * per_row, threads):
            found += probe(smem, at + i // per_row * ld + i % per_row * 4)
        # No conditional expression: CPython 3.12 copies a call that follows one into both of
        # its branches, and the threads of a warp would wait at two barriers.
        return cuda.syncthreads_or(int(found != zero)) == 0

    return finite
