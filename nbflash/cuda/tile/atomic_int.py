"""Atomics on int32 in global and shared memory, for ``@unrolled`` functions."""

from nbflash.cuda.ptx._asm import cuda
from nbflash.cuda.ptx.traced import Memory, emit
from nbflash.cuda.tile.tracing import unrolled


@unrolled
def fetch_add(memory, index, value):
    """``memory[index] += value`` in global memory; what was there: ``atom.relaxed.gpu.add``."""
    if not isinstance(memory, Memory):
        return cuda.atomic.add(memory, index, value)
    operands = [memory.pointer_to(index), value]
    return emit("atom.relaxed.gpu.add.s32 $0, [$1], $2;", operands, value.type, keep=True)


@unrolled
def set_bits(memory, index, value):
    """``memory[index] |= value`` in shared memory: ``red.relaxed.cta.or``."""
    if not isinstance(memory, Memory):
        cuda.atomic.or_(memory, index, value)
        return
    emit("red.relaxed.cta.or.b32 [$0], $1;", [memory.pointer_to(index), value], keep=True)
