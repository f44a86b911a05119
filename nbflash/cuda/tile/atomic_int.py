"""Atomics on int32 in global and shared memory, for ``@unrolled`` functions."""

from nbflash.cuda.ptx._asm import cuda, inline_ptx, ir
from nbflash.cuda.tile.tracing import Memory, unrolled


@unrolled
def fetch_add(memory, index, value):
    """``memory[index] += value`` in global memory; what was there: ``atom.relaxed.gpu.add``."""
    if not isinstance(memory, Memory):
        return cuda.atomic.add(memory, index, value)
    operands = [memory.address(index, 1), value.value]
    text, word = "atom.relaxed.gpu.add.s32 $0, [$1], $2;", ir.IntType(32)
    result = inline_ptx(memory.builder, text, "=r,l,r", word, operands, side_effect=True)
    return value.new(value.type, result)


@unrolled
def set_bits(memory, index, value):
    """``memory[index] |= value`` in shared memory: ``red.relaxed.cta.or``."""
    if not isinstance(memory, Memory):
        cuda.atomic.or_(memory, index, value)
        return
    operands = [memory.address(index, 1), value.value]
    text, void = "red.relaxed.cta.or.b32 [$0], $1;", ir.VoidType()
    inline_ptx(memory.builder, text, "l,r", void, operands, side_effect=True)
