"""Atomics on global memory that order what other blocks wrote.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: atom".
"""

from nbflash.cuda.kinds import uint32, uint64
from nbflash.cuda.ptx._asm import instruction

# (address, limit): counts from 0 to the limit and over again; what was there before. Writes that
# a barrier of its block puts before it are seen by those whom one puts behind a later count.
atom_inc = instruction(
    "atom_inc",
    "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
    (uint64, uint32),
    uint32,
)
