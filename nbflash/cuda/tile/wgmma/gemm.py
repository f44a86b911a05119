"""The two products of attention by wgmma, from tiles in panels of 64 columns.

A shared tile of ``rows × width`` is a row of panels, each ``rows × 64`` (128 bytes a row), swizzled
by 128 bytes. A matrix descriptor is two words:

    lower    address / 16  |  bytes from panel to panel / 16, of an operand along n  << 16
    upper    1024 / 16, from 8 rows to the next 8  |  swizzle of 128 bytes  << 30

    S = Q Kᵀ     Q and K run along head_dim, the contraction:  a step of 16 is 32 bytes on
    O += P V     V runs along head_dim, which is n:            a step of 16 is 16 rows on
"""

from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.ptx.wgmma import settle, wgmma
from nbflash.cuda.tile.tracing import unrolled

PANEL = 64  # columns: 128 bytes, the span of the swizzle
ROW_BYTES = 2 * PANEL
ALIGNMENT = 1024  # of a tile
STEP = 16  # contraction of one wgmma
UPPER = 1 << 30 | ALIGNMENT >> 4


@inlined
def lower(address, panel_bytes):
    """The lower word of a descriptor; an operand along k has no use for ``panel_bytes``."""
    return (panel_bytes >> 4 << 16) + (address >> 4)


def make_gemm_qk(dtype, head_dim, tile_m, tile_n, *, negate=False, accumulate=False):
    """``issue(s, q, k)``: S = Q Kᵀ (or −Q Kᵀ, or S += Q Kᵀ), of the lower words of Q and K."""

    @unrolled
    def issue(s, q, k):
        for i in range(-(-head_dim // STEP)):
            panel, inside = divmod(i * STEP, PANEL)
            a = q + (panel * tile_m * ROW_BYTES + 2 * inside >> 4), UPPER
            b = k + (panel * tile_n * ROW_BYTES + 2 * inside >> 4), UPPER
            s = wgmma(dtype, s, a, b, accumulate=accumulate or i > 0, negate_a=negate)
        return s

    return issue


def make_gemm_pv(dtype, tile_n):
    """``issue(acc, p, v)``: O += P V, of P in registers and the lower word of V."""

    @unrolled
    def issue(acc, p, v):
        for i in range(tile_n // STEP):
            step = tuple(p[4 * i : 4 * i + 4])
            b = v + (i * STEP * ROW_BYTES >> 4), UPPER
            acc = wgmma(dtype, acc, step, b, transpose_b=True)
        return acc

    return issue


@unrolled
def after_wait(acc):
    """:func:`~nbflash.cuda.ptx.wgmma.settle` as device code."""
    return settle(acc)
