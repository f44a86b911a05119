"""Atomic sums in global memory, for ``@unrolled`` functions."""

from nbflash.cuda.ptx._asm import cuda, inline_ptx, ir
from nbflash.cuda.tile.tracing import Memory, check_quad


def atomic_add(memory, index, value):
    """``memory[index] += value``, atomically: ``red.relaxed.gpu.add``."""
    if not isinstance(memory, Memory):
        cuda.atomic.add(memory, index, value)
        return
    kind, letter = ("f32", "f") if memory.itemsize == 4 else ("f64", "d")
    operands = [memory.address(index, 1), value.value]
    text, void = f"red.relaxed.gpu.add.{kind} [$0], $1;", ir.VoidType()
    inline_ptx(memory.builder, text, f"l,{letter}", void, operands, side_effect=True)


def atomic_add4(memory, index, values):
    """Four neighbours at once: ``red.relaxed.gpu.add.v4.f32``, from compute capability 9.0."""
    if not isinstance(memory, Memory):
        check_quad(index)
        for lane, value in enumerate(values):
            cuda.atomic.add(memory, index + lane, value)
        return
    operands = [memory.address(index, 1), *(v.value for v in values)]
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    inline_ptx(memory.builder, text, "l,f,f,f,f", ir.VoidType(), operands, side_effect=True)
