"""As :mod:`.compute`, of 8-bit quantised caches: :mod:`nbflash.backends.split_kv.units`."""

import math

from nbflash.backends.sm80.decode.config import KEYS
from nbflash.backends.sm80.decode.score import make_scored
from nbflash.backends.split_kv.units import (
    LEAST_UNIT,
    changes,
    finite,
    in_own_units,
    in_units,
    out_of_units,
    scale_scores,
    unit_above,
)
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.finite import poisoned
from nbflash.cuda.tile.float_bits import EXPONENT
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.quantised_gemm import (
    make_stored_products,
    make_stored_q,
    make_stored_scores,
)
from nbflash.cuda.tile.mma.softmax import make_softmax
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import load2, maximum, unrolled
from nbflash.cuda.tile.warp_reduce import QUAD, across_lanes
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep


def make_compute(cfg):
    """``load_q, start, step, finish`` as :func:`.compute.make_compute` has them.

    ``q_factors`` undo the factors of a lane's rows of Q. The state has the rows' units, too.
    """
    V, SCALES, ZERO = cfg.kv_bytes // 4, cfg.kv_bytes // 2, types.float32(0)
    M_START = (types.float32(-math.inf),) * 2
    O_START = (ZERO,) * Fragment(1, cfg.width).size
    START = M_START, (ZERO,) * 2, O_START, (types.int32(LEAST_UNIT),) * 2

    (load_q_row, put_q), scores = make_stored_q(cfg), make_stored_scores(cfg)
    add_products, add_finite = make_stored_products(cfg)
    softmax, pack_p = make_softmax(1, KEYS), Fragment(1, KEYS).make_pack("float16")
    row_max, rescale = softmax.row_max, softmax.rescale
    probabilities, row_sums = softmax.probabilities, softmax.row_sums
    add_sums = softmax.add_sums
    scale_rows, apply_keep = Fragment(1, cfg.width).make_scale_rows(), make_apply_keep(KEYS, 0)
    scored = make_scored(cfg)

    @inlined
    def row_of_q(q, q_stride, rows, row, lane):
        """Rows behind the last repeat it."""
        first, count, pack, start = rows
        token, head = divmod_int32(types.int32(min(first + row, count - 1)), pack)
        at = (start + token * q_stride[1] + head * q_stride[2]) // 2
        return load_q_row(q, at, types.int32(lane & 3))

    @inlined
    def load_q(smem, first, word, q, q_stride, rows, thread):
        lane = types.int32(thread & 31)
        upper, upper_inverse = row_of_q(q, q_stride, rows, types.int32(lane >> 2), lane)
        below, below_inverse = row_of_q(q, q_stride, rows, types.int32((lane >> 2) + 8), lane)
        if thread < 32:
            put_q(smem, types.int32(word + 4 * lane), upper, below)
        return upper_inverse, below_inverse

    @unrolled
    def load_scales(smem, at):
        """The bits of the scales of a lane's keys."""
        return tuple(x for i in range(0, KEYS, 8) for x in load2(smem, at + i))

    @unrolled
    def unit_of(scales):
        """The unit of scales of V, of all keys."""
        largest = scales[0] & EXPONENT
        for x in scales[1:]:
            largest = maximum(largest, x & EXPONENT)
        return unit_above(across_lanes((largest,), QUAD, maximum)[0])

    @inlined
    def step(smem, word, first, ring, hidden, keep, state, q_factors, scoring, lane):
        m, l, acc, unit = state
        stage, r, c = types.int32(word + (ring - first) // 4), lane >> 2, types.int32(lane & 3)
        own, r = types.int32(stage + SCALES + 2 * c), types.int32(r)
        # S = Q Kᵀ ∘ scale
        s = scores(smem, types.int32(word + 4 * lane), stage, r, c)
        s = scale_scores(s, load_scales(smem, own), q_factors)
        s, factor = scored(s, scoring)
        if hidden:
            s = apply_keep(s, keep)
        # P = 2^(S · factor − m)
        m_new = row_max(m, s, factor)
        p = probabilities(s, m_new, factor)
        alpha, sums = rescale(m, m_new), row_sums(p)
        l = add_sums(l, alpha, sums)
        # P ∘ scale of V / unit
        scales, bad = load_scales(smem, types.int32(own + KEYS)), types.int32(0)
        if hidden:
            scales, bad = finite(scales)
            p, alpha, unit = in_own_units(p, alpha, scales, unit)
        else:
            p, alpha, unit = in_units(p, alpha, scales, unit, unit_of(scales))
        # O = α O + P V
        if changes(alpha):
            acc = scale_rows(acc, alpha)
        v, key, packed = types.int32(stage + V), types.int32(2 * c), pack_p(p)
        if hidden:
            acc, bad = add_finite(acc, packed, smem, v, key, r, bad)
            l = poisoned(l, (types.uint32(keep[0] & bad), types.uint32(keep[1] & bad)))
        else:
            acc = add_products(acc, packed, smem, v, key, r)
        return m_new, l, acc, unit

    @inlined
    def finish(state):
        m, l, acc, unit = state
        return out_of_units(acc, unit), m, l

    return load_q, START, step, finish
