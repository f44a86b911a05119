"""Copies from global to shared memory that need no registers: ``cp.async`` (sm_80 on)."""

from nbflash.cuda.ptx._asm import asynchrony
from nbflash.cuda.ptx.traced import Memory, emit
from nbflash.cuda.tile.tracing import unrolled


def cp_async4(memory, to, source, at):
    """Four elements of four bytes: ``cp.async.cg.shared.global`` of 16 bytes."""
    if not isinstance(memory, Memory):
        asynchrony().cp_async(memory, to, source, at, 4)
        return
    operands = [memory.shared_word_of(to), source.pointer_to(at)]
    emit("cp.async.cg.shared.global [$0], [$1], 16;", operands, memory=True)


def make_wait():
    """``wait(smem)``: the calling thread's copies have landed: ``cp.async.wait_all``."""

    @unrolled
    def wait(smem):
        if not isinstance(smem, Memory):
            asynchrony().cp_async_wait_all()
        else:
            emit("cp.async.wait_all;", [], beside=smem, memory=True)

    return wait
