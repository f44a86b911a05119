"""What the ping-pong mainloop does where P, computed with the m there was, is too large.

S has left its registers to P by then. Up to 2^100 P, l and O shrink; beyond that S is computed
once more, from memory: 100 times as slowly as the tile, and as rarely as a score is 2^100 beyond
all before.
"""

from nbflash.backends.sm90.shared.online_softmax import make_online_softmax
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import equal, fma, load4, opaque, select, unrolled
from nbflash.cuda.tile.warp_math import row_of_thread, unpack_half
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep, row_of


def make_scores_again(cfg):
    """``scores_again(where, keep, operands, thread)``: S of a tile, from memory.

    ``where`` is the tile's first key, row tile, and batch and head in one number.
    """
    TILE_M, PIECES, SIGN = cfg.tile_m, cfg.head_dim // 8, -1.0 if cfg.negate else 1.0
    PAIRS, ZERO = cfg.tile_n // 4, types.float32(0)
    START = (ZERO,) * (2 * PAIRS)
    apply_keep = make_apply_keep(cfg.tile_n, 0)

    @unrolled
    def add_products(total, q, q_at, k, k_at):
        """``total`` and 8 products more."""
        for a, b in zip(load4(q, q_at), load4(k, k_at), strict=True):
            for x, y in zip(unpack_half(cfg.dtype, a), unpack_half(cfg.dtype, b), strict=True):
                total = fma(x, y, total)
        return total

    @unrolled
    def put(s, pair, upper, below):
        """The scores of both rows in place: ``pair`` counts a row's columns of this thread."""
        first, values = pair // 2 * 4 + pair % 2, (upper * SIGN, below * SIGN)
        return tuple(
            select(equal(first, i - 2 * row_of(i)), values[row_of(i)], x) for i, x in enumerate(s)
        )

    @inlined
    def scores_again(where, keep, operands, thread):
        (n0, row, bh), (q, k, q_stride, k_stride, nq, nk, heads, group) = where, operands
        b, h = divmod_int32(bh, heads)
        h_kv, _ = divmod_int32(h, group)
        upper, column = row * TILE_M + row_of_thread(thread), n0 + thread % 4 * 2
        q_head = b * q_stride[0] + h * q_stride[2]
        k_head = b * k_stride[0] + h_kv * k_stride[2]
        # Those behind the last row or key count nowhere.
        q_upper = (q_head + min(upper, nq - 1) * q_stride[1]) >> 1
        q_below = (q_head + min(upper + 8, nq - 1) * q_stride[1]) >> 1
        # Loops that stay loops: registers are few.
        s, pairs, pieces = START, opaque(types.int32(PAIRS)), opaque(types.int32(PIECES))
        for pair in range(pairs):
            key = min(column + (pair >> 1) * 8 + (pair & 1), nk - 1)
            k_at = (k_head + key * k_stride[1]) >> 1
            above, below = ZERO, ZERO
            for piece in range(pieces):
                above = add_products(above, q, q_upper + 4 * piece, k, k_at + 4 * piece)
                below = add_products(below, q, q_below + 4 * piece, k, k_at + 4 * piece)
            s = put(s, types.int32(pair), above, below)
        return apply_keep(s, keep)

    return scores_again


def make_recover(cfg, hooks):
    """``recover(weights, m, l, sums, alpha, scale, where, keep, scoring, ramp, thread)``: P, m, l,
    Σ P and α after `OnlineSoftmax.update`, whose they are if nothing is too large.
    """
    scores_again = make_scores_again(cfg)
    softmax = make_online_softmax(cfg.tile_n, cfg.dtype)
    careful, shrunk = softmax.careful, softmax.shrunk
    lost, outgrown, functions = softmax.lost, softmax.outgrown, hooks.again

    @inlined
    def recover(weights, m, l, sums, alpha, scale, where, keep, scoring, ramp, thread):
        if lost(sums):
            keep = opaque(keep[0]), opaque(keep[1])  # or 64 predicates are kept for here
            s = scores_again(where, keep, scoring[1], thread)
            s = functions(s, keep, ramp, scoring[0], thread)
            weights, m, l, sums, _, alpha = careful(s, m, l, scale)
        elif outgrown(sums):
            weights, m, l, sums, alpha = shrunk(weights, m, l)
        return weights, m, l, sums, alpha

    return recover
