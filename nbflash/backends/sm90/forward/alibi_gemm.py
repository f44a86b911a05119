"""ALiBi in the Hopper forward, for heads of one panel: a product of the tensor cores.

With q' = q + nk − nq, the key that query q stands at, and x = slope / scale, or −slope / scale
where q' is at most the tile's first key n0, ALiBi adds on one side of the diagonal

    −|x| |q' − kv| = x j − x (q' − n0)                                   kv = n0 + j
    S = Q Kᵀ + A Rᵀ         A[i] = (x₁, x₂, x₃, 0, …)     R[j] = (j, j, j, 0, …)

in bfloat16, whatever Q is: x₁ + x₂ + x₃ = x exactly, 8 bits each, and j < 2⁸. The rest is the same
for a row. It moves m for the time of the tile, P = 2^(S · unit − (m + x (q' − n0) · unit)), and no
score has an instruction of its own; but in the few tiles that the diagonal crosses, where

    S − 2 max(x (kv − q'), 0)

falls on both sides. A row keeps its own m: moved there and back in every tile it would drift. The
LSE is within 2⁻¹⁶ · slope, for which slopes are bounded (`nbflash.cuda.score_params.STEEPEST`). R
is in shared memory, in rows of a panel's width; A is a register operand:

    lane 4 r + c of a warp     c = 0: x₁, x₂     c = 1: x₃, 0     else zeros     of rows r and r + 8
"""

from nbflash.backends.sm90.forward.score_hooks import ScoreHooks, make_score_hooks
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import fence_proxy_async
from nbflash.cuda.ptx.wgmma import wgmma
from nbflash.cuda.tile.float_bits import bits_float, float_bits, unsigned
from nbflash.cuda.tile.tracing import equal, fma, maximum, opaque, select, store4, unrolled
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES, UPPER, lower
from nbflash.cuda.tile.wgmma.softmax import column_of, make_apply_keep, row_of

_UPPER, _LOWER = -(1 << 16), (1 << 16) - 1


@unrolled
def _store_row(smem, at, mirror, number):
    """The first 32 bytes of a row of R, of ``number`` as a float32."""
    half, zero = float_bits(number) >> 16, float_bits(number) & 0
    store4(smem, at + mirror, (half << 16 | half, half, zero, zero))
    store4(smem, at + (mirror ^ 4), (zero, zero, zero, zero))


@unrolled
def _words(x, column):
    """A thread's words of A, of the columns 2 ``column`` and the next."""
    first = float_bits(x) & _UPPER
    rest = x - bits_float(first)
    second = float_bits(rest) & _UPPER
    third = float_bits(rest - bits_float(second)) >> 16 & _LOWER
    pair = first >> 16 & _LOWER | second
    return unsigned(select(equal(column, 0), pair, select(equal(column, 1), third, 0)))


@unrolled
def _issue(s, word, ramp):
    """S = A Rᵀ."""
    zero = word & 0
    return wgmma("bfloat16", s, (word, word, zero, zero), (ramp, UPPER), accumulate=False)


@unrolled
def _in_tile(m, step, start):
    """m beside what the tile's scores leave out; both rows of a thread."""
    return fma(step, start, m[0]), fma(step, start + 8.0, m[1])


@unrolled
def _risen(m, before, now):
    return tuple(x + (b - a) for x, a, b in zip(m, before, now, strict=True))


@unrolled
def _climb(s, x, first):
    """S + x j, of a thread whose first j is ``first``."""
    return tuple(fma(x, first + float(column_of(i)), y) for i, y in enumerate(s))


@unrolled
def _bend(s, x, first, start, zero):
    """S − 2 max(x (kv − q'), 0)."""
    ahead, out = x * (first - start), []
    for i, y in enumerate(s):
        beyond = fma(x, float(column_of(i) - 8 * row_of(i)), ahead)
        out.append(fma(maximum(beyond, zero), -2.0, y))
    return tuple(out)


def make_fill_ramp(cfg):
    """``fill_ramp(smem, place, thread)``: R, before anyone asks for a product."""
    RAMP, TILE_N, AT = cfg.ramp, cfg.tile_n, cfg.smem.ramp // 4

    @inlined
    def fill_ramp(smem, place, thread):
        if RAMP:
            _, words = place
            if thread < TILE_N:
                row = types.int32(words + AT + thread * (ROW_BYTES // 4))
                _store_row(smem, row, types.int32((thread & 7) * 4), types.float32(thread))
            fence_proxy_async()

    return fill_ramp


def make_straight(cfg):
    """``straight(row, n0, params, warpgroup)``: whether the diagonal does not cross a warpgroup's
    part of a tile. Without a ramp it does not matter.
    """
    RAMP, TILE_M, TILE_N = cfg.ramp, cfg.tile_m, cfg.tile_n

    @inlined
    def straight(row, n0, params, warpgroup):
        if not RAMP:
            return True
        nq, nk = params[0]
        start = types.int32(row * TILE_M + 64 * warpgroup + nk - nq - n0)
        return start >= TILE_N - 1 or start + 63 <= 0

    return straight


def make_ramp_hooks(cfg, masked, first):
    """`ScoreHooks` of ALiBi. ``ramp``: x and q' − n0 of a thread's upper row, its word of A."""
    RAMP, ZERO, MINUS = cfg.smem.ramp, types.float32(0), types.float32(-1)
    apply_keep = make_apply_keep(cfg.tile_n, 0)
    unit_of = make_score_hooks(cfg).unit_of

    @inlined
    def before_qk(acc_s, m_i, n0, unit, scoring, thread):
        held, (_, _, q, _), params, _ = scoring
        nq, nk = params[0]
        start = types.float32(types.int32(q + nk - nq - n0))
        x = held[0] if start > 0 else held[0] * MINUS
        ramp = x, start, _words(x, types.int32(opaque(thread) & 3))
        return acc_s, _in_tile(m_i, x * unit, start), ramp

    @inlined
    def issue(acc_s, base, ramp):
        """S = A Rᵀ."""
        return _issue(acc_s, ramp[2], types.uint32(lower(base + RAMP, 16)))

    @inlined
    def first_of(thread):
        return types.float32(types.int32(2 * (opaque(thread) & 3)))

    @inlined
    def bent(acc_s, ramp, thread):
        return _bend(acc_s, ramp[0], first_of(thread), ramp[1], ZERO)

    @inlined
    def after_qk(acc_s, ramp, scoring, thread):
        return bent(acc_s, ramp, thread) if masked else acc_s

    @inlined
    def again(acc_s, keep, ramp, scoring, thread):
        acc_s = bent(_climb(acc_s, ramp[0], first_of(thread)), ramp, thread)
        return apply_keep(acc_s, keep)

    @inlined
    def after_softmax(m_i, m_row, ramp, unit):
        """A row's first tile sets m; after it a row keeps its own, raised as that of the tile."""
        if first:
            return _in_tile(m_i, ramp[0] * unit * MINUS, ramp[1])
        return _risen(m_row, _in_tile(m_row, ramp[0] * unit, ramp[1]), m_i)

    return ScoreHooks(unit_of, before_qk, issue, after_qk, again, after_softmax)
