"""Atomic sums in global memory, for ``@unrolled`` functions."""

from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.ptx.traced import Memory, emit
from nbflash.cuda.tile.tracing import check_quad


def atomic_add(memory, index, value):
    """``memory[index] += value``, atomically: ``red.relaxed.gpu.add``."""
    if not isinstance(memory, Memory):
        cuda.atomic.add(memory, index, value)
        return
    text = f"red.relaxed.gpu.add.f{8 * memory.itemsize} [$0], $1;"
    emit(text, [memory.pointer_to(index), value], keep=True)


def atomic_add4(memory, index, values):
    """Four neighbours at once: ``red.relaxed.gpu.add.v4.f32``, from compute capability 9.0."""
    if not isinstance(memory, Memory):
        check_quad(index)
        for lane, value in enumerate(values):
            cuda.atomic.add(memory, index + lane, value)
        return
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    emit(text, [memory.pointer_to(index), *values], keep=True)
