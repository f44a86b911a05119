"""Addresses as mbarriers, TMA and wgmma take them."""

from nbflash.cuda.ptx._asm import SIM, hopper, inline_ptx, ir, types
from nbflash.cuda.tile.tracing import Scalar, unrolled


@unrolled
def shared_address(smem):
    """32-bit address of a shared array: ``cvta.to.shared``."""
    if SIM:
        return hopper().shared_address(smem)
    b = smem.builder
    address = b.ptrtoint(smem.pointer, ir.IntType(64))
    text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
    word = inline_ptx(b, text, "=r,l", ir.IntType(32), [address])
    return Scalar(smem.context, b, types.uint32, word)


@unrolled
def global_address(memory, at):
    """64-bit address of element ``at`` of a kernel's pointer."""
    if SIM:
        return hopper().global_address(memory, at)
    b = memory.builder
    word = b.ptrtoint(memory.address(at, 1), ir.IntType(64))
    return Scalar(memory.context, b, types.uint64, word)
