"""Addresses as mbarriers, TMA and wgmma take them."""

from nbflash.cuda.ptx._asm import SIM, hopper, types
from nbflash.cuda.ptx.traced import emit
from nbflash.cuda.tile.tracing import unrolled


@unrolled
def shared_address(smem):
    """32-bit address of a shared array: ``cvta.to.shared``."""
    if SIM:
        return hopper().shared_address(smem)
    text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
    return emit(text, [smem.word_of()], types.uint32)


@unrolled
def global_address(memory, at):
    """64-bit address of element ``at`` of a kernel's pointer."""
    if SIM:
        return hopper().global_address(memory, at)
    return memory.word_of(at)
