"""Copies from global to shared memory that need no registers: ``cp.async`` (sm_80 on)."""

from nbflash.cuda.ptx._asm import asynchrony, inline_ptx, ir
from nbflash.cuda.tile.tracing import Memory, unrolled

SHARED = 3  # LLVM's number of the address space


def cp_async4(memory, to, source, at):
    """Four elements of four bytes: ``cp.async.cg.shared.global`` of 16 bytes."""
    if not isinstance(memory, Memory):
        asynchrony().cp_async(memory, to, source, at, 4)
        return
    b = memory.builder
    shared = b.addrspacecast(memory.address(to, 1), ir.PointerType(ir.FloatType(), SHARED))
    operands = [b.ptrtoint(shared, ir.IntType(32)), source.address(at, 1)]
    text = "cp.async.cg.shared.global [$0], [$1], 16;"
    inline_ptx(b, text, "r,l,~{memory}", ir.VoidType(), operands, side_effect=True)


def make_wait():
    """``wait(smem)``: the calling thread's copies have landed: ``cp.async.wait_all``."""

    @unrolled
    def wait(smem):
        if not isinstance(smem, Memory):
            asynchrony().cp_async_wait_all()
        else:
            text, void = "cp.async.wait_all;", ir.VoidType()
            inline_ptx(smem.builder, text, "~{memory}", void, [], side_effect=True)

    return wait
