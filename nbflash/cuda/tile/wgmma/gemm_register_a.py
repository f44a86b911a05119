"""A narrow A operand that stays in registers: Q of S = Q Kᵀ, K and V of Sᵀ = K Qᵀ and dPᵀ = V dOᵀ.

A thread holds what a register A is made of (see :mod:`nbflash.cuda.ptx.wgmma`): of every 16 bytes
of its two rows one word, from where TMA has swizzled it to.
"""

from nbflash.cuda.ptx.wgmma import wgmma
from nbflash.cuda.tile.tracing import load, unrolled
from nbflash.cuda.tile.wgmma.gemm import PANEL, ROW_BYTES, STEP, UPPER


def make_load_kept(head_dim):
    """``load_kept(smem, at, swizzle)`` of one panel.

    ``at`` is the thread's first word if nothing was swizzled, ``swizzle`` its row modulo 8.
    """
    if head_dim > PANEL:
        raise ValueError(f"{head_dim=} columns do not stay in registers, {PANEL} do")

    @unrolled
    def load_kept(smem, at, swizzle):
        return tuple(
            load(smem, at + ((swizzle ^ chunk) * 4 + 8 * i * (ROW_BYTES // 4)))
            for chunk in range(2 * -(-head_dim // STEP))
            for i in range(2)
        )

    return load_kept


def make_gemm_kept(dtype, head_dim, *, negate=False, accumulate=False):
    """``issue(s, kept, b)``: S = A Bᵀ, −A Bᵀ or S + A Bᵀ, of A in registers and B's lower word."""

    @unrolled
    def issue(s, kept, b):
        for i in range(-(-head_dim // STEP)):
            a, at = tuple(kept[4 * i : 4 * i + 4]), b + (2 * STEP * i >> 4)
            s = wgmma(dtype, s, a, (at, UPPER), accumulate=accumulate or i > 0, negate_a=negate)
        return s

    return issue
