"""Keys that stay in registers: the A operand of Sᵀ = K Qᵀ and of dPᵀ = V dOᵀ.

A thread holds what a register A is made of (see :mod:`nbflash.ptx.wgmma`): of every 16 bytes of its
two rows one word, from where the copy engine has swizzled it to.
"""

from nbflash.ptx.wgmma import wgmma
from nbflash.tile.unroll import load, unrolled
from nbflash.tile.wgmma_gemm import PANEL, ROW_BYTES, STEP, UPPER


def make_load_keys(head_dim):
    """``load_keys(smem, at, swizzle)`` of one panel.

    ``at`` is the thread's first word if nothing was swizzled, ``swizzle`` its row modulo 8.
    """
    if head_dim > PANEL:
        raise ValueError(f"{head_dim=} columns of keys do not stay in registers, {PANEL} do")

    @unrolled
    def load_keys(smem, at, swizzle):
        return tuple(
            load(smem, at + ((swizzle ^ chunk) * 4 + 8 * i * (ROW_BYTES // 4)))
            for chunk in range(2 * -(-head_dim // STEP))
            for i in range(2)
        )

    return load_keys


def make_gemm_kept(dtype, head_dim):
    """``issue(s, keys, q)``: Sᵀ = K Qᵀ, of K in registers and the lower word of Q."""

    @unrolled
    def issue(s, keys, q):
        for i in range(-(-head_dim // STEP)):
            b = q + (2 * STEP * i >> 4), UPPER
            s = wgmma(dtype, s, tuple(keys[4 * i : 4 * i + 4]), b, accumulate=i > 0)
        return s

    return issue
